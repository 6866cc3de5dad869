"""StepPlan: what one call of ``step()`` walks over, worked out once and kept while the tensors stay.

Engines call ``step()`` with a different set of tensors each time (DeepSpeed steps one parameter group,
or one sub-group, after the other), so there is one plan for each set.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import MisfittingTensor
from ..spans import Span
from . import dtensor
from .agreement import describe_parameters, require_agreement, require_whole
from .collective import spans_the_job
from .layout import LogicalParameter, Segment, ShardLayout
from .norms import NormTable, SlotIndex
from .witness import GradientWitness

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class PlannedTensor:
    """The layout of one tensor of a parameter group, and the slots of its segments.

    Args:
        layout: of the tensor.
        slots: by the names of parameters.
        seeds: of stochastic rounding, by the same.
        place: of the tensor among all of the plan.
        group: number of its group.
    """

    def __init__(
        self, layout: ShardLayout, slots: Mapping[str, int], seeds: Mapping[str, int], place: int, group: int
    ) -> None:
        self.layout = layout
        self.place = place
        self.group = group
        self._slot_of = slots
        self._seed_of = seeds
        self._spans: dict[str, tuple[Span, ...]] = {}

    def spans(self, ratio_for: str) -> tuple[Span, ...]:
        """Spans to work on; ``ratio_for`` says which get a ratio: "every", "matrices" or "no" segment."""
        if ratio_for not in self._spans:
            self._spans[ratio_for] = tuple(self._spans_of_segments(ratio_for))
        return self._spans[ratio_for]

    def real_elements(self, grad: torch.Tensor) -> Iterator[torch.Tensor]:
        """The parts of this tensor's gradient that are not padding."""
        if self.layout.is_whole:
            yield grad
        else:
            flat = grad.reshape(-1)
            for start, stop in self._covered:
                yield flat[start:stop]

    @functools.cached_property
    def _covered(self) -> list[tuple[int, int]]:
        """The elements of all segments; those that touch each other are together."""
        covered: list[tuple[int, int]] = []
        for span in self.spans("no"):
            begin = covered.pop()[0] if covered and covered[-1][1] == span.start else span.start
            covered.append((begin, span.stop))
        return covered

    def _spans_of_segments(self, ratio_for: str) -> Iterator[Span]:
        for segment in sorted(self.layout.segments, key=lambda s: s.start):
            if segment.length:
                name, stop = segment.parameter.name, segment.start + segment.length
                ratio = _gets_ratio(segment, ratio_for)
                yield Span(segment.start, stop, self._slot_of[name], ratio, self._seed_of[name], segment.offset)


def _gets_ratio(segment: Segment, ratio_for: str) -> bool:
    parameter = segment.parameter
    wanted = ratio_for == "every" or (ratio_for == "matrices" and len(parameter.shape) >= 2)
    return wanted and parameter.may_have_ratio


