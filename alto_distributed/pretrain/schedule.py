"""The learning rate of each step, from the step's number alone."""

from __future__ import annotations

import math

from .config.settings import Run


def learning_rate(run: Run, step: int) -> float:
    """The rate of step ``step``, counted from 0.

    It rises linearly over the warm-up (the first step has 1/warmup of it, not 0), then falls from all of it to
    ``schedule.final`` of it at the last step.
    """
    s, peak = run.schedule, run.optimizer.lr
    if step < s.warmup:
        return peak * (step + 1) / s.warmup
    if s.kind == "constant":
        return peak
    done = min((step - s.warmup) / max(run.training.iterations - 1 - s.warmup, 1), 1.0)
    left = 0.5 * (1 + math.cos(math.pi * done)) if s.kind == "cosine" else (1 - done) ** s.power
    return peak * (s.final + (1 - s.final) * left)
