"""What changes from step to step, where the Triton kernels read it: addresses of tensors, numbers of groups.

A step sends all of it in one small copy, which the host does not wait for.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import torch

from ..shards import Coefficients, FlatShard
from .columns import ALIGNMENT, COEFFICIENT_COLUMNS, PIECE_COLUMNS
from .upload import upload

_PIECE = struct.Struct(f"={PIECE_COLUMNS}q")
_NUMBERS = struct.Struct(f"={COEFFICIENT_COLUMNS}d")


class Values:
    """The tables of pieces and of coefficients on the device, for a fixed number of pieces."""

    def __init__(self, pieces: int, device: torch.device) -> None:
        self._device = device
        words = pieces * (PIECE_COLUMNS + COEFFICIENT_COLUMNS)
        self._words = torch.zeros(words, dtype=torch.int64, device=device)
        self._length = pieces * _PIECE.size
        self._sent = b""
        split = pieces * PIECE_COLUMNS
        self.pieces = self._words[:split].view(pieces, PIECE_COLUMNS)
        self.coefficients = self._words[split:].view(torch.float64).view(pieces, COEFFICIENT_COLUMNS)
        """As many rows as there are pieces; those that share their numbers share a row."""

    def send(self, pieces: Sequence[FlatShard], rows: Mapping[int, int]) -> None:
        """Bring the tables up to date, in one copy if anything changed.

        Args:
            pieces: of this step. The rows of all others become zeros.
            rows: the row of each piece, by its place.
        """
        words = bytearray(self._length)
        row_of: dict[int, int] = {}
        for piece in pieces:
            c = piece.coefficients
            row = row_of.get(id(c))
            if row is None:
                row = row_of[id(c)] = len(row_of)
                words += _NUMBERS.pack(*_numbers(c))
            u = piece.grad_ema
            param, grad, m, v = (
                piece.param.data_ptr(),
                piece.grad.data_ptr(),
                piece.exp_avg.data_ptr(),
                piece.exp_avg_sq.data_ptr(),
            )
            average = 0 if u is None else u.data_ptr()
            aligned = not (param | grad | m | v | average) % ALIGNMENT
            at = rows[piece.place] * _PIECE.size
            _PIECE.pack_into(words, at, param, grad, m, v, average, aligned, piece.seed & 0xFFFFFFFF, row)
        if words != self._sent:
            self._sent = bytes(words)
            upload(torch.frombuffer(words, dtype=torch.int64), self._device, into=self._words)


def _numbers(c: Coefficients) -> tuple[float, ...]:
    """A row of the table of coefficients."""
    return (
        c.alpha,
        1 - c.beta1,
        c.beta2,
        1 - c.beta2,
        c.beta3,
        1 - c.beta3,
        c.eps1,
        c.weight_decay,
        1 / c.correction2,
        c.correction3**-0.5,
        c.step,
    )
