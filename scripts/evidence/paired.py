"""Differences between two treatments of the same seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """Of one treatment from another, seed by seed."""

    mean: float
    error: float
    """Standard error of the mean; infinite with fewer than two seeds."""
    agree: bool
    """All seeds differ in the same direction."""

    @property
    def lower(self) -> bool:
        """Below 0 beyond noise: every seed says so, and the mean is more than two standard errors away."""
        return self.agree and self.mean < -2 * self.error

    @property
    def higher(self) -> bool:
        return self.agree and self.mean > 2 * self.error

    def __str__(self) -> str:
        return f"{self.mean:+.3f} +- {self.error:.3f}"


def paired(first: Sequence[float], second: Sequence[float]) -> Difference:
    """``first`` minus ``second``. A run that broke down (infinite loss) is worse than any that did not."""
    gaps = [a - b if a != b else 0.0 for a, b in zip(first, second, strict=True)]
    mean = statistics.fmean(gaps)
    agree = all(gap > 0 for gap in gaps) or all(gap < 0 for gap in gaps)
    if len(gaps) < 2:
        return Difference(mean, math.inf, agree)
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if all(map(math.isfinite, gaps)) else 0.0
    return Difference(mean, error, agree)
