"""One color an optimizer, the same in every figure, told apart by people who do not see all colors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: The palette of Okabe and Ito, without its yellow, and three of Tol's muted colors.
_COLORS = {
    "alto": "#D55E00",
    "lamb": "#E69F00",
    "adamw": "#0072B2",
    "adam": "#56B4E9",
    "lion": "#009E73",
    "adabelief": "#CC79A7",
    "muon": "#000000",
    "ademamix": "#882255",
    "soap": "#999933",
    "mars": "#44AA99",
}
_OTHER = "#777777"
_DASHES: Sequence[str | tuple[int, tuple[int, ...]]] = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))


def color(optimizer: str) -> str:
    return _COLORS.get(optimizer, _OTHER)


def styles(optimizers: Sequence[str]) -> list[dict[str, Any]]:
    """For each of some runs: the color of its optimizer, and other dashes than earlier runs of the same one."""
    chosen = []
    for place, optimizer in enumerate(optimizers):
        before = optimizers[:place].count(optimizer)
        chosen.append({"color": color(optimizer), "linestyle": _DASHES[before % len(_DASHES)]})
    return chosen
