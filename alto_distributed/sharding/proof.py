"""Layouts are verified against the model's own weights, once, when an engine is built.

A layout is read from private fields of a framework, which change between releases. When the engine is built, each shard
of master weights is a copy of the model's weights. So every segment of every shard must be equal to the elements that
the layout says it holds. A layout that was read wrongly is an error before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .agreement import raise_together
from .layout import Segment, ShardLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CHUNK = 1 << 22  # elements that are compared at a time
_SHOWN = 3  # parameters that a message names


def _in_memory(_: torch.Tensor) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class ModelWeight:
    """The elements of one parameter that the model has on this rank."""

    tensor: torch.Tensor
    offset: int = 0
    """The place of its first element in the parameter; not 0 where the model itself is sharded."""


def require_proved(
    layouts: Mapping[torch.Tensor, ShardLayout],
    weights: Mapping[str, ModelWeight],
    read_from: str,
    group: ProcessGroup | None,
    bringing_in: Callable[[torch.Tensor], AbstractContextManager[None]] = _in_memory,
) -> None:
    """Raise, on all ranks of ``group``, unless every segment is equal to the model's weights.

    One pass over the memory, in chunks, with one read by the host.

    Args:
        layouts: of the optimizer's tensors, which hold what the model holds, in the same or a higher precision.
        weights: name of a logical parameter -> what the model has of it.
        read_from: the framework with its version, and the fields that the layouts were read from.
        group: ranks that would wait for this one; None to raise here alone.
        bringing_in: holds a shard in memory while it is read, where an engine keeps it elsewhere.
    """
    wrong = sorted(set(_mismatches(layouts, weights, bringing_in)))
    problem = None
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        problem = (
            f"the optimizer's shards are not laid out as alto_distributed reads it: the master weights of "
            f"{', '.join(map(repr, wrong[:_SHOWN]))}{more} differ from the model's. Read from {read_from}. Use a "
            "version that the README lists as supported, and report this one"
        )
    raise_together(problem, group)


def _mismatches(
    layouts: Mapping[torch.Tensor, ShardLayout],
    weights: Mapping[str, ModelWeight],
    bringing_in: Callable[[torch.Tensor], AbstractContextManager[None]],
) -> Iterator[str]:
    """Names of parameters whose segments differ from the model's weights."""
    names: dict[torch.device, list[str]] = {}
    differ: dict[torch.device, list[torch.Tensor]] = {}
    for shard, layout in layouts.items():
        with bringing_in(shard):
            for segment in layout.segments:
                name = segment.parameter.name
                if not segment.length:
                    continue
                if name not in weights:
                    yield name
                    continue
                for one, other in _pairs(shard.detach(), segment, weights[name]):
                    if one.shape != other.shape:
                        yield name
                    else:
                        names.setdefault(shard.device, []).append(name)
                        differ.setdefault(shard.device, []).append(_differ(one, other))
    for device, flags in differ.items():
        for name, differs in zip(names[device], torch.stack(flags).tolist(), strict=True):
            if differs:
                yield name


def _pairs(shard: torch.Tensor, segment: Segment, weight: ModelWeight) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A segment's elements and the model's, in chunks. Their shapes differ where the model has no such elements."""
    if shard.shape == weight.tensor.shape and segment.length == shard.numel():
        yield shard, weight.tensor.detach()  # a copy of all of it: the order in memory need not be the same
        return
    held, model = shard.reshape(-1), weight.tensor.detach().reshape(-1)
    begin = segment.offset - weight.offset
    if begin < 0:
        yield held[: segment.length], model[:0]
        return
    for at in range(0, segment.length, _CHUNK):
        length = min(_CHUNK, segment.length - at)
        start = segment.start + at
        yield held[start : start + length], model[begin + at : begin + at + length]


def _differ(held: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """Whether the optimizer's elements, in the model's precision, are others than the model's. NaN equals NaN."""
    model = model.to(held.device)
    held = held.to(model.dtype)
    return ((held != model) & ~(held.isnan() & model.isnan())).any()
