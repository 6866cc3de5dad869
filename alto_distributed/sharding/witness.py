"""Whether the ranks that share parameters have gradients of the same ones.

A DTensor with a gradient on one rank and None on another would be updated on one of them alone, and its shards drift
apart. So each rank sends one more column with the sums of squares, for each process group: a number c that stands for
the DTensors without a gradient, as c and c^2. All c are equal if and only if n*sum(c^2) = sum(c)^2. It costs no
collective and no launch. Sums on the host are looked at in the step; those on an accelerator when states are saved.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .collective import adds_float64, home_of
from .layout import LogicalParameter
from .norms import NormTable, sums_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class GradientWitness:
    """One logical parameter more for each process group over which DTensors lie; its slot takes c and c^2.

    Args:
        groups: of each tensor of a plan, the process groups over which its shards lie; none if it is no DTensor.
    """

    def __init__(self, groups: Sequence[Sequence[ProcessGroup]]) -> None:
        self._places: dict[ProcessGroup, list[int]] = {}
        for place, own in enumerate(groups):
            for group in own:
                if group.size() > 1 and adds_float64(group, home_of(group)):
                    self._places.setdefault(group, []).append(place)
        names = [f"~ gradients over process group {i}" for i in range(len(self._places))]
        self.parameters = [
            LogicalParameter(name, (group.size(),), (group,)) for name, group in zip(names, self._places, strict=True)
        ]
        self._kept: dict[torch.device, tuple[tuple[int, ...], torch.Tensor]] = {}
        self._unread: tuple[torch.Tensor, NormTable] | None = None

    def table(self, device: torch.device, norms: NormTable, missing: Sequence[int]) -> torch.Tensor:
        """A table of sums with nothing in it but this rank's numbers: a copy of one that is kept, in one launch.

        Args:
            device: where to make it.
            norms: whose table it is.
            missing: places of the tensors that have no gradient.
        """
        if not self.parameters:
            return norms.zeros(device)
        numbers = tuple(_number(places, missing) for places in self._places.values())
        if self._kept.get(device, ((), None))[0] != numbers:
            table = norms.zeros(torch.device("cpu")).to(sums_dtype(device))
            for parameter, c in zip(self.parameters, numbers, strict=True):
                table[0, norms.slots[parameter.name]], table[1, norms.slots[parameter.name]] = c, c * c
            self._kept[device] = numbers, table.to(device)
        return self._kept[device][1].clone()

    def look(self, sums: torch.Tensor, norms: NormTable) -> None:
        """Compare the ranks by completed sums: now, or, to wait for no device, in :meth:`resolve`."""
        if self.parameters:
            self._unread = sums, norms
            if sums.device.type == "cpu":
                self.resolve()

    def forget(self) -> None:
        """Do not read the last sums: those of a step in a graph are overwritten."""
        self._unread = None

    def resolve(self) -> None:
        """Raise, on all ranks, if those of a process group had gradients of different DTensors in the last step."""
        if self._unread is None:
            return
        (sums, norms), self._unread = self._unread, None
        index = [norms.slots[parameter.name] for parameter in self.parameters]
        for group, (total, squares) in zip(self._places, sums[:2, index].t().tolist(), strict=True):
            if math.isfinite(total + squares) and group.size() * int(squares) != int(total) ** 2:
                import torch.distributed as dist

                raise ValueError(
                    f"ranks {dist.get_process_group_ranks(group)} do not have gradients of the same parameters: one of "
                    "them has None for a DTensor of which another has a gradient, and their shards would drift apart. "
                    "Give all ranks a gradient (zeros), or None"
                )


def _number(places: Sequence[int], missing: Sequence[int]) -> int:
    """0 if no tensor has a gradient, 1 if all have; else a checksum of those without."""
    if not missing:
        return 1
    without = sorted(set(places).intersection(missing))
    if len(without) == len(places):
        return 0
    return 2 + zlib.crc32(repr(without).encode()) % (2**20 - 2) if without else 1
