"""The definition of ALTO, line by line beside the paper's Algorithm "ALTO".

Written for reading, not for speed: it makes full-size temporaries. It computes in float64 when the
states are float64, else in float32 (states kept in bfloat16 are rounded as they are stored, no sooner);
the other kernels are tested against it.

    paper                                               here
    a_k = b1 a_{k-1} + (1-b1)(g_k - g_{k-1})            a = (1-b1)(g - u_{k-1}),  u_k = u_{k-1} + a
    m_k, v_k                                            moments of d = g + alpha a
    r_k = m^ / (sqrt(v^) + eps1) + lambda theta         direction
    theta_{k+1} = theta_k - eta r phi(|theta|) / (|r| + eps2 phi(|theta|))       trust_ratio, phase_two

The first line is exact, by induction: with u the moving average of the raw gradient,
u_k - u_{k-1} obeys the same recurrence as a_k and starts at the same 0. Keeping u therefore replaces
both a and the previous gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .rounding import EXP_AVG_BITS, GRAD_EMA_BITS, store, store_weights
from .shards import NONZERO, R_SQUARED, THETA_SQUARED, Coefficients, FlatShard, flattened


def adapt_gradient(
    g: torch.Tensor, u_prev: torch.Tensor, alpha: float, beta1: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The paper's "E": the adapted gradient d_k and the next u_k, from g_k and u_{k-1}."""
    a = (1 - beta1) * (g - u_prev)
    return g + alpha * a, u_prev + a


def direction(theta: torch.Tensor, m: torch.Tensor, v: torch.Tensor, c: Coefficients) -> torch.Tensor:
    """r_k: the bias-corrected quotient of the moments plus the decay."""
    m_hat = m / c.correction2
    v_hat = v / c.correction3
    return m_hat / (v_hat.sqrt() + c.eps1) + c.weight_decay * theta


def trust_ratio(
    theta_norm: torch.Tensor, r_norm: torch.Tensor, eps2: float, eps3: float, *, one_at_zero: bool
) -> torch.Tensor:
    """phi(|theta|) / (|r| + eps2 phi(|theta|)), elementwise over many parameters.

    Args:
        theta_norm: norms of whole logical parameters.
        r_norm: norms of their directions r.
        eps2: keeps the ratio below 1/eps2.
        eps3: phi(x) = x + eps3.
        one_at_zero: ratio 1 where either norm is 0, so that a zero-initialized tensor can leave zero.
            Off, the formula stands as written.
    """
    phi = theta_norm + eps3
    denominator = r_norm + eps2 * phi
    if one_at_zero:
        is_one = (theta_norm == 0) | (r_norm == 0)
    else:  # With eps2 = 0 and r = 0 the quotient is x/0; the step it scales is 0 whatever the ratio.
        is_one = denominator == 0
    return (phi / denominator).masked_fill_(is_one, 1.0)


def phase_one(shards: Sequence[FlatShard], sums: torch.Tensor) -> None:
    for shard in flattened(shards):
        c = shard.coefficients
        dtype = shard.exp_avg_sq.dtype
        for span in shard.spans:
            here, slot = slice(span.start, span.stop), span.slot
            v = shard.exp_avg_sq[here]
            g, m, theta = (t[here].to(dtype) for t in (shard.grad, shard.exp_avg, shard.param))
            g = d = shard.as_taken(g)
            if shard.grad_ema is not None:
                d, u = adapt_gradient(g, shard.grad_ema[here].to(dtype), c.alpha, c.beta1)
                store(shard.grad_ema[here], u, span, c.step, GRAD_EMA_BITS)
            store(shard.exp_avg[here], c.beta2 * m + (1 - c.beta2) * d, span, c.step, EXP_AVG_BITS)
            v.copy_(c.beta3 * v + (1 - c.beta3) * d**2)
            sums[NONZERO, slot] += g.count_nonzero()
            if span.ratio:
                r = direction(theta, shard.exp_avg[here].to(dtype), v, c)  # of the m that is kept: phase two's
                sums[THETA_SQUARED, slot] += theta.to(sums.dtype).square().sum()
                sums[R_SQUARED, slot] += r.to(sums.dtype).square().sum()


def phase_two(shards: Sequence[FlatShard], step_sizes: torch.Tensor, prepared: None = None) -> None:
    for shard in flattened(shards):
        c = shard.coefficients
        dtype = shard.exp_avg_sq.dtype
        for span in shard.spans:
            here, slot = slice(span.start, span.stop), span.slot
            m, v = shard.exp_avg[here].to(dtype), shard.exp_avg_sq[here]
            theta = shard.param[here].to(dtype)
            moved = theta - step_sizes[slot] * direction(theta, m, v, c)
            # 0 is "stay": also where r is not a number.
            store_weights(shard, span, torch.where(step_sizes[slot] == 0, theta, moved))
