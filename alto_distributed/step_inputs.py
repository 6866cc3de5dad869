"""What one step has to do: flat shards by device, collected and checked before anything changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .errors import MisfittingTensor, UnsupportedTensor, refuse_unsupported_gradient
from .kernels import Batch, FlatShard
from .sharding.dtensor import like_parameter, local
from .sharding.plan import PlannedTensor
from .spans import PLAIN


@dataclass
class StepInputs:
    """Filled by ``ALTO._collect``."""

    kept: dict[Any, Any] = field(default_factory=dict)
    """What kernels keep from step to step, by device; it belongs to the plan."""
    shards: dict[torch.device, Batch] = field(default_factory=dict)
    planned_tensors: dict[torch.device, list[PlannedTensor]] = field(default_factory=dict)
    staged: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Parameters that have no flat view, each with the flat copy that is worked on instead."""
    counters: list[torch.Tensor] = field(default_factory=list)
    """The step counts of all parameters in it, which include this step."""
    k: int = 0
    """The number of this step; 0 where there is nothing to do."""

    def add(self, shard: FlatShard, planned: PlannedTensor, k: int) -> None:
        device = shard.param.device
        if device not in self.shards:
            self.shards[device] = Batch((), self.kept.setdefault(device, {}))
        self.shards[device].append(shard)
        self.planned_tensors.setdefault(device, []).append(planned)
        self.k = max(self.k, k)

    def over_every_parameter(self) -> dict[torch.device, list[FlatShard]]:
        """The shards with each parameter's span by itself, also where it gets no ratio."""
        return {
            device: [
                replace(shard, spans=planned.spans("every"))
                for shard, planned in zip(shards, self.planned_tensors[device], strict=True)
            ]
            for device, shards in self.shards.items()
        }


def checked_gradient(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a gradient, or an error if ALTO cannot use it."""
    if (
        type(grad) in PLAIN
        and type(param) in PLAIN
        and grad.layout == torch.strided
        and not grad.is_complex()
        and grad.shape == param.shape
        and not hasattr(param, "_fsdp_flattened")
    ):
        return grad  # as nearly always; what follows takes several times as long to say so
    refuse_unsupported_gradient("ALTO", grad)
    if getattr(param, "_fsdp_flattened", False):
        raise UnsupportedTensor(
            "this parameter belongs to FullyShardedDataParallel (FSDP1), whose shards do not say which part of "
            "which parameter they are; use torch.distributed.fsdp.fully_shard (FSDP2), with which ALTO is exact"
        )
    shard = local(like_parameter(param, grad))
    if shard.shape != local(param).shape:
        raise ValueError(f"a gradient of shape {tuple(shard.shape)} for a parameter of {tuple(local(param).shape)}")
    return shard


def check_fit(param: torch.Tensor, state: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raise if a parameter no longer fits its states or its own memory: its ``data`` was replaced, moved or resized.

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
    here = local(param)
    if type(here) in PLAIN and here.numel() and here.is_contiguous():
        available = here.untyped_storage().nbytes() // here.itemsize - here.storage_offset()
        if available < here.numel():
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
