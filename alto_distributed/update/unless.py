"""A kernel that changes nothing where a flag on the device is set, for devices on which the host must not wait.

It serves any kernel of this folder: what a chunk holds is put aside, the kernel works on the chunk, and if the
flag is set the old values come back, bit for bit. The memory is that of one chunk's operands. (The Triton kernel has
a better way: its programs read the flag and end.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch

from .chunked import chunks
from .pieces import Piece, Span


class _Phases(Protocol):
    def phase_one(self, pieces: Sequence[Piece], sums: torch.Tensor) -> None: ...

    def phase_two(self, pieces: Sequence[Piece], step_sizes: torch.Tensor) -> None: ...


class Unless:
    """``kernel``, with every write undone on the device if ``skip`` is not 0."""

    def __init__(self, kernel: _Phases, skip: torch.Tensor) -> None:
        self._kernel = kernel
        self._skip = skip.reshape(()) != 0

    def phase_one(self, pieces: Sequence[Piece], sums: torch.Tensor) -> None:
        for piece, here in _pieces_of_a_chunk(pieces):
            with self._kept([t[here] for t in (piece.exp_avg, piece.exp_avg_sq, piece.grad_ema) if t is not None]):
                self._kernel.phase_one([piece], sums)

    def phase_two(self, pieces: Sequence[Piece], step_sizes: torch.Tensor) -> None:
        for piece, here in _pieces_of_a_chunk(pieces):
            with self._kept([t[here] for t in (piece.param, piece.model_copy) if t is not None]):
                self._kernel.phase_two([piece], step_sizes)

    @contextmanager
    def _kept(self, targets: Sequence[torch.Tensor]) -> Iterator[None]:
        before = [target.clone() for target in targets]
        yield
        for target, old in zip(targets, before, strict=True):
            torch.where(self._skip, old, target, out=target)


def _pieces_of_a_chunk(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, slice]]:
    for piece in pieces:
        for here, slot in chunks(piece):
            yield replace(piece, spans=(Span(here.start, here.stop, slot),)), here
