"""Whether the ranks that share parameters have gradients of the same ones.

A DTensor with a gradient on one rank and None on another would be updated on one of them alone, and its shards drift
apart. So each rank sends one more column with the sums of squares, for each process group: a number c that stands for
the DTensors without a gradient, in this step and all before it, as c and c^2. All c are equal if and only if
n*sum(c^2) = sum(c)^2. It costs no collective, and a launch only when other DTensors than before lack a gradient.

Ranks that differed once differ from there on, so nothing is lost by looking seldom: sums on the host are looked at in
each step; those on an accelerator every 16th step, with numbers that are 16 steps old, and when states are saved.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from .collective import HostCopy, adds_float64, home_of
from .layout import LogicalParameter
from .norms import NormTable, SlotIndex, sums_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Steps between two looks at an accelerator: by then the host does not have to wait for what it reads.
EVERY = 16


class GradientWitness:
    """One logical parameter more for each process group over which DTensors lie; its slot takes c and c^2.

    Args:
        groups: of each tensor of a plan, the process groups over which its shards lie; none if it is no DTensor.
    """

    def __init__(self, groups: Sequence[Sequence[ProcessGroup]]) -> None:
        places: dict[ProcessGroup, set[int]] = {}
        for place, own in enumerate(groups):
            for group in own:
                if group.size() > 1:
                    places.setdefault(group, set()).add(place)
        self._histories = [_History(group, own) for group, own in places.items()]
        self.parameters = [
            LogicalParameter(f"~ gradients over process group {i:06d}", (group.size(),), (group,))
            for i, group in enumerate(places)
        ]
        self._kept: dict[torch.device, tuple[list[int], torch.Tensor]] = {}
        self._steps = 0
        self._unread: tuple[torch.Tensor, SlotIndex] | None = None
        self._copied: HostCopy | None = None
        self._index: SlotIndex | None = None
        self._fault: str | None = None

    def new_tables(
        self, devices: Iterable[torch.device], norms: NormTable, missing: Sequence[int]
    ) -> dict[torch.device, torch.Tensor]:
        """A table of sums for each device, with nothing in them but this rank's numbers in one of them.

        Args:
            devices: of this rank's tensors that have a gradient. If there are none, others still get its numbers.
            norms: whose tables they are.
            missing: places of the tensors that have no gradient.
        """
        devices = list(devices) or ([norms.home] if self.parameters else [])
        tables = {device: norms.zeros(device) for device in devices[1:]}
        return {device: self._table(device, norms, missing) for device in devices[:1]} | tables

    def _table(self, device: torch.device, norms: NormTable, missing: Sequence[int]) -> torch.Tensor:
        if not self.parameters:
            return norms.zeros(device)
        self._steps += 1
        numbers = [history.number(self._steps, missing) for history in self._histories]
        before, table = self._kept.get(device) or ([0] * len(numbers), norms.zeros(device))
        for parameter, c, last in zip(self.parameters, numbers, before, strict=True):
            if c != last:
                slot = norms.slots[parameter.name]
                table[0, slot].fill_(c)
                table[1, slot].fill_(c * c)
        self._kept[device] = numbers, table
        return table.clone()

    def tables(self) -> list[torch.Tensor]:
        """Those that :meth:`table` copies."""
        return [table for _, table in self._kept.values()]

    def look(self, sums: torch.Tensor, norms: NormTable) -> None:
        """Compare the ranks by completed sums: now, or, to wait for no device, in :meth:`look_back`."""
        if self.parameters:
            if self._index is None:
                self._index = SlotIndex(norms.slots[parameter.name] for parameter in self.parameters)
            self._unread = sums, self._index
            if sums.device.type == "cpu":
                self.resolve()

    def look_back(self) -> None:
        """At an interval, look at what was copied the last time, and have the sums of this step copied."""
        if self._unread is not None and self._steps % EVERY == 0:
            copied, self._copied = self._copied, HostCopy(self._numbers())
            if copied is not None:
                self._compare(copied.read())

    def forget(self) -> None:
        """Do not read the last sums: those of a step in a graph are overwritten."""
        self._unread = None

    def resolve(self) -> None:
        """Raise, on all ranks, if those of a process group had gradients of different DTensors in any step so far."""
        if self._unread is not None:
            numbers, self._unread = self._numbers(), None
            self._compare(numbers)
        self.raise_fault()

    def _numbers(self) -> torch.Tensor:
        """The sums of c and of c^2 of the last step."""
        if self._unread is None:
            raise RuntimeError("no sums to look at")
        sums, index = self._unread
        return sums[:2].index_select(1, index.on(sums.device))

    def _compare(self, numbers: torch.Tensor) -> None:
        for history, (total, squares) in zip(self._histories, numbers.t().tolist(), strict=True):
            if math.isfinite(total + squares) and history.group.size() * int(squares) != int(total) ** 2:
                import torch.distributed as dist

                self._fault = self._fault or (
                    f"ranks {dist.get_process_group_ranks(history.group)} did not have gradients of the same "
                    "parameters in each step: one of them had None for a DTensor of which another had a gradient, and "
                    "their shards drift apart. States or weights have changed already, so step() and state_dict() of "
                    "this optimizer raise from here on: go on from a checkpoint, with a new optimizer. Give all ranks "
                    "a gradient (zeros), or None"
                )
        self.raise_fault()

    def raise_fault(self) -> None:
        """Raise again what a look has found."""
        if self._fault is not None:
            raise ValueError(self._fault)


class _History:
    """What one rank tells those of a process group about its gradients, as a number.

    Args:
        group: the process group.
        places: of the tensors that lie over it.
    """

    def __init__(self, group: ProcessGroup, places: set[int]) -> None:
        self.group = group
        self._places = places
        # So that n*c^2 is exact. All ranks find the same: it follows from the group.
        home = home_of(group)
        digits = 53 if adds_float64(group, home) and sums_dtype(home) == torch.float64 else 24
        self._limit = min(2**20, math.isqrt(2**digits // group.size()))
        self._without: list[int] = []
        self._checksum = 0

    def number(self, step: int, missing: Sequence[int]) -> int:
        """A checksum of when which tensors began to have no gradient; 0 as long as all have one.

        Args:
            step: the number of this step.
            missing: places of all tensors without a gradient.
        """
        without = sorted(self._places.intersection(missing)) if missing else []
        if without != self._without:
            self._without = without
            self._checksum = zlib.crc32(f"{step} {without}".encode(), self._checksum)
        return self._checksum % self._limit
