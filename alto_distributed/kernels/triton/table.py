"""How the spans of many pieces are cut into chunks, one a program, and which launches work on them.

All of this hangs on shapes and dtypes alone. It is made once and kept on the device for as long as the
optimizer steps with the same tensors; addresses and numbers, which change, are ``values``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..shards import NO_RATIO, FlatShard, Span
from .columns import CHUNK_COLUMNS, SLOT, TOTAL_COLUMNS


class Dtypes(NamedTuple):
    """What a kernel is compiled for. Pieces alike in these share a launch; for most models that is all of them."""

    param: torch.dtype
    grad: torch.dtype
    exp_avg: torch.dtype
    grad_ema: torch.dtype | None
    model_copy: torch.dtype | None

    @classmethod
    def of(cls, piece: FlatShard) -> Dtypes:
        return cls(
            piece.param.dtype,
            piece.grad.dtype,
            piece.exp_avg.dtype,
            None if piece.grad_ema is None else piece.grad_ema.dtype,
            None if piece.model_copy is None else piece.model_copy.dtype,
        )


class Tiling(NamedTuple):
    """How much a program does."""

    tile: int
    """Elements that its threads hold at a time; a power of two."""
    tiles: int
    """Tiles in a chunk. More of them make the tables shorter, fewer spread a small model over more of the GPU."""


def tiling_for(device: torch.device) -> Tiling:
    """Four elements a thread, so that float32 moves in the widest loads, and 8192 a program."""
    wide_warps = device.type == "cuda" and torch.version.hip is not None
    return Tiling(tile=1024, tiles=8) if wide_warps else Tiling(tile=512, tiles=16)


@dataclass(frozen=True)
class Launch:
    """One launch of phase one and one of phase two; the tensors are those that ``kernel`` reads."""

    dtypes: Dtypes
    programs: int
    chunks: torch.Tensor
    totals: torch.Tensor
    arrivals: torch.Tensor
    """How many programs of a slot are done. 0 between launches: the last one resets it."""
    partials: torch.Tensor
    """|theta|^2 and |r|^2 of each program's chunk."""


class Shape(NamedTuple):
    """All that the launches hang on."""

    device: torch.device
    tiling: Tiling
    pieces: tuple[tuple[Dtypes, tuple[Span, ...]], ...]


def shape_of(pieces: Sequence[FlatShard], tiling: Tiling | None = None) -> Shape:
    device = pieces[0].param.device
    return Shape(device, tiling or tiling_for(device), tuple((Dtypes.of(piece), piece.spans) for piece in pieces))


def launches_of(shape: Shape) -> tuple[Launch, ...]:
    """The launches that serve pieces of such a shape."""
    device, tiling, pieces = shape
    chunks: dict[Dtypes, list[list[int]]] = {}
    for index, (dtypes, spans) in enumerate(pieces):
        chunks.setdefault(dtypes, []).extend(chunk for span in spans for chunk in _chunks(index, span, tiling))
    return tuple(_launch(dtypes, rows, device) for dtypes, rows in chunks.items() if rows)


def _chunks(piece: int, span: Span, tiling: Tiling) -> Iterator[list[int]]:
    """A span in chunks that begin at multiples of the tile, except where the span itself begins or ends."""
    first = span.start // tiling.tile
    last = -(-span.stop // tiling.tile)
    for tile in range(first, last, tiling.tiles) if span.stop > span.start else ():
        low, high = tile * tiling.tile, (tile + tiling.tiles) * tiling.tile
        yield [piece, tile, max(low, span.start), min(high, span.stop), span.slot]


def _launch(dtypes: Dtypes, rows: list[list[int]], device: torch.device) -> Launch:
    # The programs of a slot stand side by side, whichever pieces its spans are in. The sort keeps their order.
    rows.sort(key=lambda row: row[SLOT])
    totals: list[list[int]] = []
    slot_before = NO_RATIO
    for program, row in enumerate(rows):
        slot = row[SLOT]
        if slot == NO_RATIO:
            row.append(-1)
            continue
        if slot != slot_before:
            totals.append([program, 0])
        slot_before = slot
        totals[-1][1] += 1
        row.append(len(totals) - 1)
    return Launch(
        dtypes=dtypes,
        programs=len(rows),
        chunks=torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, CHUNK_COLUMNS).to(device),
        totals=torch.tensor(totals, dtype=torch.int64, device="cpu").view(-1, TOTAL_COLUMNS).to(device),
        arrivals=torch.zeros(len(totals), dtype=torch.int32, device=device),
        partials=torch.zeros(2, len(rows), dtype=torch.float64, device=device),
    )
