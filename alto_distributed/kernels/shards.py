"""What a kernel works on: flat shards of parameters, the spans in them, and one step's numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..hyperparameters import Hyperparameters
from ..spans import NONZERO, R_SQUARED, SUMS, THETA_SQUARED, Span

__all__ = ["NONZERO", "R_SQUARED", "SUMS", "THETA_SQUARED", "Batch", "Coefficients", "FlatShard", "Span", "batch_of"]


@dataclass(frozen=True)
class Coefficients:
    """All that phase one and phase two need besides tensors, for one group at one step k."""

    alpha: float
    beta1: float
    beta2: float
    beta3: float
    eps1: float
    weight_decay: float
    correction2: float
    """1 - beta2^k, or 1 without bias correction."""
    correction3: float
    """1 - beta3^k, or 1 without bias correction."""
    step: int = 1
    """k itself: the bits of stochastic rounding hang on it."""

    @classmethod
    def at_step(cls, hyper: Hyperparameters, k: int) -> Coefficients:
        """The numbers of step k = 1, 2, ..."""
        beta1, beta2, beta3 = hyper.betas
        corrected = hyper.bias_correction
        return cls(
            alpha=hyper.alpha,
            beta1=beta1,
            beta2=beta2,
            beta3=beta3,
            eps1=hyper.eps[0],
            weight_decay=hyper.weight_decay,
            correction2=1.0 - beta2**k if corrected else 1.0,
            correction3=1.0 - beta3**k if corrected else 1.0,
            step=k,
        )

    def scale_and_eps(self) -> tuple[float, float]:
        """(s, e) such that m^ / (sqrt(v^) + eps1) = s*m / (sqrt(v) + e): the fast kernels' form of the direction."""
        root = math.sqrt(self.correction3)
        return root / self.correction2, self.eps1 * root


@dataclass(slots=True)
class FlatShard:
    """One flat local tensor with its gradient and states; all one-dimensional and of one length.

    Arithmetic is in the precision of ``exp_avg_sq``, float32 or float64. ``exp_avg`` and ``grad_ema`` have that
    too, or are bfloat16, to which they are rounded stochastically when they are stored (:mod:`.rounding`).
    """

    param: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad_ema: torch.Tensor | None
    """None where alpha is 0 and always was: then the adapted gradient is the gradient."""
    spans: tuple[Span, ...]
    coefficients: Coefficients
    seed: int = 0
    """Of stochastic rounding: the same on all replicas, another for every tensor."""
    place: int = 0
    """Of its tensor in the plan of a step; kernels keep what they know about it under this number."""


class Batch(list[FlatShard]):
    """The shards of one step on one device, with what kernels keep from step to step about those of the same plan.

    Args:
        shards: each with a ``place`` of its own.
        kept: stays with the plan. It holds no tensor of the model, so that memory which an engine moves or frees is
            free. Steps of one plan need not have the same shards: those without a gradient are left out.
    """

    def __init__(self, shards: Iterable[FlatShard] = (), kept: dict[Any, Any] | None = None) -> None:
        super().__init__(shards)
        self.kept: dict[Any, Any] = {} if kept is None else kept


def batch_of(shards: Iterable[FlatShard]) -> Batch:
    """``shards`` itself, or a batch of them that keeps nothing."""
    if isinstance(shards, Batch):
        return shards
    batch = Batch(shards)
    for place, shard in enumerate(batch):
        shard.place = place
    return batch
