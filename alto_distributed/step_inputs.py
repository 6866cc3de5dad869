"""What one step has to do: flat shards by device, collected and checked before anything changes."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import states
from .errors import MisfittingTensor, UnsupportedTensor, refuse_unsupported_gradient
from .kernels import Batch
from .kernels.capture import refuse_cold
from .kernels.shards import Memory
from .sharding.collective import home_of
from .sharding.dtensor import like_parameter, local
from .sharding.plan import PlannedTensor, StepPlan
from .spans import NONZERO, PLAIN


@dataclass(slots=True)
class Ready:
    """A tensor that has a gradient."""

    planned: PlannedTensor
    param: torch.Tensor
    grad: torch.Tensor
    """This rank's."""
    state: Mapping[str, Any]
    """Empty if it has none yet."""
    memory: Memory | None
    """Of all its tensors, if kernels can go by addresses and no state has to be made."""


@dataclass
class StepInputs:
    """Filled by ``ALTO._collect``."""

    kept: dict[Any, Any] = field(default_factory=dict)
    """What kernels keep from step to step, by device; it belongs to the plan."""
    shards: dict[torch.device, Batch] = field(default_factory=dict)
    staged: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Parameters that have no flat view, each with the flat copy that is worked on instead."""
    counters: list[torch.Tensor] = field(default_factory=list)
    """The step counts on the host of all parameters in it, which include this step."""
    k: int = 0
    """The number of this step; 0 where there is nothing to do."""

    def batch_on(self, device: torch.device) -> Batch:
        if device not in self.shards:
            self.shards[device] = Batch((), self.kept.setdefault(device, {}))
        return self.shards[device]

    def put_host_last(self) -> None:
        """Kernels on other devices are launched before the host works through its own shards."""
        if len(self.shards) > 1:
            self.shards = dict(sorted(self.shards.items(), key=lambda item: item[0].type == "cpu"))

    def ask_for_all_sums(self, plan: StepPlan) -> None:
        """Have phase one give the sums of every parameter, also of those that get no ratio."""
        planned = [planned for group in plan.groups for planned in group]
        for shard in itertools.chain.from_iterable(self.shards.values()):
            shard.spans = planned[shard.place].spans("every")


def in_one_order(
    param: torch.Tensor, grad: torch.Tensor, m: torch.Tensor, v: torch.Tensor, u: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The tensors with their elements in the same order in memory.

    The last one is what the parameter had to be copied from, and must be copied back to; None where a view would do.
    """
    if type(param) in PLAIN and param.is_contiguous():
        return param, grad if grad.is_contiguous() else grad.reshape(-1), m, v, u, None
    theta = states.in_memory_order(param, param)
    flat, grad = theta.reshape(-1), states.in_memory_order(grad, param).reshape(-1)
    m, v = states.flat_view(m, param), states.flat_view(v, param)
    u = None if u is None else states.flat_view(u, param)
    return flat, grad, m, v, u, None if theta.is_contiguous() else theta


def count_one_more(counters: list[torch.Tensor], skip: torch.Tensor | None, capturable: bool) -> list[torch.Tensor]:
    """One more step in all counters; gives those on the host, which are all unless steps may be captured.

    Those on a device leave out a step that is skipped. The host takes it back, when it knows.
    """
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for count in counters if capturable else ():
        by_device.setdefault(count.device, []).append(count)
    host = by_device.pop(torch.device("cpu"), []) if capturable else counters
    for device, some in by_device.items():
        one = torch.ones((), dtype=torch.float32, device=device)
        torch._foreach_add_(some, one if skip is None else one - skip[0].to(device), alpha=1)
    if host:
        # A number would be made a tensor for each of them. Without alpha, the tensor is read as a number.
        torch._foreach_add_(host, torch.ones((), dtype=torch.float32, device="cpu"), alpha=1)
    return host


def count_unadapted(
    ready: Sequence[Ready],
    unadapted: Mapping[torch.Tensor, torch.Tensor],
    partial: Mapping[torch.device, torch.Tensor],
) -> None:
    """Under E, the gradient before it was adapted tells whether a parameter has a signal.

    Args:
        ready: what is in the step.
        unadapted: by parameter, the gradients that were adapted.
        partial: sums of this rank, by device; row ``NONZERO`` is counted anew.
    """
    for table in partial.values():
        table[NONZERO].zero_()
    for one in ready:
        flat = local(unadapted.get(one.param, one.grad)).reshape(-1)
        for span in one.planned.spans("no"):
            partial[one.grad.device][NONZERO, span.slot] += flat[span.start : span.stop].count_nonzero()


