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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ..diagnostics import Diagnostics
from ..kernels import Batch, FlatShard, Kernel
from ..optimizer import ALTO
from ..sharding.norms import NormTable
from .distributed import PARAM, AltoDistributedOptimizer
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


@dataclass
class HostShard:
    """A shard in host memory, and what stands for it on the device."""

    model_param: torch.Tensor
    shard: torch.Tensor
    on_device: torch.Tensor
    """Of the same shape, in the memory of one element. It holds the gradient until the step."""
    gradient: torch.Tensor
    """Host memory for the gradient."""
    wave: int
    """Number of the wave in which it is stepped."""
    weights: torch.Tensor = field(init=False)
    """Host memory for the weights in the precision of the model: the shard itself, or the gradient's, used again."""

    def __post_init__(self) -> None:
        same = self.model_param.dtype == self.shard.dtype
        self.weights = self.shard if same else self.gradient.view(self.model_param.dtype)[: self.shard.numel()]


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


class Copies:
    """Gradients on their way to the host, and weights on their way back, beside the device's other work.

    Args:
        on_host: the shards.
        device: where copies come from and go to. If that is the host, they are done at once.
    """

    def __init__(self, on_host: Mapping[torch.Tensor, HostShard], device: torch.device) -> None:
        self._on_host = on_host
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream = None if self._module is None else self._module.Stream(device)
        self._under_way: dict[int, tuple[Any, list[torch.Tensor]]] = {}
        """By wave: the event after its gradients, and what they are copied from, whose memory must stay until then."""

    def fetch(self) -> None:
        """Start copying all gradients, after what the device has to do so far. What stood in for shards loses them."""
        self.follow()
        waves: dict[int, list[HostShard]] = {}
        for one in self._on_host.values():
            waves.setdefault(one.wave, []).append(one)
        for wave, shards in waves.items():
            sources = []
            with self._beside():
                for one in shards:
                    gradient, one.on_device.grad, one.shard.grad = one.on_device.grad, None, None
                    if gradient is not None:
                        one.gradient.copy_(gradient, non_blocking=True)
                        one.shard.grad = one.gradient
                        sources.append(gradient)
            self._under_way[wave] = None if self._stream is None else self._stream.record_event(), sources

    def waves_of(self, shards: Sequence[FlatShard]) -> Iterator[tuple[int, Batch]]:
        """Shards of a step by the number of their wave, in order; each batch keeps what kernels know of it.

        Where the host is the device, those that stay there are a wave too, the first.
        """
        kept = shards.kept if isinstance(shards, Batch) else {}
        waves: dict[int, Batch] = {}
        for shard in shards:
            wave = self._on_host[shard.param].wave if shard.param in self._on_host else -1
            if wave not in waves:
                waves[wave] = Batch((), kept.setdefault(("wave", wave), {}))
            waves[wave].append(shard)
        return iter(sorted(waves.items()))

    def wait(self, wave: int) -> None:
        """Until the gradients of a wave have arrived."""
        arrived, _ = self._under_way.pop(wave, (None, []))
        if arrived is not None:
            arrived.synchronize()

    def wait_for_all(self) -> None:
        for wave in list(self._under_way):
            self.wait(wave)

    def send(self, shards: Iterable[HostShard], target_of: Callable[[HostShard], torch.Tensor]) -> None:
        """Start copying weights to the model."""
        with self._beside():
            for one in shards:
                if one.weights is not one.shard:
                    one.weights.copy_(one.shard)
                target_of(one).copy_(one.weights, non_blocking=True)

    def follow(self) -> None:
        """The copies to come start after what the device has to do so far."""
        if self._stream is not None:
            self._stream.wait_stream(self._module.current_stream(self._device))

    def join(self) -> None:
        """What the device has to do from here on comes after all copies. The host does not wait."""
        if self._stream is not None:
            self._module.current_stream(self._device).wait_stream(self._stream)

    def _beside(self) -> Any:
        return nullcontext() if self._stream is None else self._module.stream(self._stream)


class InWaves:
    """A kernel of the host that steps each wave when its gradients are there, and sends its weights away.

    Args:
        kernel: does the arithmetic.
        copies: of the shards.
        send: is told of shards whose weights are new.
    """

    def __init__(self, kernel: Kernel, copies: Copies, send: Callable[[Iterable[torch.Tensor]], None]) -> None:
        self._kernel, self._copies, self._send = kernel, copies, send

    def phase_one(self, shards: Sequence[FlatShard], sums: torch.Tensor) -> list[tuple[Batch, Any]]:
        prepared = []
        for wave, batch in self._copies.waves_of(shards):
            self._copies.wait(wave)
            prepared.append((batch, self._kernel.phase_one(batch, sums)))
        return prepared

    def phase_two(
        self, shards: Sequence[FlatShard], step_sizes: torch.Tensor, prepared: list[tuple[Batch, Any]] | None = None
    ) -> None:
        for batch, before in prepared or [(batch, None) for _, batch in self._copies.waves_of(shards)]:
            self._kernel.phase_two(batch, step_sizes, before)
            self._send(shard.param for shard in batch)


class OffloadedALTO(ALTO):
    """An ALTO becomes one by its ``__class__``: gradients on the host may be under way when its step begins."""

    _copies: Copies | None = None
    _send: Callable[[Iterable[torch.Tensor]], None]

    def step_in_waves(self, copies: Copies, send: Callable[[Iterable[torch.Tensor]], None]) -> None:
        self._copies, self._send = copies, send
        self._diagnostics = WaitingDiagnostics(self._diagnostics.every, copies)

    def _kernel_on(self, device: torch.device, skip: torch.Tensor | None) -> Kernel:
        kernel = super()._kernel_on(device, skip)
        if device.type != "cpu" or self._copies is None:
            return kernel
        return InWaves(kernel, self._copies, self._send)


class WaitingDiagnostics(Diagnostics):
    """A step that is measured reads all gradients first."""

    def __init__(self, every: int, copies: Copies) -> None:
        super().__init__(every)
        self._copies = copies

    def before(self, shards: Mapping[torch.device, Sequence[FlatShard]], table: NormTable) -> None:
        self._copies.wait_for_all()
        super().before(shards, table)


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