class StepPlan:
    """The planned_tensors of each parameter group and the table of their norms."""

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        layouts: Mapping[torch.Tensor, ShardLayout],
        joined: Sequence[LogicalParameter],
    ) -> None:
        resolved: list[list[tuple[torch.Tensor, ShardLayout]]] = []
        for g, group in enumerate(groups):
            names = _names(group) or [""] * len(group["params"])
            resolved.append(
                [
                    # The position makes the name unique and the same on every rank.
                    (tensor, _layout_of(tensor, layouts, f"{g:04d}.{i:06d} {name}".rstrip()))
                    for i, (tensor, name) in enumerate(zip(group["params"], names, strict=True))
                ]
            )
        self.tensors = [tensor for group in resolved for tensor, _ in group]
        """Kept, so that no other tensor gets the id of one of them."""
        self._shapes = [tensor.shape for tensor in self.tensors]
        self.labels = _labels(groups, resolved, layouts)
        everything = [s.parameter for group in resolved for _, layout in group for s in layout.segments]
        self.witness = GradientWitness([_groups_of_dtensor(*pair) for group in resolved for pair in group])
        self.norms = NormTable([*everything, *joined, *self.witness.parameters])
        replicas = (group for tensor in self.tensors for group in dtensor.replica_groups(tensor))
        self.connected = list(dict.fromkeys([*self.norms.groups, *replicas]))
        """Process groups of the ranks that have shards or replicas of these tensors, as far as tensors tell."""
        meshes = (tensor.device_mesh.size() for tensor in self.tensors if dtensor.is_dtensor(tensor))
        self.connects_all = spans_the_job([*(group.size() for group in self.connected), *meshes])
        """Whether these connect all ranks of the job."""
        places = itertools.count()
        # By what users call a parameter: that is the same however it is cut up.
        seeds = {name: zlib.crc32(label.encode()) for name, label in self.labels.items()}
        self.groups = [
            [PlannedTensor(layout, self.norms.slots, seeds, next(places), g) for _, layout in group]
            for g, group in enumerate(resolved)
        ]
        self.group_slots = [
            SlotIndex(self.norms.slots[s.parameter.name] for _, layout in group for s in layout.segments)
            for group in resolved
        ]
        self._slots_with_ratio: dict[tuple[int, str], SlotIndex] = {}
        self._factors: tuple[Any, torch.Tensor] | None = None
        self.kept_by_kernels: dict[Any, Any] = {}
        """See :class:`..kernels.shards.Batch`."""
        self.known: dict[int, Any] = {}
        """What steps have found out about the memory of tensors, by place."""
        self.stepped: frozenset[int] | None = None
        """Places of the tensors of the last step that was not captured; kept if steps may be."""

    def fits(self) -> bool:
        """Whether its tensors are still of the shapes for which it was made: their data may have been replaced."""
        return [tensor.shape for tensor in self.tensors] == self._shapes

    def slots_with_ratio(self, g: int, ratio_for: str) -> SlotIndex:
        """Those of group ``g``; see :meth:`PlannedTensor.spans`."""
        if (g, ratio_for) not in self._slots_with_ratio:
            segments = (segment for planned in self.groups[g] for segment in planned.layout.segments)
            names = {segment.parameter.name for segment in segments if _gets_ratio(segment, ratio_for)}
            self._slots_with_ratio[g, ratio_for] = SlotIndex(self.norms.slots[name] for name in names)
        return self._slots_with_ratio[g, ratio_for]

    def factors(self, vector_lrs: Sequence[tuple[str, float]], like: torch.Tensor) -> torch.Tensor:
        """A number for each slot: 1 with the ratio, its group's ``vector_lr`` without. Kept while nothing changes.

        Args:
            vector_lrs: of each group, which of its segments get the ratio, and the number of the others.
            like: on whose device and in whose precision.
        """
        key = (*vector_lrs, like.device, like.dtype)
        if self._factors is None or self._factors[0] != key:
            values = [1.0] * len(self.norms.slots)
            for g, (ratio_for, vector_lr) in enumerate(vector_lrs):
                for slot in set(self.group_slots[g]).difference(self.slots_with_ratio(g, ratio_for)):
                    values[slot] = vector_lr
            self._factors = key, torch.tensor(values, dtype=like.dtype, device=like.device)
        return self._factors[1]

    def replaceable(self) -> list[Any]:
        """Tables that the last step has read and that a later one may replace: a graph goes on reading them."""
        return [self._factors, *self.witness.tables()]

    def require_agreement(self, common: Mapping[str, str]) -> None:
        """Raise, on all ranks, if those that sum norms together do not agree; see :mod:`.agreement`.

        Args:
            common: what must be the same on all of them besides the parameters.
        """
        for process_group, parameters in self.norms.shared():
            require_agreement(process_group, {**common, **describe_parameters(parameters)})
        held = torch.zeros(len(self.norms.slots), dtype=torch.int64, device="cpu")
        for segment in (s for group in self.groups for planned in group for s in planned.layout.segments):
            held[self.norms.slots[segment.parameter.name]] += segment.length
        for parameter in self.witness.parameters:
            held[self.norms.slots[parameter.name]] += 1
        require_whole(self.norms.total(held), self.norms.parameters)

    def missing(self, places: Collection[int]) -> list[int]:
        """The places of the tensors that are not among ``places``."""
        return sorted(set(range(len(self.tensors))).difference(places)) if len(places) < len(self.tensors) else []


def _groups_of_dtensor(tensor: torch.Tensor, layout: ShardLayout) -> Sequence[ProcessGroup]:
    return layout.segments[0].parameter.groups if dtensor.is_dtensor(tensor) and layout.segments else ()


def _labels(
    groups: Sequence[Mapping[str, Any]],
    resolved: Sequence[Sequence[tuple[torch.Tensor, ShardLayout]]],
    layouts: Mapping[torch.Tensor, ShardLayout],
) -> dict[str, str]:
    """Logical name -> how to call it before a user."""
    labels = {}
    for g, (group, planned_tensors) in enumerate(zip(groups, resolved, strict=True)):
        for i, (tensor, layout) in enumerate(planned_tensors):
            for segment in layout.segments:
                name = segment.parameter.name
                if tensor not in layouts:
                    names = _names(group)
                    labels[name] = names[i] if names else f"parameter {i} of group {g}"
                else:
                    labels[name] = name
    return labels


def _names(group: Mapping[str, Any]) -> list[str] | None:
    """The names of a group's parameters, unless an engine has put other tensors in their place."""
    names: list[str] | None = group.get("param_names")
    return names if names is not None and len(names) == len(group["params"]) else None


def check_length(tensor: torch.Tensor, layout: ShardLayout) -> None:
    """Raise unless a layout is as long as its tensor, whose data may have been replaced since."""
    if tensor.numel() != layout.numel:
        raise MisfittingTensor(f"{layout!r} is of another length than its tensor of {tensor.numel()} elements")


def _layout_of(tensor: torch.Tensor, layouts: Mapping[torch.Tensor, ShardLayout], name: str) -> ShardLayout:
    """The layout that an engine gave; else a DTensor knows its own, and another tensor is whole."""
    given = layouts.get(tensor)
    if given is not None:
        check_length(tensor, given)
        return given
    if dtensor.is_dtensor(tensor):
        return dtensor.layout_of(tensor, name)
    return ShardLayout.whole(LogicalParameter(name, tuple(tensor.shape)), tensor.numel())
