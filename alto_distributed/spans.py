"""What layouts and kernels share: spans of flat tensors, and which tensors are plain memory."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Span(NamedTuple):
    """Elements [start, stop) of a flat tensor. Elements outside every span are padding: never touched."""

    start: int
    stop: int
    slot: int
    """Column of ``sums`` and entry of ``step_sizes``; NO_RATIO where the step is plain ``lr``."""


NO_RATIO = -1

#: Types whose elements lie in their own memory. A subclass may have none, or another's.
PLAIN = (torch.Tensor, torch.nn.Parameter)
