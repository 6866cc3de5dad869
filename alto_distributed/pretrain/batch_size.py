"""The global batch of each step, and how many samples came before it, from the step's number alone."""

from __future__ import annotations

from .config.sections import Training


def batch_size(training: Training, step: int) -> int:
    """Samples of step ``step``, counted from 0."""
    ramp = training.batch_ramp
    if not ramp.start:
        return training.global_batch
    return min(ramp.start + step // ramp.every * ramp.step, training.global_batch)


def samples_before(training: Training, step: int) -> int:
    """Samples of all steps before ``step``: the number of its first sample in the series of samples."""
    ramp = training.batch_ramp
    if not ramp.start:
        return step * training.global_batch
    sizes = ramp.sizes_below(training.global_batch)
    whole = min(step // ramp.every, sizes)
    on_the_way = ramp.every * (whole * ramp.start + ramp.step * (whole * (whole - 1) // 2))
    return on_the_way + (step - whole * ramp.every) * batch_size(training, whole * ramp.every)
