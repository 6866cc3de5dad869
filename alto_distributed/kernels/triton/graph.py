"""A step that a CUDA graph can replay: nothing in it comes from the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...hyperparameters import Hyperparameters
from ..shards import FlatShard
from .launch import launch_phase_one, launch_phase_two
from .step import serves
from .table import Tiling, launches_of, shape_of
from .values import DeviceCoefficients, Values


class ReplayedStep:
    """Both phases over tensors that stay in place, with numbers that live on the device.

    Capture :meth:`advance`, :meth:`phase_one` and :meth:`phase_two`, with what the caller does in between, after one
    step outside of the graph that compiles them. Before each replay copy the new gradients into the tensors of the
    pieces, and change the step counter and the learning rate in place.

    Args:
        pieces: tensors that outlive this object. Their coefficients are not read.
        rows: for each piece, its place in ``hypers``.
        hypers: one for each row of the table of coefficients, see :class:`DeviceCoefficients`.
        tiling: how much a program does; by default what suits the device.
    """

    def __init__(
        self,
        pieces: Sequence[FlatShard],
        rows: Sequence[int],
        hypers: Sequence[Hyperparameters],
        tiling: Tiling | None = None,
    ) -> None:
        if not pieces or not all(map(serves, pieces)):
            raise ValueError("a replayed step needs pieces, all of dtypes that the Triton kernel serves (not float64)")
        shape = shape_of(pieces, tiling)
        self._tiling = shape.tiling
        self._launches = launches_of(shape)
        self._values = Values(len(pieces), shape.device)
        self._values.send_addresses(pieces, rows)
        self._coefficients = DeviceCoefficients(hypers, shape.device)

    def advance(self, step: torch.Tensor, lr: torch.Tensor) -> None:
        """See :meth:`DeviceCoefficients.advance`."""
        self._coefficients.advance(step, lr)

    def phase_one(self, sums: torch.Tensor) -> None:
        launch_phase_one(self._launches, self._tiling, self._values.pieces, self._coefficients.rows, sums)

    def phase_two(self, step_sizes: torch.Tensor) -> None:
        launch_phase_two(self._launches, self._tiling, self._values.pieces, self._coefficients.rows, step_sizes)
