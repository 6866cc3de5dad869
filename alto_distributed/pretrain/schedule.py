"""The learning rate of each step, from the step's number alone."""

from __future__ import annotations

import math

from .config.settings import Run


def learning_rate(run: Run, step: int) -> float:
    """The rate of step ``step``, counted from 0.

    It rises linearly over the warm-up (the first step has 1/warmup of it, not 0), then falls from all of it to
    ``schedule.final`` of it at the last step; with "wsd" only over the last ``schedule.decay`` of the steps.
    """
    s, peak = run.schedule, run.optimizer.lr
    if step < s.warmup:
        return peak * (step + 1) / s.warmup
    if s.kind == "constant":
        return peak
    steps = run.training.iterations
    begin = max(s.warmup, steps - 1 - round(s.decay * steps)) if s.kind == "wsd" else s.warmup
    done = min(max(step - begin, 0) / max(steps - 1 - begin, 1), 1.0)
    power = 1.0 if s.kind == "wsd" else s.power
    left = 0.5 * (1 + math.cos(math.pi * done)) if s.kind == "cosine" else (1 - done) ** power
    return peak * (s.final + (1 - s.final) * left)
