"""ShardLayout: which elements of which logical parameter a local flat tensor holds.

The paper's norms are over one whole "layer". An engine that shards hands the optimizer something
else: a flat slice of many parameters glued together, padded at the end, or rows of one matrix. A
layout says what that tensor is made of; every engine's folder builds layouts, and the optimizer never
asks which engine it is in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class LogicalParameter:
    """One parameter of the model as its author wrote it, however it is cut up."""

    name: str
    """The same on every rank and unique among the parameters of a step: it fixes the order in which
    ranks send their sums."""

    shape: tuple[int, ...]
    """Of the whole parameter; ``layerwise="matrices"`` asks for its number of dimensions."""

    groups: tuple[ProcessGroup, ...] = ()
    """Process groups over which its shards lie (data-parallel and tensor-parallel ones): the
    sum over all of them in turn must count each element once. Never a group of replicas."""

    may_have_ratio: bool = True
    """False for a parameter that goes without the layer-wise ratio whatever its group says."""


@dataclass(frozen=True)
class Segment:
    """``length`` consecutive elements of a logical parameter, from ``start`` of the local tensor on."""

    parameter: LogicalParameter
    start: int
    length: int
    """0 where this rank holds none of it but takes part in its norm."""

    offset: int = 0
    """The place of its first element in the parameter, or in this rank's tensor-parallel part of it."""


class ShardLayout:
    """The segments of one local tensor.

    Args:
        numel: elements of the local tensor.
        segments: what they are. Elements in no segment are padding: they are neither updated nor
            counted, and may be uninitialized memory.
    """

    def __init__(self, numel: int, segments: Iterable[Segment]) -> None:
        self.numel = numel
        self.segments = tuple(segments)
        end, previous = 0, "the start"
        for segment in sorted((s for s in self.segments if s.length), key=lambda s: s.start):
            name = segment.parameter.name
            if segment.length < 0 or segment.start < end:
                raise ValueError(
                    f"layout of {numel} elements: {name!r} at [{segment.start}, {segment.start + segment.length}) "
                    f"overlaps {previous} that ends at {end}"
                )
            end, previous = segment.start + segment.length, repr(name)
        if end > numel:
            raise ValueError(f"layout of {numel} elements: {previous} ends at {end}, beyond the tensor")

    @property
    def is_whole(self) -> bool:
        """One segment covers the tensor: then the order of its elements is of no importance."""
        return len(self.segments) == 1 and self.segments[0].length == self.numel

    @classmethod
    def whole(cls, parameter: LogicalParameter, numel: int) -> ShardLayout:
        """A local tensor that is all one parameter, or this rank's only shard of one."""
        return cls(numel, [Segment(parameter, 0, numel)])

    @classmethod
    def of_flat_shard(
        cls, parameters: Sequence[LogicalParameter], offset: int, numel: int, starts: Sequence[int] | None = None
    ) -> ShardLayout:
        """Elements [offset, offset + numel) of a buffer in which parameters lie end to end.

        Args:
            parameters: those of the whole buffer, in its order: also the ones with no element here, so
                that all ranks of the buffer send sums of the same parameters.
            offset: where this rank's shard begins in the buffer.
            numel: length of the shard; what lies past the last parameter is padding.
            starts: where each parameter begins in the buffer, if not end to end.
        """
        segments: list[Segment] = []
        running = 0
        for i, parameter in enumerate(parameters):
            begin = running if starts is None else starts[i]
            size = torch.Size(parameter.shape).numel()
            running = begin + size
            low, high = max(begin, offset), min(running, offset + numel)
            if low < high:
                segments.append(Segment(parameter, low - offset, high - low, low - begin))
            else:
                segments.append(Segment(parameter, 0, 0))
        return cls(numel, segments)

    def __repr__(self) -> str:
        held = ", ".join(f"{s.parameter.name}[{s.length}]@{s.start}" for s in self.segments if s.length)
        return f"ShardLayout(numel={self.numel}, {held or 'padding only'})"
