"""Norms of whole logical parameters from the sums of squares of their shards.

All parameters of a step share one small table, ``sums[3, slots]``: |theta|^2 in row 0, |r|^2 in row 1, and in row 2
a positive number unless the whole gradient is 0.
Each distinct process group costs one all-reduce of the columns whose shards lie over it, however many
parameters there are. Those of groups that share no parameter are under way together. Nothing is read back by the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from ..spans import SUMS
from .collective import gathered_sum, home_of, start_all_reduce
from .layout import LogicalParameter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def sums_dtype(device: torch.device) -> torch.dtype:
    """float64, so that neither 1e8 elements nor the cut into shards cost digits (MPS has none)."""
    return torch.float32 if device.type == "mps" else torch.float64


class SlotIndex:
    """Some columns of the table, as an index that is copied to a device once and then stays there."""

    def __init__(self, slots: Iterable[int]) -> None:
        self._slots = sorted(set(slots))
        self._on_device: dict[torch.device, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)

    def on(self, device: torch.device) -> torch.Tensor:
        if device not in self._on_device:
            self._on_device[device] = torch.tensor(self._slots, dtype=torch.long, device=device)
        return self._on_device[device]


class NormTable:
    """A slot for each logical parameter, and the all-reduces that complete their sums.

    Every rank of a process group must build the table from the same parameters of that group (a rank
    without a shard included). Slots are in the order of names, and groups in the order in which that
    brings them up, so all ranks run the same collectives in the same order.
    """

    def __init__(self, parameters: Iterable[LogicalParameter]) -> None:
        by_name: dict[str, LogicalParameter] = {}
        for parameter in parameters:
            known = by_name.setdefault(parameter.name, parameter)
            if known.shape != parameter.shape or known.groups != parameter.groups:
                raise ValueError(
                    f"two layouts disagree on the parameter {parameter.name!r}: shapes {known.shape} and "
                    f"{parameter.shape}, {len(known.groups)} and {len(parameter.groups)} process groups"
                )
        self.slots: dict[str, int] = {name: slot for slot, name in enumerate(sorted(by_name))}
        self.parameters = [by_name[name] for name in self.slots]

        columns: dict[ProcessGroup, list[int]] = {}
        for name, slot in self.slots.items():
            for group in by_name[name].groups:
                if group.size() > 1:
                    columns.setdefault(group, []).append(slot)
        self._reductions = [(group, SlotIndex(slots)) for group, slots in columns.items()]
        self._rounds = list(_rounds(self._reductions))

    def zeros(self, device: torch.device, rows: int = SUMS) -> torch.Tensor:
        return torch.zeros(rows, len(self.slots), dtype=sums_dtype(device), device=device)

    @property
    def groups(self) -> list[ProcessGroup]:
        """The process groups in the order of the collectives."""
        return [group for group, _ in self._reductions]

    def shared(self) -> Iterator[tuple[ProcessGroup, list[LogicalParameter]]]:
        """Each process group with the parameters whose shards lie over it, in the order of the collectives."""
        for group, slots in self._reductions:
            yield group, [self.parameters[slot] for slot in slots]

    @property
    def home(self) -> torch.device:
        """Where a rank without tensors makes its table: not on the host if that would have to be copied each step."""
        return home_of(self._reductions[0][0]) if self._reductions else torch.device("cpu")

    @property
    def collectives(self) -> int:
        """All-reduces that :meth:`complete` runs."""
        return len(self._reductions)

    def total(self, counts: torch.Tensor) -> torch.Tensor:
        """Whole numbers, one a slot, added up exactly over the same groups. Not for a step: it waits."""
        for group, slots in self._reductions:
            index = slots.on(counts.device)
            counts[index] = gathered_sum(counts[index], group)
        return counts

    def complete(self, partial: Mapping[torch.device, torch.Tensor], rows: int = SUMS) -> torch.Tensor:
        """The sums over this rank's devices (it may have none) and over every process group."""
        tables = list(partial.values()) or [self.zeros(self.home, rows)]
        # An accelerator, if there is one, receives the others' few bytes rather than waiting for the host.
        tables.sort(key=lambda table: table.device.type == "cpu")
        sums = tables[0]
        for other in tables[1:]:
            sums += other.to(sums.device, sums.dtype)
        for reductions in self._rounds:
            under_way = []
            for group, slots in reductions:
                index = None if len(slots) == len(self.slots) else slots.on(sums.device)
                under_way.append((index, start_all_reduce(sums if index is None else sums[:, index], group)))
            for index, result in under_way:
                if index is None:
                    sums = result().to(sums.device)
                else:
                    sums[:, index] = result().to(sums.device)
        return sums


def _rounds(reductions: Iterable[tuple[ProcessGroup, SlotIndex]]) -> Iterator[list[tuple[ProcessGroup, SlotIndex]]]:
    """All-reduces that can be under way together: no two of a round have a column in common.

    A parameter whose shards lie over two groups is summed over one after the other. The order stays, so that it is the
    same on all ranks.
    """
    some: list[tuple[ProcessGroup, SlotIndex]] = []
    taken: set[int] = set()
    for group, slots in reductions:
        if not taken.isdisjoint(slots):
            yield some
            some, taken = [], set()
        some.append((group, slots))
        taken.update(slots)
    if some:
        yield some
