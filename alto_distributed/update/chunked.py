"""The same update in plain torch operations, in chunks that stay in cache.

A step over a large tensor with whole-tensor operations would move every operand through memory once
an operation, and hold several full-size temporaries. Here each chunk goes through all operations
while it is in cache, and the only temporaries are a few chunk-sized buffers, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .pieces import NO_RATIO, Coefficients, Piece
from .rounding import EXP_AVG_BITS, GRAD_EMA_BITS, key_of, store

# Buffers of 5 MiB beside 5 MiB of operands stay in a CPU's last-level cache. Much smaller chunks are slower:
# torch splits an operation over threads only from 32K elements on, and each costs microseconds to start.
CPU_CHUNK = 1 << 18
# On an accelerator a launch must be long enough to hide its own cost; 16 MiB of buffers in float32.
ACCELERATOR_CHUNK = 1 << 20
# A weight decay below this is no divisor: see _direction.
SMALLEST_DIVISOR = 1e-12


class _Scratch:
    """Buffers that live for one phase of one step."""

    def __init__(self, piece: Piece, length: int, sums_dtype: torch.dtype | None) -> None:
        like = piece.exp_avg_sq
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


def phase_one(pieces: Sequence[Piece], sums: torch.Tensor) -> None:
    for piece, scratch in _with_scratch(pieces, sums.dtype):
        c = piece.coefficients
        for here, slot in chunks(piece):
            v = piece.exp_avg_sq[here]
            d = scratch.in_full("gradient", piece.grad[here])
            if piece.grad_ema is not None:
                d = _adapt(d, piece.grad_ema[here], piece, here.start, scratch)
            m = scratch.in_full("m", piece.exp_avg[here]).lerp_(d, 1 - c.beta2)
            v.mul_(c.beta3).addcmul_(d, d, value=1 - c.beta3)
            if piece.exp_avg.dtype != m.dtype:
                store(piece.exp_avg[here], m, key_of(piece, EXP_AVG_BITS), here.start)
                m.copy_(piece.exp_avg[here])  # phase two will read the rounded one
            if slot != NO_RATIO:
                theta = scratch.in_full("theta", piece.param[here])
                r, factor = _direction(theta, m, v, c, scratch)
                sums[0, slot].add_(scratch.sum_of_squares(theta))
                sums[1, slot].add_(scratch.sum_of_squares(r), alpha=factor * factor)


def phase_two(pieces: Sequence[Piece], step_sizes: torch.Tensor) -> None:
    narrow: dict[torch.dtype, torch.Tensor] = {}
    for piece, scratch in _with_scratch(pieces, None):
        c = piece.coefficients
        dtype = piece.exp_avg_sq.dtype
        if dtype not in narrow:
            narrow[dtype] = step_sizes.to(dtype)
        lr = c.lr.to(step_sizes.device, dtype).reshape(()) if isinstance(c.lr, torch.Tensor) else c.lr
        for here, slot in chunks(piece):
            target = piece.param[here]
            theta = scratch.in_full("theta", target)
            m = scratch.in_full("m", piece.exp_avg[here])
            r, factor = _direction(theta, m, piece.exp_avg_sq[here], c, scratch)
            step_size = lr if slot == NO_RATIO else narrow[dtype][slot]
            if isinstance(step_size, torch.Tensor):
                theta.addcmul_(r, step_size, value=-factor)
            else:
                theta.sub_(r, alpha=step_size * factor)
            if theta.dtype != target.dtype:
                target.copy_(theta)
            if piece.model_copy is not None:
                piece.model_copy[here].copy_(theta)


def _adapt(g: torch.Tensor, u: torch.Tensor, piece: Piece, start: int, scratch: _Scratch) -> torch.Tensor:
    """d = (1-rho) g + rho u_{k-1} with rho = -alpha (1-b1), and u to u_k in place."""
    c = piece.coefficients
    full = scratch.in_full("u", u)
    d = torch.lerp(g, full, -c.alpha * (1 - c.beta1), out=scratch.buffer("direction", g.numel()))
    full.lerp_(g, 1 - c.beta1)
    if full.dtype != u.dtype:
        store(u, full, key_of(piece, GRAD_EMA_BITS), start)
    return d


def _direction(
    theta: torch.Tensor, m: torch.Tensor, v: torch.Tensor, c: Coefficients, scratch: _Scratch
) -> tuple[torch.Tensor, float]:
    """(x, f) with f x = r = lambda theta + m^ / (sqrt(v^) + eps1), both bias corrections in two numbers.

    The factor is lambda, or else that of m^: multiplying by it here would take an operation, later it takes none.
    """
    scale, eps = c.scale_and_eps()
    # sqrt(v). On x86 torch.sqrt takes longer than these two, and rounds no better.
    denominator = torch.rsqrt(v, out=scratch.buffer("denominator", v.numel())).reciprocal_().add_(eps)
    r = scratch.buffer("direction", v.numel())
    if c.weight_decay == 0:
        return torch.div(m, denominator, out=r), scale
    if c.weight_decay >= SMALLEST_DIVISOR:
        return torch.addcdiv(theta, m, denominator, value=scale / c.weight_decay, out=r), c.weight_decay
    return torch.mul(theta, c.weight_decay, out=r).addcdiv_(m, denominator, value=scale), 1.0


def chunks(piece: Piece) -> Iterator[tuple[slice, int]]:
    """The spans of a piece with their slots, cut to the length of the buffers."""
    length = chunk_length(piece.param.device)
    for start, stop, slot in piece.spans:
        for low in range(start, stop, length):
            yield slice(low, min(low + length, stop)), slot


def _with_scratch(pieces: Sequence[Piece], sums_dtype: torch.dtype | None) -> Iterator[tuple[Piece, _Scratch]]:
    """Each piece with buffers that fit it; pieces alike in precision share them."""
    shared: dict[torch.dtype, _Scratch] = {}
    for piece in pieces:
        dtype = piece.exp_avg_sq.dtype
        if dtype not in shared:
            shared[dtype] = _Scratch(piece, chunk_length(piece.param.device), sums_dtype)
        yield piece, shared[dtype]
