"""The figures of runs in a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import metrics as logs


def summary(directory: Path) -> dict[str, Any]:
    """The figures of a run that a table shows.

    Raises:
        ValueError: the directory has no records of a run.
    """
    records = logs.read(directory)
    if not records:
        raise ValueError(f"{directory} has no {logs.RECORDS}: it is not the directory of a run that has begun")
    trained = [record for record in records if "loss" in record]
    validated = [record for record in records if "valid_loss" in record]
    speeds = sorted(record["tokens_per_second"] for record in trained if "tokens_per_second" in record)
    return {
        "run": directory.name,
        "steps": max(record["step"] for record in records),
        "train loss": trained[-1]["loss"] if trained else math.nan,
        "first valid loss": validated[0]["valid_loss"] if validated else math.nan,
        "valid loss": validated[-1]["valid_loss"] if validated else math.nan,
        "valid perplexity": validated[-1].get("valid_perplexity", math.nan) if validated else math.nan,
        # Measured once, when the run is through; there is none if no documents were set aside for it.
        "test perplexity": validated[-1].get("test_perplexity", math.nan) if validated else math.nan,
        "tokens/s": speeds[len(speeds) // 2] if speeds else math.nan,
    }


def table(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Markdown, one row a run."""
    columns = list(summaries[0])
    rows = [[cell(row[column]) for column in columns] for row in summaries]
    widths = [max(len(column), *(len(row[i]) for row in rows)) for i, column in enumerate(columns)]
    lines = [columns, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def cell(value: Any) -> str:
    """A value of the table as text."""
    if isinstance(value, float) and math.isnan(value):
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return str(value)
