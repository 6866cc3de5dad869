"""What changes from step to step, where the Triton kernels read it: addresses of tensors, numbers of groups.

A step of an optimizer whose numbers live on the host sends all of it in one small copy (:class:`Values`).
One that a CUDA graph replays must not send anything: its addresses stay, and its numbers are computed on the
device from a step counter and a learning rate that live there (:class:`DeviceCoefficients`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...hyperparameters import Hyperparameters
from ..shards import Coefficients, FlatShard
from .columns import ALIGNMENT, COEFFICIENT_COLUMNS, CORRECTION2, CORRECTION3, LR, PIECE_COLUMNS, STEP


class Values:
    """The tables of pieces and of coefficients on the device, for a fixed number of pieces."""

    def __init__(self, pieces: int, device: torch.device) -> None:
        self._words = torch.zeros(pieces * (PIECE_COLUMNS + COEFFICIENT_COLUMNS), dtype=torch.int64, device=device)
        self._sent: torch.Tensor | None = None
        split = pieces * PIECE_COLUMNS
        self.pieces = self._words[:split].view(pieces, PIECE_COLUMNS)
        self.coefficients = self._words[split:].view(torch.float64).view(pieces, COEFFICIENT_COLUMNS)
        """As many rows as there are pieces; those that share their numbers share a row."""

    def send(self, pieces: Sequence[FlatShard]) -> None:
        """Bring the tables up to date, in one copy if anything changed. Never waits for the device."""
        rows: dict[int, int] = {}
        distinct: list[Coefficients] = []
        for piece in pieces:
            if id(piece.coefficients) not in rows:
                rows[id(piece.coefficients)] = len(distinct)
                distinct.append(piece.coefficients)
        words = torch.cat(
            [
                _words_of_pieces(pieces, [rows[id(piece.coefficients)] for piece in pieces]),
                torch.tensor([_numbers(c) for c in distinct], dtype=torch.float64, device="cpu")
                .view(-1)
                .view(torch.int64),
            ]
        )
        self._send(words)
        for row, c in enumerate(distinct):
            if isinstance(c.lr, torch.Tensor) and c.lr.device.type != "cpu":
                self.coefficients[row, LR] = c.lr

    def send_addresses(self, pieces: Sequence[FlatShard], rows: Sequence[int]) -> None:
        """The table of pieces alone; ``rows`` says which row of another table of coefficients each piece uses."""
        self._send(_words_of_pieces(pieces, rows))

    def _send(self, words: torch.Tensor) -> None:
        if self._sent is not None and torch.equal(words, self._sent):
            return
        device = self._words.device
        if device.type == "cuda":
            # Pinned anew each time: the allocator hands out memory that no copy in flight still reads.
            self._words[: words.numel()].copy_(words.pin_memory(), non_blocking=True)
        else:
            self._words[: words.numel()].copy_(words)
        self._sent = words


class DeviceCoefficients:
    """A table of coefficients that is filled by operations on the device only.

    Args:
        hypers: one for each row: for each parameter group, or each part of one that counts its own steps.
        device: where the table lives. It stays in place, so a graph that reads it may be replayed.
    """

    def __init__(self, hypers: Sequence[Hyperparameters], device: torch.device) -> None:
        numbers = [_numbers(Coefficients.at_step(hyper, 1)) for hyper in hypers]
        self.rows = torch.tensor(numbers, dtype=torch.float64, device=device)
        betas = torch.tensor([hyper.betas for hyper in hypers], dtype=torch.float64, device=device)
        self._beta2, self._beta3 = betas[:, 1], betas[:, 2]
        self._corrected = torch.tensor([hyper.bias_correction for hyper in hypers], device=device)

    def advance(self, step: torch.Tensor, lr: torch.Tensor) -> None:
        """The numbers of the step that is to come.

        Args:
            step: its number k = 1, 2, ... on the device; one for all rows, or one a row.
            lr: the learning rate on the device; one for all rows, or one a row.
        """
        k = step.to(torch.float64)
        self.rows[:, CORRECTION2] = torch.where(self._corrected, 1 - self._beta2**k, 1.0).reciprocal()
        self.rows[:, CORRECTION3] = torch.where(self._corrected, 1 - self._beta3**k, 1.0).rsqrt()
        self.rows[:, STEP] = k
        self.rows[:, LR] = lr.to(torch.float64)


def _numbers(c: Coefficients) -> list[float]:
    """A row of the table of coefficients. An lr on a device follows by another way, never through the host."""
    on_device = isinstance(c.lr, torch.Tensor) and c.lr.device.type != "cpu"
    lr = 0.0 if on_device else float(c.lr)
    return [
        lr,
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
    ]


def _words_of_pieces(pieces: Sequence[FlatShard], rows: Sequence[int]) -> torch.Tensor:
    words: list[int] = []
    for piece, row in zip(pieces, rows, strict=True):
        addresses = [
            piece.param.data_ptr(),
            piece.grad.data_ptr(),
            piece.exp_avg.data_ptr(),
            piece.exp_avg_sq.data_ptr(),
            0 if piece.grad_ema is None else piece.grad_ema.data_ptr(),
            0 if piece.model_copy is None else piece.model_copy.data_ptr(),
        ]
        aligned = not any(address % ALIGNMENT for address in addresses)
        words += [*addresses, int(aligned), piece.seed & 0xFFFFFFFF, row]
    return torch.tensor(words, dtype=torch.int64, device="cpu")
