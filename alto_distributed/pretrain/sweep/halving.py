"""Successive halving over grids of rates, one for each optimizer; what a trial costs and how it runs is elsewhere.

All rates of a grid are tried in short runs. The better half goes on to runs of twice the length, and so on to the full
length. Every run has a complete schedule of its own length, for a rate is not judged by a loss from the middle of one.
If the best rate is the lowest or the highest of its grid, the grid grows there. All grids grow by as many rates at a
time, so that each optimizer has as many trials as the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

#: Rates of a grid that are a half octave apart.
RATIO = 2**0.5

#: Fewer have no inside.
FEWEST = 3

_GROWTH = 2


@dataclass(frozen=True)
class Trial:
    """A run with one rate of one optimizer."""

    optimizer: str
    rate: float
    steps: int


@dataclass(frozen=True)
class Grid:
    """Rates around one, half an octave apart."""

    center: float
    low: int
    """Half octaves from the center to the lowest rate; the highest in the same way."""
    high: int

    @classmethod
    def around(cls, center: float, count: int) -> Grid:
        low = -(count // 2)
        return cls(center, low, low + count - 1)

    @property
    def rates(self) -> list[float]:
        """Rounded to four digits, lowest first."""
        return [float(f"{self.center * RATIO**place:.4g}") for place in range(self.low, self.high + 1)]

    def is_edge(self, rate: float) -> bool:
        return rate in (self.rates[0], self.rates[-1])

    def grown(self, count: int, best: float) -> Grid:
        """With ``count`` more rates on the side that is nearer to the best one."""
        place = self.rates.index(best)
        if place < len(self.rates) / 2:
            return Grid(self.center, self.low - count, self.high)
        return Grid(self.center, self.low, self.high + count)


@dataclass(frozen=True)
class Found:
    """What the search says about one optimizer."""

    rate: float
    is_inside: bool
    """The rates next to the best one were tried; otherwise a better one may lie outside of the grid."""
    rates: tuple[float, ...]
    """All that were tried."""


def first_grid(trials: int) -> int:
    """Rates in the grid at the start, of so many for each optimizer; the others are for growing."""
    return max(FEWEST, math.ceil(trials * 2 / 3))


def lengths(iterations: int, rungs: int) -> list[int]:
    """Steps of the runs on each rung; the last is the full length."""
    return sorted({max(1, iterations // 2**rung) for rung in range(rungs)})


def search(
    centers: Mapping[str, float],
    trials: int,
    steps: Sequence[int],
    measure: Callable[[Sequence[Trial]], Mapping[Trial, float]],
) -> dict[str, Found]:
    """The best rate of each optimizer.

    Args:
        centers: the rate in the middle of each first grid.
        trials: rates for each optimizer.
        steps: of the runs on each rung, shortest first.
        measure: losses of some trials; infinity where one diverged. It is asked again for trials that it has measured.
    """
    grids = {name: Grid.around(center, first_grid(trials)) for name, center in centers.items()}
    while True:
        best, must_grow = _climb(grids, steps, measure, trials)
        if not must_grow:
            return {
                name: Found(best[name], not grid.is_edge(best[name]), tuple(grid.rates)) for name, grid in grids.items()
            }
        grids = {name: grid.grown(min(_GROWTH, trials - len(grid.rates)), best[name]) for name, grid in grids.items()}


def _climb(
    grids: Mapping[str, Grid],
    steps: Sequence[int],
    measure: Callable[[Sequence[Trial]], Mapping[Trial, float]],
    trials: int,
) -> tuple[dict[str, float], bool]:
    """The best rates, and whether a grid must grow before they count."""
    left = {name: grid.rates for name, grid in grids.items()}
    best: dict[str, float] = {}
    for length in steps:
        losses = measure([Trial(name, rate, length) for name, rates in left.items() for rate in rates])
        for name, rates in left.items():
            # Among those that diverged, the lowest is the nearest to one that does not.
            ranked = sorted(rates, key=lambda rate: (losses[Trial(name, rate, length)], rate))
            best[name], left[name] = ranked[0], ranked[: math.ceil(len(ranked) / 2)]
        at_edge = any(grid.is_edge(best[name]) for name, grid in grids.items())
        if at_edge and any(len(grid.rates) < trials for grid in grids.values()):
            return best, True
    return best, False
