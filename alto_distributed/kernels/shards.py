"""What a kernel works on: flat shards of parameters, the spans in them, and one step's numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..hyperparameters import Hyperparameters
from ..spans import NONZERO, R_SQUARED, SUMS, THETA_SQUARED, Span
from .memory import Memory, memory_of

__all__ = [
    "NONZERO",
    "R_SQUARED",
    "SUMS",
    "THETA_SQUARED",
    "Batch",
    "Coefficients",
    "Dtypes",
    "FlatShard",
    "Memory",
    "Span",
    "batch_of",
    "flattened",
    "memory_of",
]


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
    sign: float = 1.0
    """-1 to climb: what the gradient is multiplied by."""
    bias_correction: bool = True

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
            sign=-1.0 if hyper.maximize else 1.0,
            bias_correction=corrected,
        )

    @property
    def corrected(self) -> tuple[float, float]:
        """What the corrections of the moments are powers of: the betas, or 0 without bias correction."""
        return (self.beta2, self.beta3) if self.bias_correction else (0.0, 0.0)

    def scale_and_eps(self) -> tuple[float, float]:
        """(s, e) such that m^ / (sqrt(v^) + eps1) = s*m / (sqrt(v) + e): the fast kernels' form of the direction."""
        root = math.sqrt(self.correction3)
        return root / self.correction2, self.eps1 * root


class Dtypes(NamedTuple):
    """What a kernel is compiled for. Shards alike in these share a launch; for most models that is all of them."""

    param: torch.dtype
    grad: torch.dtype
    exp_avg: torch.dtype
    grad_ema: torch.dtype | None

    @classmethod
    def of(cls, shard: FlatShard) -> Dtypes:
        u = shard.grad_ema
        return cls(shard.param.dtype, shard.grad.dtype, shard.exp_avg.dtype, None if u is None else u.dtype)

    def in_words(self) -> str:
        return ", ".join(f"{name} {str(dtype).removeprefix('torch.')}" for name, dtype in self._asdict().items())


@dataclass(slots=True)
class FlatShard:
    """One local tensor with its gradient and states, of one length, their elements in the same order in memory.

    They may have any shape: what counts is the order. :func:`flattened` makes views of one dimension.

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
    place: int = 0
    """Of its tensor in the plan of a step; kernels keep what they know about it under this number."""
    inverse_scale: torch.Tensor | None = None
    """One number on the device that the gradient is multiplied by as it is read: 1 / the scale of a GradScaler."""
    counter: torch.Tensor | None = None
    """k on the device, where the host does not know it: under ``capturable``. Then the corrections and the step of
    ``coefficients`` are not used."""
    rounds_weights: bool = False
    """Whether weights in bfloat16 are rounded stochastically as they are stored. Else they are, to nearest."""
    found: Memory | None = None
    """What :func:`memory_of` gave for these very tensors, if somebody has asked already."""

    @property
    def memory(self) -> Memory | None:
        return self.found or memory_of(self.param, self.grad, self.exp_avg, self.exp_avg_sq, self.grad_ema)

    @property
    def gradient_factor(self) -> float | torch.Tensor:
        """What a kernel multiplies the gradient by, in the precision of the arithmetic."""
        sign = self.coefficients.sign
        return sign if self.inverse_scale is None else self.inverse_scale * sign

    def as_taken(self, g: torch.Tensor) -> torch.Tensor:
        """What the update takes for elements of the gradient, which are in the precision of the arithmetic."""
        return g if self.inverse_scale is None and self.coefficients.sign == 1 else g * self.gradient_factor


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


def flattened(shards: Sequence[FlatShard]) -> Batch:
    """The same shards as views of one dimension, for kernels that index them."""
    kept = shards.kept if isinstance(shards, Batch) else None
    return Batch([shard if shard.param.ndim == 1 else _flat(shard) for shard in shards], kept)


def _flat(shard: FlatShard) -> FlatShard:
    u = shard.grad_ema
    return replace(
        shard,
        param=shard.param.view(-1),
        grad=shard.grad.reshape(-1),
        exp_avg=shard.exp_avg.view(-1),
        exp_avg_sq=shard.exp_avg_sq.view(-1),
        grad_ema=None if u is None else u.view(-1),
        found=None,
    )
