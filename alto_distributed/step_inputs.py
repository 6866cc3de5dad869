"""What one step has to do: flat shards by device, collected and checked before anything changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from . import states
from .errors import MisfittingTensor, UnsupportedTensor, refuse_unsupported_gradient
from .kernels import Batch, FlatShard
from .kernels.shards import Memory
from .sharding.dtensor import like_parameter, local
from .sharding.plan import PlannedTensor, StepPlan
from .spans import PLAIN


class Ready(NamedTuple):
    """A tensor that has a gradient."""

    planned: PlannedTensor
    param: torch.Tensor
    group: int
    """Number of its parameter group."""
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
    """The step counts of all parameters in it, which include this step."""
    k: int = 0
    """The number of this step; 0 where there is nothing to do."""

    def batch_on(self, device: torch.device) -> Batch:
        if device not in self.shards:
            self.shards[device] = Batch((), self.kept.setdefault(device, {}))
        return self.shards[device]

    def over_every_parameter(self, plan: StepPlan) -> dict[torch.device, list[FlatShard]]:
        """The shards with each parameter's span by itself, also where it gets no ratio."""
        planned = [planned for group in plan.groups for planned in group]
        return {
            device: [replace(shard, spans=planned[shard.place].spans("every")) for shard in shards]
            for device, shards in self.shards.items()
        }


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


def check_states(param: torch.Tensor, state: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raise if a parameter no longer fits its states: its ``data`` was replaced or moved.

    A kernel that went by the old sizes would write into memory that belongs to something else.
    """
    shape, device = param.shape, param.device
    for key in keys if state else ():
        value = state.get(key)
        if value is not None and (value.shape != shape or value.device != device):
            raise MisfittingTensor(
                f"a parameter of shape {tuple(shape)} on {device} has {key} of shape {tuple(value.shape)} "
                f"on {value.device}: its data was replaced or moved after a step. Build a new optimizer for it"
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


def refuse_capture(device: torch.device) -> None:
    """Raise while a CUDA graph is captured: it would replay this one step's numbers for good."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "ALTO's step() cannot be captured in a CUDA graph: the learning rate, the bias corrections and the step "
            "count are numbers of the host, which a graph would replay for good. Capture forward and backward, and "
            "call step() outside of the graph"
        )
