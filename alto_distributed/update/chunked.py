"""The same update in plain torch operations, in chunks that stay in cache.

A step over a large tensor with whole-tensor operations would move every operand through memory once
an operation, and hold several full-size temporaries. Here each chunk goes through all operations
while it is in cache, and the only temporaries are three chunk-sized buffers, whatever the model's size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from .pieces import NO_RATIO, Coefficients, Piece

# Buffers of 5 MiB beside 5 MiB of operands stay in a CPU's last-level cache. Much smaller chunks are slower:
# torch splits an operation over threads only from 32K elements on, and each costs microseconds to start.
CPU_CHUNK = 1 << 18
# On an accelerator a launch must be long enough to hide its own cost; 24 MiB of buffers at most.
ACCELERATOR_CHUNK = 1 << 20


class _Scratch:
    """Buffers that live for one phase of one step."""

    def __init__(self, piece: Piece, length: int, sums_dtype: torch.dtype | None) -> None:
        like = piece.exp_avg
        self.direction = torch.empty(length, dtype=like.dtype, device=like.device)
        self.quotient = torch.empty_like(self.direction)
        low_precision = like.dtype != piece.param.dtype or like.dtype != piece.grad.dtype
        self.converted = torch.empty_like(self.direction) if low_precision else None
        self.wide = None
        if sums_dtype is not None and sums_dtype != like.dtype:
            self.wide = torch.empty(length, dtype=sums_dtype, device=like.device)

    def as_state_dtype(self, source: torch.Tensor) -> torch.Tensor:
        """``source`` itself, or its conversion into the one buffer kept for that."""
        if self.converted is None or source.dtype == self.converted.dtype:
            return source
        return self.converted[: source.numel()].copy_(source)

    def sum_of_squares(self, x: torch.Tensor) -> torch.Tensor:
        """In the precision of ``sums``: float32 would lose digits over 1e8 elements."""
        wide = x if self.wide is None else self.wide[: x.numel()].copy_(x)
        return torch.dot(wide, wide)


def chunk_length(device: torch.device) -> int:
    return CPU_CHUNK if device.type == "cpu" else ACCELERATOR_CHUNK


def phase_one(pieces: Sequence[Piece], sums: torch.Tensor) -> None:
    for piece, scratch in _with_scratch(pieces, sums.dtype):
        c = piece.coefficients
        for here, slot in chunks(piece):
            m, v = piece.exp_avg[here], piece.exp_avg_sq[here]
            d = scratch.as_state_dtype(piece.grad[here])
            if piece.grad_ema is not None:
                d = _adapt(d, piece.grad_ema[here], c, scratch.direction[: d.numel()])
            m.lerp_(d, 1 - c.beta2)
            v.mul_(c.beta3).addcmul_(d, d, value=1 - c.beta3)
            if slot != NO_RATIO:
                theta = scratch.as_state_dtype(piece.param[here])
                sums[0, slot] += scratch.sum_of_squares(theta)
                sums[1, slot] += scratch.sum_of_squares(_direction(theta, m, v, c, scratch))


def phase_two(pieces: Sequence[Piece], step_sizes: torch.Tensor) -> None:
    for piece, scratch in _with_scratch(pieces, None):
        c = piece.coefficients
        for here, slot in chunks(piece):
            target = piece.param[here]
            theta = scratch.as_state_dtype(target)
            r = _direction(theta, piece.exp_avg[here], piece.exp_avg_sq[here], c, scratch)
            if slot != NO_RATIO:
                theta.sub_(r.mul_(step_sizes[slot]))
            elif isinstance(c.lr, torch.Tensor):
                theta.sub_(r.mul_(c.lr))
            else:
                theta.sub_(r, alpha=c.lr)
            if theta.dtype != target.dtype:
                target.copy_(theta)


def _adapt(g: torch.Tensor, u: torch.Tensor, c: Coefficients, out: torch.Tensor) -> torch.Tensor:
    """d = g + alpha (1-b1)(g - u_{k-1}) into ``out``, and u to u_k in place."""
    torch.sub(g, u, out=out)
    u.add_(out, alpha=1 - c.beta1)
    return out.mul_(c.alpha * (1 - c.beta1)).add_(g)


def _direction(
    theta: torch.Tensor, m: torch.Tensor, v: torch.Tensor, c: Coefficients, scratch: _Scratch
) -> torch.Tensor:
    """r = m^ / (sqrt(v^) + eps1) + lambda theta, with the corrections as scalars."""
    denominator = torch.sqrt(v, out=scratch.quotient[: v.numel()])
    denominator.mul_(1 / math.sqrt(c.correction3)).add_(c.eps1)
    r = torch.div(m, denominator, out=scratch.direction[: v.numel()]).mul_(1 / c.correction2)
    return r.add_(theta, alpha=c.weight_decay) if c.weight_decay != 0 else r


def chunks(piece: Piece) -> Iterator[tuple[slice, int]]:
    """The spans of a piece with their slots, cut to the length of the buffers."""
    length = chunk_length(piece.param.device)
    for start, stop, slot in piece.spans:
        for low in range(start, stop, length):
            yield slice(low, min(low + length, stop)), slot


def _with_scratch(pieces: Sequence[Piece], sums_dtype: torch.dtype | None) -> Iterator[tuple[Piece, _Scratch]]:
    """Each piece with buffers that fit it; pieces alike in dtypes share them."""
    shared: dict[tuple[torch.dtype, torch.dtype, torch.dtype], _Scratch] = {}
    for piece in pieces:
        key = (piece.exp_avg.dtype, piece.param.dtype, piece.grad.dtype)
        if key not in shared:
            shared[key] = _Scratch(piece, chunk_length(piece.param.device), sums_dtype)
        yield piece, shared[key]
