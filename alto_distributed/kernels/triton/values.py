"""What changes from step to step, where the Triton kernels read it: addresses of tensors, numbers of groups.

A step sends all of it in one small copy, which the host does not wait for. Under ``capturable`` the device works out
the bias corrections, from counters that are there.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import torch

from ..shards import Coefficients, FlatShard, Memory
from .columns import ALIGNMENT, COEFFICIENT_COLUMNS, CORRECTION2, CORRECTION3, PIECE_COLUMNS, STEP
from .upload import upload

_PIECE = struct.Struct(f"={PIECE_COLUMNS}q")
_NUMBERS = struct.Struct(f"={COEFFICIENT_COLUMNS}d")


class Values:
    """The tables of pieces and of coefficients on the device, for a fixed number of pieces.

    Args:
        pieces: how many.
        device: of the pieces.
        pinned: memory of the host for the one copy that a graph records. Nothing else may ever be written to it.
    """

    def __init__(self, pieces: int, device: torch.device, pinned: torch.Tensor | None = None) -> None:
        self._device = device
        words = pieces * (PIECE_COLUMNS + COEFFICIENT_COLUMNS)
        self._words = torch.zeros(words, dtype=torch.int64, device=device)
        self._length = pieces * _PIECE.size
        self._sent = b""
        self.pinned = pinned
        self.spare: torch.Tensor | None = None
        """For the next capture, in which no memory can be pinned."""
        split = pieces * PIECE_COLUMNS
        self.pieces = self._words[:split].view(pieces, PIECE_COLUMNS)
        self.coefficients = self._words[split:].view(torch.float64).view(pieces, COEFFICIENT_COLUMNS)
        """As many rows as there are pieces; those that share their numbers share a row."""
        self.inverse_scale = self._one = torch.ones(1, dtype=torch.float32, device=device)

    def send(self, pieces: Sequence[tuple[FlatShard, Memory]], rows: Mapping[int, int]) -> None:
        """Bring the tables up to date, in one copy if anything changed.

        Args:
            pieces: of this step. The rows of all others become zeros.
            rows: the row of each piece, by its place.
        """
        words = bytearray(self._length)
        row_of: dict[int, int] = {}
        for piece, memory in pieces:
            c = piece.coefficients
            # A piece whose number of steps is on the device has a row of its own.
            key = id(c) if piece.counter is None else id(piece)
            row = row_of.get(key)
            if row is None:
                row = row_of[key] = len(row_of)
                words += _NUMBERS.pack(*_numbers(c, piece.counter is not None))
            param, grad, m, v, average = memory.addresses
            aligned = not (param | grad | m | v | average) % ALIGNMENT
            at = rows[piece.place] * _PIECE.size
            _PIECE.pack_into(words, at, param, grad, m, v, average, aligned, piece.seed & 0xFFFFFFFF, row)
        counters = [piece.counter for piece, _ in pieces if piece.counter is not None]
        if counters or words != self._sent:
            self._sent = bytes(words)
            self._copy(torch.frombuffer(words, dtype=torch.int64))
        if counters:
            self._correct(torch.stack(counters).double())
            if self.spare is None and self.pinned is None:
                is_host = self._device.type == "cpu"
                self.spare = torch.empty_like(self._words, device="cpu", pin_memory=not is_host)
        scale = pieces[0][0].inverse_scale
        self.inverse_scale = self._one if scale is None else scale

    def for_capture(self) -> Values | None:
        """Tables of their own for a step that is recorded, which takes the spare memory; None if there is none."""
        pinned, self.spare = self.spare, None
        return None if pinned is None else Values(len(self.pieces), self._device, pinned)

    def _copy(self, words: torch.Tensor) -> None:
        if self.pinned is None:
            upload(words, self._device, into=self._words)
        else:
            self.pinned[: len(words)].copy_(words)
            self._words[: len(words)].copy_(self.pinned[: len(words)], non_blocking=True)

    def _correct(self, k: torch.Tensor) -> None:
        """Turn the columns that hold betas into the corrections of steps ``k``, one a row."""
        rows = self.coefficients[: len(k)]
        left = 1 - rows[:, CORRECTION2 : CORRECTION3 + 1] ** k.view(-1, 1)
        rows[:, CORRECTION2] = left[:, 0].reciprocal()
        rows[:, CORRECTION3] = left[:, 1].rsqrt()
        rows[:, STEP] = k


def _numbers(c: Coefficients, on_device: bool) -> tuple[float, ...]:
    """A row of the table of coefficients; ``on_device`` if the device makes the corrections, from betas."""
    corrections = c.corrected if on_device else (1 / c.correction2, c.correction3**-0.5)
    return (
        c.alpha,
        1 - c.beta1,
        c.beta2,
        1 - c.beta2,
        c.beta3,
        1 - c.beta3,
        c.eps1,
        c.weight_decay,
        *corrections,
        c.step,
        c.sign,
    )
