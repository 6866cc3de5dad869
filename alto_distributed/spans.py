"""What layouts and kernels share: spans of flat tensors, and which tensors are plain memory."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Span(NamedTuple):
    """Elements [start, stop) of a flat tensor. Elements outside every span are padding: never touched."""

    start: int
    stop: int
    slot: int
    """Column of ``sums`` and entry of ``step_sizes``."""
    ratio: bool = True
    """Whether |theta|^2 and |r|^2 are wanted. Whether the gradient has a nonzero element is always wanted."""
    seed: int = 0
    """Of stochastic rounding: the parameter's, the same on all ranks and replicas."""
    offset: int = 0
    """The place of the first element in the parameter: the bits of stochastic rounding hang on it."""

    def part(self, low: int, high: int) -> Span:
        """Elements [low, high) of the flat tensor, which are some of this span's."""
        return Span(low, high, self.slot, self.ratio, self.seed, self.offset + low - self.start)


#: Rows of the table of sums: |theta|^2, |r|^2, and a positive number unless all of a parameter's gradient is 0.
THETA_SQUARED, R_SQUARED, NONZERO = range(SUMS := 3)

#: Types whose elements lie in their own memory. A subclass may have none, or another's.
PLAIN = (torch.Tensor, torch.nn.Parameter)
