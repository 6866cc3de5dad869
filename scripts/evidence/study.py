"""What every study hands back, and how it is written down."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

HELD, FAILED, MIXED, UNTESTABLE = "held", "did not hold", "mixed", "not testable here"
VERDICTS = (HELD, FAILED, MIXED, UNTESTABLE)
FORMS = ("quick", "full")


@dataclass(frozen=True)
class Claim:
    """One claim of the paper's, and what became of it here."""

    paper: str
    """The claim, in our own words."""
    where: str
    """Section, figure or table of the paper."""
    verdict: str
    """One of VERDICTS, computed: see :func:`verdict`."""
    finding: str
    """One or two sentences with the measured numbers, composed from the study's rows."""

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict={self.verdict!r} is not one of {', '.join(VERDICTS)}")


@dataclass
class Result:
    """Of one study."""

    study: str
    title: str
    form: str
    """"quick" or "full"."""
    settings: dict[str, Any]
    seeds: list[int]
    rows: list[dict[str, Any]]
    """The table: a dict a row, the same keys in all of them."""
    figures: list[str]
    """Names of the files written into the directory."""
    claims: list[Claim]
    notes: list[str] = field(default_factory=list)
    guidance: list[str] = field(default_factory=list)
    """Sentences that follow for choosing alpha, beta1 and lr."""
    seconds: float = 0.0
    """Filled in by the command."""
    columns: list[str] | None = None
    """Columns of the table, in order, if not all of the rows' keys."""
    intro: str = ""
    """A short paragraph for the page: what is run, and how it differs from the paper's."""

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"form={self.form!r} is not one of {', '.join(FORMS)}")


def verdict(checks: Sequence[bool]) -> str:
    """All true: held. None: did not hold. Some: mixed. No checks at all: not testable here."""
    if not checks:
        return UNTESTABLE
    return HELD if all(checks) else MIXED if any(checks) else FAILED


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half of the range: with three seeds that says more than a standard deviation."""
    return sum(values) / len(values), (max(values) - min(values)) / 2


def write(result: Result, directory: Path) -> None:
    """result.json, table.csv and table.md into ``directory``.

    Raises:
        ValueError: a figure that the result names was not written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for figure in result.figures:
        if not (directory / figure).is_file():
            raise ValueError(f"{result.study} names the figure {figure}, which is not in its directory")
    told = {**asdict(result), "made": _circumstances()}
    (directory / "result.json").write_text(json.dumps(_plain(told), indent=1, allow_nan=False) + "\n")
    columns = result.columns or list(result.rows[0] if result.rows else {})
    with open(directory / "table.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(_plain(result.rows))
    (directory / "table.md").write_text(markdown_table(result.rows, columns))


def markdown_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Columns of numbers to the right; what is missing or not finite is a dash."""
    numeric = [all(isinstance(row.get(c), int | float | None) for row in rows) for c in columns]
    lines = ["| " + " | ".join(columns) + " |", "|" + "|".join("---:" if n else "---" for n in numeric) + "|"]
    lines += ["| " + " | ".join(_cell(row.get(c)) for c in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.2e}"
    return str(value).replace("|", "\\|")


def _plain(value: Any) -> Any:
    """What JSON can say: tuples become lists, numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _circumstances() -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "alto_distributed": importlib.metadata.version("alto-distributed"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
    }


def _cpu() -> str:
    """The processor's name; platform.processor() is empty on many systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
