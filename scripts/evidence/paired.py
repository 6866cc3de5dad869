"""Differences between two treatments of the same seeds, and when one counts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .study import verdict

#: Fewer seeds show no difference: with three, "all agree and two standard errors" is wrong by chance in 18% of cases.
LEAST_SEEDS = 5
#: Nats of loss below which a difference is of no use, however sure it is.
LEAST_EFFECT = 0.01
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """Of one treatment from another, seed by seed."""

    mean: float
    error: float
    """Standard error of the mean; infinite with fewer than two seeds."""
    seeds: int
    least: float = 0.0
    """An effect of at most this much does not count."""
    comparisons: int = 1
    """That are made together: the interval is as much wider (Bonferroni)."""

    @property
    def half_width(self) -> float:
        """Of the interval for the mean, at 95% for all comparisons together."""
        if self.seeds < 2 or not math.isfinite(self.error):
            return math.inf
        from scipy.stats import t

        return float(t.ppf(1 - (1 - CONFIDENCE) / 2 / self.comparisons, self.seeds - 1)) * self.error

    @property
    def counts(self) -> bool:
        """Enough seeds, an interval without 0, and an effect that is worth something."""
        return self.seeds >= LEAST_SEEDS and abs(self.mean) > max(self.half_width, self.least)

    @property
    def lower(self) -> bool:
        return self.counts and self.mean < 0

    @property
    def higher(self) -> bool:
        return self.counts and self.mean > 0

    def __str__(self) -> str:
        if not math.isfinite(self.mean):
            return "runs of both broke down" if math.isnan(self.mean) else f"runs of the {self._broken} broke down"
        return f"{self.mean:+.3f} +- {self.half_width:.3f}"

    @property
    def _broken(self) -> str:
        return "first" if self.mean > 0 else "second"


def paired(first: Sequence[float], second: Sequence[float], *, least: float = 0.0, comparisons: int = 1) -> Difference:
    """``first`` minus ``second``. A run that broke down (infinite loss) is worse than any that did not.

    Where some broke down there is no interval. Such a difference counts if every seed has it the same way round.
    """
    gaps = [a - b if a != b else 0.0 for a, b in zip(first, second, strict=True)]
    if not all(map(math.isfinite, gaps)):
        one_way = all(gap > 0 for gap in gaps) or all(gap < 0 for gap in gaps)
        broken = [gap for gap in gaps if not math.isfinite(gap)]
        mean = broken[0] if len(set(broken)) == 1 else math.nan
        return Difference(mean, 0.0 if one_way else math.inf, len(gaps), least, comparisons)
    mean = statistics.fmean(gaps)
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.inf
    return Difference(mean, error, len(gaps), least, comparisons)


def verdict_lower(differences: Iterable[Difference]) -> str:
    """On the claim that the first of each pair is lower, by the pairs with seeds enough; without any, not testable."""
    return verdict([d.lower for d in differences if d.seeds >= LEAST_SEEDS])


def verdict_higher(differences: Iterable[Difference]) -> str:
    """The same for higher."""
    return verdict([d.higher for d in differences if d.seeds >= LEAST_SEEDS])
