"""A summary of the latest diagnostics for DeepSpeed's monitor."""

from __future__ import annotations

from statistics import median

from ..optimizer import ALTO


def monitor_events(optimizer: ALTO, samples: int) -> list[tuple[str, float, int]]:
    """(tag, value, samples) of smallest, middle and largest ratio and acceleration; none if nothing is new."""
    if not optimizer.has_new_diagnostics():
        return []
    readings = optimizer.diagnostics().values()
    events = []
    for tag in ("trust_ratio", "acceleration", "param_norm", "update_norm"):
        values = sorted(getattr(reading, tag) for reading in readings)
        for name, value in (("min", values[0]), ("median", median(values)), ("max", values[-1])):
            events.append((f"Train/ALTO/{tag}_{name}", float(value), samples))
    return events
