"""How the spans of many shards are cut into chunks, one a program, and which launches work on them.

All of this hangs on shapes and dtypes alone. It is made once and kept on the device for as long as the
optimizer steps with the same tensors; addresses and numbers, which change, are ``values``. A shard that is not in a
step keeps its chunks: without an address its programs have nothing to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..shards import SUMS, Dtypes, FlatShard, Memory, Span
from .columns import CHUNK_COLUMNS, PLACE, SLOT, TOTAL_COLUMNS
from .upload import upload


class Tiling(NamedTuple):
    """How much a program does."""

    tile: int
    """Elements that its threads hold at a time; a power of two."""
    tiles: int
    """Tiles in a chunk. More of them make the tables shorter, fewer spread a small model over more of the GPU."""


def tiling_for(device: torch.device) -> Tiling:
    """Four elements a thread, so that float32 moves in the widest loads, and 8192 a program."""
    hip = device.type == "cuda" and torch.version.hip is not None
    wide_warps = hip and torch.cuda.get_device_properties(device).warp_size == 64  # those of CDNA, not of RDNA
    return Tiling(tile=1024, tiles=8) if wide_warps else Tiling(tile=512, tiles=16)


@dataclass(frozen=True)
class Launch:
    """One launch of phase one and one of phase two."""

    dtypes: Dtypes
    programs: int
    chunks: torch.Tensor
    """A row a program, see ``columns``."""


@dataclass(frozen=True)
class Tables:
    """The launches of a step, and what the last one of phase one adds up."""

    launches: tuple[Launch, ...]
    totals: torch.Tensor
    """A row a slot, see ``columns``."""
    partials: torch.Tensor
    """The sums of each program."""


class ShardTable:
    """The chunks of every shard that has stepped so far, and the tables of all of them on the device.

    Args:
        device: of the shards.
        tiling: how much a program does; by default what suits the device.
    """

    def __init__(self, device: torch.device, tiling: Tiling | None = None) -> None:
        self.device = device
        self.tiling = tiling or tiling_for(device)
        self.rows: dict[int, int] = {}
        """Place of a shard in the plan -> its row in the table of shards."""
        self._known: dict[int, tuple[Dtypes, tuple[Span, ...]]] = {}
        self._chunks: dict[int, torch.Tensor] = {}
        self.tables = self._tables()

    def knows(self, shard: FlatShard, dtypes: Dtypes) -> bool:
        known, spans = self._known.get(shard.place, (None, ()))
        # Most tuples of spans are the very objects of last time. Others may ask for sums of other parameters; the
        # kernel makes all sums anyway.
        return known == dtypes and (spans is shard.spans or _without_ratio(spans) == _without_ratio(shard.spans))

    def update(self, shards: Sequence[tuple[FlatShard, Memory, Dtypes]]) -> bool:
        """Take in what is new; whether anything was."""
        changed = False
        for shard, _, dtypes in shards:
            if not self.knows(shard, dtypes):
                changed, shape = True, (dtypes, shard.spans)
                self._known[shard.place] = shape
                row = self.rows.setdefault(shard.place, len(self.rows))
                self._chunks[shard.place] = _chunks(row, shard.spans, self.tiling)
        if changed:
            self.tables = self._tables()
        return changed

    def _tables(self) -> Tables:
        alike: dict[Dtypes, list[torch.Tensor]] = {}
        for place, (dtypes, _) in self._known.items():
            alike.setdefault(dtypes, []).append(self._chunks[place])
        rows = {dtypes: torch.cat(some) for dtypes, some in alike.items()}
        slots = torch.cat([_empty(1)[:, 0], *(some[:, SLOT] for some in rows.values())])
        # The partial sums of a slot stand side by side, whichever launches and shards its chunks are in.
        places = torch.empty_like(slots)
        places[slots.argsort(stable=True)] = torch.arange(len(slots), dtype=torch.int64, device="cpu")
        start, launches = 0, []
        for dtypes, some in rows.items():
            some[:, PLACE] = places[start : start + len(some)]
            start += len(some)
            if len(some):
                launches.append(Launch(dtypes, len(some), upload(some, self.device)))
        present, counts = torch.unique(slots, return_counts=True)
        totals = torch.stack([counts.cumsum(0) - counts, counts, present], dim=1).view(-1, TOTAL_COLUMNS)
        partials = torch.zeros(SUMS, len(slots), dtype=torch.float64, device=self.device)
        return Tables(tuple(launches), upload(totals, self.device), partials)


def _without_ratio(spans: Sequence[Span]) -> list[Span]:
    return [span._replace(ratio=True) for span in spans]


def _empty(columns: int) -> torch.Tensor:
    return torch.empty(0, columns, dtype=torch.int64, device="cpu")


def _chunks(row: int, spans: Sequence[Span], tiling: Tiling) -> torch.Tensor:
    """The spans of a shard in chunks that begin at multiples of the tile, except where a span itself begins or ends."""
    tile, length = tiling.tile, tiling.tile * tiling.tiles
    found = [_empty(CHUNK_COLUMNS)]
    for start, stop, slot, _, seed, offset in spans:
        if start < stop:
            first = torch.arange(start // tile, -(-stop // tile), tiling.tiles, dtype=torch.int64, device="cpu")
            low = first * tile
            bounds = low.clamp(min=start), (low + length).clamp(max=stop)
            same = (torch.full_like(first, number) for number in (slot, -1, seed & 0xFFFFFFFF, offset - start))
            found.append(torch.stack([torch.full_like(first, row), *bounds, *same], dim=1))
    return torch.cat(found)
