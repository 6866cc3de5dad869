"""``optimizer_cpu_offload``: float32 shards and states in host memory, stepped there by the same ALTO as the others.

Megatron's own way is an optimizer for the device and some for the host, stepped one by one; the norms of ALTO need all
shards in one step. So Megatron builds without the setting, and then shards move to the host. Until ``step()``, which is
while Megatron unscales, measures and clips, their gradients stay on the device, each at a stand-in for its shard.

    prepare_grads, norm, clip    gradients on the device, at the stand-ins
    step_with_ready_grads        gradients start to the host, on a stream of their own
    ALTO.step, phase one         wave after wave of shards, each when its gradients have arrived
    ALTO.step, phase two         wave after wave, and the weights of each start to the device while the next is stepped
    copy to the model            the device's work from here on comes after these copies; the host does not wait

Host memory of copies is pinned where there is an accelerator. Shards on the device are launched before those of the
host are stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .distributed import PARAM, AltoDistributedOptimizer
from .host_shards import Copies, HostShard, OffloadedALTO
from .layout import main_parameters

FLAG = "optimizer_cpu_offload"

#: Elements of a wave: what the host steps while the next ones travel. 64 MB of gradients.
WAVE = 1 << 24

#: The model's parameters, and the shards that the optimizer steps in their place.
_GROUPS = (
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
)


@contextmanager
def hidden(config: Any) -> Iterator[None]:
    """While Megatron builds: nothing is to be offloaded."""
    before, config.optimizer_cpu_offload = config.optimizer_cpu_offload, False
    try:
        yield
    finally:
        config.optimizer_cpu_offload = before


def check_arguments(args: Any) -> None:
    """Raise a ValueError for flags of Megatron-LM's that need the float32 weights on the device."""
    if getattr(args, FLAG, False) and getattr(args, "log_params_norm", False):
        raise ValueError(
            "--log-params-norm reads the float32 weights on the GPU, and --optimizer-cpu-offload keeps them in host "
            "memory; leave out one of them (--alto-diagnostics-every logs the norms of parameters)"
        )


def _to_host(model_param: torch.Tensor, shard: torch.Tensor, wave: int) -> HostShard:
    pinned = shard.device.type != "cpu"
    host, gradient = (torch.empty(shard.shape, dtype=shard.dtype, device="cpu", pin_memory=pinned) for _ in range(2))
    host.copy_(shard.detach())
    on_device = torch.zeros((), dtype=shard.dtype, device=shard.device).expand(shard.shape)
    for tensor in (host, on_device):
        vars(tensor).update(vars(shard))  # what Megatron wrote on it, such as tensor_model_parallel
    return HostShard(model_param, host, on_device, gradient, wave)


def offload(wrapper: Any) -> None:
    """Move shards of a distributed optimizer to the host: in the order of its groups, up to the fraction."""
    fraction = wrapper.config.optimizer_offload_fraction
    model_params = {shard: param for param, shard in main_parameters(wrapper)}
    limit, done = fraction * sum(shard.numel() for shard in model_params), 0
    moved: dict[torch.Tensor, HostShard] = {}
    wave = in_wave = 0
    groups = [group["params"] for group in wrapper.optimizer.param_groups]
    for shard in [shard for group in groups for shard in group]:
        if done < limit:
            if in_wave >= WAVE:
                wave, in_wave = wave + 1, 0
            moved[shard] = _to_host(model_params[shard], shard, wave)
            done, in_wave = done + shard.numel(), in_wave + shard.numel()
    for group in (*groups, *(group for _, shards in _GROUPS for group in getattr(wrapper, shards))):
        group[:] = [moved[shard].shard if shard in moved else shard for shard in group]
    for one in moved.values():
        if getattr(one.model_param, "main_param", None) is not None:
            one.model_param.main_param = one.shard  # type: ignore[attr-defined]
    wrapper.__class__ = AltoOffloadedOptimizer
    wrapper._alto_on_host = {one.shard: one for one in moved.values()}
    wrapper._alto_sent = set()
    wrapper._alto_copies = Copies(wrapper._alto_on_host, next((shard.device for shard in moved), torch.device("cpu")))
    wrapper.optimizer.__class__ = OffloadedALTO
    wrapper.optimizer.step_in_waves(wrapper._alto_copies, wrapper._alto_send)


