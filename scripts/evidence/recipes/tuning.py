"""Rates and other numbers, chosen on one seed and the validation text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .trials import Trial, on_grid

#: Tuning runs that every optimizer gets in a setting. One that converges earlier needs fewer.
BUDGET = 14


def best_rate(trial: Trial, octaves: float, loss: Callable[[Trial], float]) -> tuple[Trial, float]:
    """The trial at the best rate of a grid of half-octaves, which grows until the best is inside it.

    Args:
        trial: at any rate.
        octaves: log2 of the rate to begin with; a multiple of 0.5.
        loss: of a trial; infinite if it breaks down.
    """
    found = {octaves: loss(trial.with_knob("lr", on_grid(octaves)))}
    while True:
        best = min(found, key=lambda o: (found[o], o))  # where all broke down, the way is down
        beyond = [o for o in (best - 0.5, best + 0.5) if o not in found]
        if not beyond:
            return trial.with_knob("lr", on_grid(best)), best
        for o in beyond if found[best] != float("inf") else beyond[:1]:
            found[o] = loss(trial.with_knob("lr", on_grid(o)))


def tune(
    trial: Trial, octaves: float, knobs: Mapping[str, Sequence[float]], loss: Callable[[Trial], float]
) -> tuple[Trial, int]:
    """Coordinate descent over the rate and ``knobs`` with BUDGET runs; returns the best trial and the runs it took.

    The rate is bracketed first. A knob is tried at its neighbors of the best value; after one that helps, the rate is
    tried again. A rate at the end of its grid may exceed the budget, for it must be inside.
    """
    tried: set[Trial] = set()

    def counted(candidate: Trial) -> float:
        tried.add(candidate)
        return loss(candidate)

    best, octaves = best_rate(trial, octaves, counted)
    moved = True
    while moved:
        moved = False
        for knob, values in knobs.items():
            at = values.index(best.knob(knob))
            near = [best.with_knob(knob, values[i]) for i in (at + 1, at - 1) if 0 <= i < len(values)]
            known = loss(best)
            better = next((c for c in near if len(tried) < BUDGET and counted(c) < known), None)
            if better is not None:
                best, octaves = best_rate(better, octaves, counted)
                moved = len(tried) < BUDGET
    return best, len(tried)
