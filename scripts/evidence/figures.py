"""Figures without a display, small enough to be committed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

#: One colour an optimizer, the same in every figure. The adapted form of a pair is the stronger one.
COLOURS = {
    "SGD": "tab:gray",
    "ESGD": "black",
    "Adam": "tab:cyan",
    "EAdam": "tab:blue",
    "AdamW": "tab:green",
    "AdaBelief": "tab:purple",
    "Lion": "tab:brown",
    "LAMB": "tab:orange",
    "ALTO": "tab:red",
}


def new_figure(rows: int = 1, columns: int = 1, width: float = 5.0, height: float = 3.6) -> tuple[Any, Any]:
    """A figure and its axes (an array of rows by columns); width and height are of one of them, in inches."""
    from matplotlib.figure import Figure  # without pyplot there is no state and no display

    figure = Figure(figsize=(width * columns, height * rows), dpi=80, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def plain_ticks(*axes: Any) -> None:
    """Ticks of logarithmic axes (``axis.xaxis``, ``axis.yaxis``) as numbers, for ranges of about a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    for axis in axes:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(LogLocator(subs=()))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def save(figure: Any, into: Path, name: str) -> str:
    """Write the PNG; returns its name, for Result.figures."""
    into.mkdir(parents=True, exist_ok=True)
    figure.savefig(into / name, metadata={"Software": None})
    return name