class AltoOffloadedOptimizer(AltoDistributedOptimizer):
    """A distributed optimizer with some or all of its shards in host memory."""

    _alto_on_host: dict[torch.Tensor, HostShard]
    _alto_copies: Copies
    _alto_sent: set[torch.Tensor]
    """Shards whose weights are on their way to the model since they were stepped."""

    @contextmanager
    def _alto_shards_as(self, stand_in: Callable[[torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
        """While Megatron goes over its shards: something else in their place, or nothing."""
        before = {name: getattr(self, name) for pair in _GROUPS for name in pair}
        for of_model, of_shards in _GROUPS:
            pairs = [
                [(param, found) for param, shard in zip(*both, strict=True) if (found := stand_in(shard)) is not None]
                for both in zip(before[of_model], before[of_shards], strict=True)
            ]
            setattr(self, of_model, [[param for param, _ in group] for group in pairs])
            setattr(self, of_shards, [[shard for _, shard in group] for group in pairs])
        try:
            yield
        finally:
            for name, groups in before.items():
                setattr(self, name, groups)

    def _alto_on_device(self, shard: torch.Tensor) -> torch.Tensor:
        return self._alto_on_host[shard].on_device if shard in self._alto_on_host else shard

    # -- gradients ------------------------------------------------------------------------------------

    def get_parameters(self) -> list[torch.Tensor]:
        """What has the gradients until the step, for Megatron's norm, clipping and count of zeros."""
        return [self._alto_on_device(shard) for shard in super().get_parameters()]

    def _copy_model_grads_to_main_grads(self) -> None:
        with self._alto_shards_as(self._alto_on_device):
            super()._copy_model_grads_to_main_grads()

    def _collect_main_grad_data_for_unscaling(self) -> list[torch.Tensor]:
        return [param.grad.data for param in self.get_parameters() if param.grad is not None]

    def step_with_ready_grads(self) -> bool:
        self._alto_sent.clear()  # after a step that raised
        self._alto_copies.fetch()
        return bool(super().step_with_ready_grads())

    # -- weights --------------------------------------------------------------------------------------

    def _alto_target(self, one: HostShard) -> torch.Tensor:
        """Where the model has the weights of a shard."""
        buffer, _, bucket = self.model_param_gbuf_map[one.model_param]
        held = self._get_model_param_range_map(one.model_param)["gbuf_world_in_bucket"]
        target: torch.Tensor = self.buffers[buffer].buckets[bucket].param_data.view(-1)[held.start : held.end]
        return target

    def _alto_send(self, shards: Iterable[torch.Tensor]) -> None:
        """Start copying the weights of some shards, which have stepped, to the model."""
        some = [self._alto_on_host[shard] for shard in shards if shard in self._alto_on_host]
        self._alto_copies.send(some, self._alto_target)
        self._alto_sent.update(one.shard for one in some)

    @torch.no_grad()
    def _copy_main_params_to_model_params(self) -> None:
        with self._alto_shards_as(lambda shard: None if shard in self._alto_on_host else shard):
            super()._copy_main_params_to_model_params()
        others = [shard for shard in self._alto_on_host if shard not in self._alto_sent]
        if others:  # that did not step, or all of them after a checkpoint was loaded
            self._alto_copies.follow()
            self._alto_send(others)
        self._alto_copies.join()
        self._alto_sent.clear()

    # -- checkpoints ----------------------------------------------------------------------------------

    def get_parameter_state_dp_reshardable(self) -> dict[Any, Any]:
        """Copies of what is in host memory.

        A save in the background (``--async-save``) copies tensors from the device before the next step, and takes
        those of the host as they are: it would write them while they change.
        """
        state: dict[Any, Any] = super().get_parameter_state_dp_reshardable()
        if not self._alto_describing:
            for buckets in (buckets for index in range(len(self.gbuf_ranges)) for buckets in state[index].values()):
                for tensors in (tensors for bucket in buckets for tensors in bucket):
                    if tensors[PARAM] in self._alto_on_host:
                        tensors.update({key: t.clone() for key, t in tensors.items() if torch.is_tensor(t)})
        return state

    # -- what Megatron's RL loop does between training steps ------------------------------------------

    def offload_to_cpu(self) -> None:
        raise ValueError(
            "optimizer_cpu_offload keeps states in host memory already; leave out "
            "--rl-offload-optimizer-during-inference, or --optimizer-cpu-offload"
        )

    restore_from_cpu = offload_to_cpu
