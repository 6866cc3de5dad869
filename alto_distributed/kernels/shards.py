"""What a kernel works on: flat shards of parameters, the spans in them, and one step's numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..hyperparameters import Hyperparameters
from ..spans import NO_RATIO, Span

__all__ = ["NO_RATIO", "Coefficients", "FlatShard", "Span"]


@dataclass(frozen=True)
class Coefficients:
    """All that phase one and phase two need besides tensors, for one group at one step k."""

    lr: float | torch.Tensor
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
        # A number on the host is read here, for nothing. Kernels would copy it to the device, once a shard.
        on_host = isinstance(hyper.lr, torch.Tensor) and hyper.lr.device.type == "cpu"
        corrected = hyper.bias_correction
        return cls(
            lr=float(hyper.lr) if on_host else hyper.lr,
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


@dataclass
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
    model_copy: torch.Tensor | None = None
    """bfloat16: where phase two also puts the new ``param``, rounded to nearest."""
    seed: int = 0
    """Of stochastic rounding: the same on all replicas, another for every tensor."""
