"""Span: elements of a flat tensor that belong to one parameter. Layouts make spans, kernels work on them."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """Elements [start, stop) of a flat tensor. Elements outside every span are padding: never touched."""

    start: int
    stop: int
    slot: int
    """Column of ``sums`` and entry of ``step_sizes``; NO_RATIO where the step is plain ``lr``."""


NO_RATIO = -1
