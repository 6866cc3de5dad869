"""The same update in plain torch operations, in chunks that stay in cache.

A step over a large tensor with whole-tensor operations would move every operand through memory once
an operation, and hold several full-size temporaries. Here each chunk goes through all operations
while it is in cache, and the only temporaries are a few chunk-sized buffers, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .rounding import EXP_AVG_BITS, GRAD_EMA_BITS, store, store_weights
from .shards import NONZERO, R_SQUARED, THETA_SQUARED, Coefficients, FlatShard, Span, flattened

# Buffers of 5 MiB beside 5 MiB of operands stay in a CPU's last-level cache. Much smaller chunks are slower:
# torch splits an operation over threads only from 32K elements on, and each costs microseconds to start.
CPU_CHUNK = 1 << 18
# On an accelerator a launch must be long enough to hide its own cost; 16 MiB of buffers in float32.
ACCELERATOR_CHUNK = 1 << 20
# A weight decay below this is no divisor: see _direction.
SMALLEST_DIVISOR = 1e-12


class _Scratch:
    """Buffers that live for one phase of one step."""

    def __init__(self, shard: FlatShard, length: int, sums_dtype: torch.dtype | None) -> None:
        like = shard.exp_avg_sq
        self._like = like
        self._length = length
        self._named: dict[str, torch.Tensor] = {}
        self._wide = None
        if sums_dtype is not None and sums_dtype != like.dtype:
            self._wide = torch.empty(length, dtype=sums_dtype, device=like.device)

    def buffer(self, name: str, length: int) -> torch.Tensor:
        """A buffer for intermediate values, made when it is first asked for."""
        if name not in self._named:
            self._named[name] = torch.empty(self._length, dtype=self._like.dtype, device=self._like.device)
        whole = self._named[name]
        return whole if length == self._length else whole[:length]  # making a view costs a microsecond

    def in_full(self, name: str, source: torch.Tensor) -> torch.Tensor:
        """``source`` itself, or its conversion to the precision of the arithmetic into a buffer."""
        if source.dtype == self._like.dtype:
            return source
        return self.buffer(name, source.numel()).copy_(source)

    def sum_of_squares(self, x: torch.Tensor) -> torch.Tensor:
        """In the precision of ``sums``: float32 would lose digits over 1e8 elements."""
        if self._wide is None:
            return torch.dot(x, x)
        wide = self._wide if x.numel() == self._length else self._wide[: x.numel()]
        return torch.dot(wide.copy_(x), wide)


def chunk_length(device: torch.device) -> int:
    return CPU_CHUNK if device.type == "cpu" else ACCELERATOR_CHUNK


def phase_one(shards: Sequence[FlatShard], sums: torch.Tensor) -> None:
    for shard, scratch in _with_scratch(shards, sums.dtype):
        c = shard.coefficients
        for span in chunks(shard):
            here, slot = slice(span.start, span.stop), span.slot
            v = shard.exp_avg_sq[here]
            d = _gradient(shard, here, scratch)
            sums[NONZERO, slot].add_(d.count_nonzero())
            if shard.grad_ema is not None:
                d = _adapt(d, shard.grad_ema[here], shard, span, scratch)
            m = scratch.in_full("m", shard.exp_avg[here]).lerp_(d, 1 - c.beta2)
            v.mul_(c.beta3).addcmul_(d, d, value=1 - c.beta3)
            if shard.exp_avg.dtype != m.dtype:
                store(shard.exp_avg[here], m, span, c.step, EXP_AVG_BITS)
                m.copy_(shard.exp_avg[here])  # phase two will read the rounded one
            if span.ratio:
                theta = scratch.in_full("theta", shard.param[here])
                r, factor = _direction(theta, m, v, c, scratch)
                sums[THETA_SQUARED, slot].add_(scratch.sum_of_squares(theta))
                sums[R_SQUARED, slot].add_(scratch.sum_of_squares(r), alpha=factor * factor)


def phase_two(shards: Sequence[FlatShard], step_sizes: torch.Tensor, prepared: None = None) -> None:
    narrow: dict[torch.dtype, torch.Tensor] = {}
    for shard, scratch in _with_scratch(shards, None):
        c = shard.coefficients
        dtype = shard.exp_avg_sq.dtype
        if dtype not in narrow:
            narrow[dtype] = step_sizes.to(dtype)
        for span in chunks(shard):
            here = slice(span.start, span.stop)
            target = shard.param[here]
            theta = scratch.in_full("theta", target)
            m = scratch.in_full("m", shard.exp_avg[here])
            r, factor = _direction(theta, m, shard.exp_avg_sq[here], c, scratch)
            step_size = narrow[dtype][span.slot]
            if c.eps1 == 0:
                r.masked_fill_(step_size == 0, 0.0)  # 0/0 where there has been no gradient yet
            theta.addcmul_(r, step_size, value=-factor)
            if theta.dtype != target.dtype:
                store_weights(shard, span, theta)


def _gradient(shard: FlatShard, here: slice, scratch: _Scratch) -> torch.Tensor:
    """What the update takes for the gradient: unscaled, and negated to climb. ``shard.grad`` stays as it is."""
    g = scratch.in_full("gradient", shard.grad[here])
    if shard.inverse_scale is None and shard.coefficients.sign == 1:
        return g
    return torch.mul(g, shard.gradient_factor, out=scratch.buffer("gradient", g.numel()))


def _adapt(g: torch.Tensor, u: torch.Tensor, shard: FlatShard, span: Span, scratch: _Scratch) -> torch.Tensor:
    """d = (1-rho) g + rho u_{k-1} with rho = -alpha (1-b1), and u to u_k in place."""
    c = shard.coefficients
    full = scratch.in_full("u", u)
    d = torch.lerp(g, full, -c.alpha * (1 - c.beta1), out=scratch.buffer("direction", g.numel()))
    full.lerp_(g, 1 - c.beta1)
    if full.dtype != u.dtype:
        store(u, full, span, c.step, GRAD_EMA_BITS)
    return d


def _direction(
    theta: torch.Tensor, m: torch.Tensor, v: torch.Tensor, c: Coefficients, scratch: _Scratch
) -> tuple[torch.Tensor, float]:
    """(x, f) with f x = r = lambda theta + m^ / (sqrt(v^) + eps1), both bias corrections in two numbers.

    The factor is lambda, or else that of m^: multiplying by it here would take an operation, later it takes none.
    """
    scale, eps = c.scale_and_eps()
    denominator = torch.sqrt(v, out=scratch.buffer("denominator", v.numel())).add_(eps)
    r = scratch.buffer("direction", v.numel())
    if c.weight_decay == 0:
        return torch.div(m, denominator, out=r), scale
    # Not addcdiv: on a CPU it multiplies m by the value before it divides, which overflows for gradients near 1e38.
    torch.div(m, denominator, out=r)
    if c.weight_decay >= SMALLEST_DIVISOR:
        return torch.add(theta, r, alpha=scale / c.weight_decay, out=r), c.weight_decay
    return r.mul_(scale).add_(theta, alpha=c.weight_decay), 1.0


def chunks(shard: FlatShard) -> Iterator[Span]:
    """The spans of a shard, cut to the length of the buffers."""
    length = chunk_length(shard.param.device)
    for span in shard.spans:
        for low in range(span.start, span.stop, length):
            yield span.part(low, min(low + length, span.stop))


def _with_scratch(shards: Sequence[FlatShard], sums_dtype: torch.dtype | None) -> Iterator[tuple[FlatShard, _Scratch]]:
    """Each shard with buffers that fit it; shards alike in precision share them."""
    shared: dict[torch.dtype, _Scratch] = {}
    for shard in flattened(shards):
        dtype = shard.exp_avg_sq.dtype
        if dtype not in shared:
            shared[dtype] = _Scratch(shard, chunk_length(shard.param.device), sums_dtype)
        yield shard, shared[dtype]