def checked_gradient(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a gradient, or an error if ALTO cannot use it."""
    refuse_unsupported_gradient("ALTO", grad)
    refuse_fsdp1(param)
    shard = local(like_parameter(param, grad))
    if shard.shape != local(param).shape:
        raise ValueError(f"a gradient of shape {tuple(shard.shape)} for a parameter of {tuple(local(param).shape)}")
    return shard


def refuse_fsdp1(param: torch.Tensor) -> None:
    if hasattr(param, "_fsdp_flattened"):
        raise UnsupportedTensor(
            "this parameter belongs to FullyShardedDataParallel (FSDP1), whose shards do not say which part of "
            "which parameter they are; use torch.distributed.fsdp.fully_shard (FSDP2), with which ALTO is exact"
        )


def check_states(
    param: torch.Tensor, state: Mapping[str, Any], keys: Sequence[str], chosen: Mapping[str, torch.dtype | None]
) -> None:
    """Raise if a parameter no longer fits its states: its ``data`` was replaced, moved or cast.

    A kernel that went by the old sizes would write into memory that belongs to something else.

    Args:
        param: the parameter.
        state: its states.
        keys: their names.
        chosen: the precision of those that have one of their own; they are converted if they have another.
    """
    if not state:
        return
    shape, device, dtype = param.shape, param.device, states.state_dtype(param)
    for key in keys:
        value = state.get(key)
        if value is None:
            continue
        if value.shape != shape or value.device != device or (value.dtype != dtype and chosen.get(key) is None):
            raise MisfittingTensor(
                f"a parameter of shape {tuple(shape)}, {param.dtype} on {device}, has {key} of shape "
                f"{tuple(value.shape)}, {value.dtype} on {value.device}, instead of {dtype}: its data was replaced, "
                "moved or cast after a step. Build a new optimizer for it"
            )


def check_memory(param: torch.Tensor) -> None:
    """Raise if a parameter no longer fits its own memory: that was resized, as some frameworks do to free it."""
    here = param if type(param) in PLAIN else local(param)
    if type(here) in PLAIN and here.is_contiguous():
        numel = here.numel()
        available = here.untyped_storage().nbytes() // here.itemsize - here.storage_offset()
        if numel and available < numel:
            raise MisfittingTensor(
                f"a parameter of shape {tuple(here.shape)} has memory for {max(available, 0)} elements: its storage "
                "was resized. Restore it before step()"
            )


def refuse_capture() -> None:
    """Raise where a CUDA graph would replay this one step's numbers for good."""
    raise ValueError(
        "this ALTO's step() cannot be captured in a CUDA graph: the bias corrections and the step count are numbers of "
        "the host, which a graph would replay for good. Build it with capturable=True, or call step() outside of the "
        "graph"
    )


def check_capture(plan: StepPlan, ready: Sequence[Ready], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise for a step that a graph would not repeat rightly."""
    if plan.stepped != frozenset(one.planned.place for one in ready):
        refuse_cold("the last step had gradients of other parameters, or there was none")
    device = next((one.grad.device for one in ready if one.grad.device.type != "cpu"), None)
    if device is None or any(one.grad.device != device for one in ready):
        raise ValueError("a CUDA graph cannot step parameters on the CPU or on two devices: keep them in another ALTO")
    if any(home_of(group).type != device.type for group in plan.norms.groups):
        raise ValueError(
            f"a CUDA graph cannot hold the all-reduces of process groups that work on the CPU, such as gloo: make the "
            f"groups with a backend for {device.type}"
        )
    if any(not isinstance(group["lr"], torch.Tensor) or group["lr"].device.type == "cpu" for group in groups):
        warnings.warn(
            "ALTO's step() is captured in a CUDA graph with a learning rate on the host, which the graph replays for "
            f"good. Give lr=torch.tensor(..., device={str(device)!r}), and change it in place",
            stacklevel=5,
        )
