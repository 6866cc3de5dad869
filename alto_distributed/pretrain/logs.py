"""What a run writes down: one record a line in metrics.jsonl, the same in metrics.csv and TensorBoard, a progress bar.

A record has a ``step`` (optimizer steps done) and numbers by name. Records of steps that a resumed run is
about to repeat are dropped first, so that a log has every step once.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

#: Columns of metrics.csv; metrics.jsonl has whatever is measured besides.
COLUMNS = (
    *("step", "loss", "lr", "grad_norm", "tokens_per_second"),
    *("valid_loss", "valid_perplexity", "test_loss", "test_perplexity"),
)

RECORDS = "metrics.jsonl"


class Log:
    """Rank 0's; other ranks have one that does nothing.

    Args:
        directory: the run's.
        start: steps that were done before; later records are dropped.
        total: steps of the whole run, for the progress bar.
        tensorboard: write events for TensorBoard as well.
        speaks: whether this rank is the one that writes.
    """

    def __init__(self, directory: Path, start: int, total: int, tensorboard: bool, speaks: bool) -> None:
        self.speaks = speaks
        if not speaks:
            return
        from tqdm import tqdm

        directory.mkdir(parents=True, exist_ok=True)
        kept = [record for record in read(directory) if record["step"] <= start] if start else []
        # Written beside and renamed: a run that is killed here must not lose the records it had.
        beside = directory / f".{RECORDS}"
        beside.write_text("".join(_line(record) for record in kept))
        beside.replace(directory / RECORDS)
        self._records = (directory / RECORDS).open("a")
        self._table = (directory / "metrics.csv").open("w", newline="")
        self._rows = csv.DictWriter(self._table, COLUMNS, extrasaction="ignore")
        self._rows.writeheader()
        self._rows.writerows(kept)
        self._events: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(directory / "tensorboard"), purge_step=start + 1)
        self._bar = tqdm(total=total, initial=start, unit="step", file=sys.stderr, disable=None, dynamic_ncols=True)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if self.speaks:
            for opened in (self._records, self._table, self._bar, self._events):
                if opened is not None:
                    opened.close()

    def progress(self, loss: float) -> None:
        """One step is done."""
        if self.speaks:
            self._bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
            self._bar.update()

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """Write down what is known after ``step`` steps."""
        if self.speaks:
            self._write({"step": step, **values})
            if self._events is not None:
                for name, value in values.items():
                    if isinstance(value, (int, float)):
                        self._events.add_scalar(name, value, step)

    def say(self, line: str) -> None:
        """A line for whoever watches, above the progress bar."""
        if self.speaks:
            from tqdm import tqdm

            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def _write(self, record: Mapping[str, Any]) -> None:
        self._records.write(_line(record))
        self._records.flush()
        self._rows.writerow(record)
        self._table.flush()


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record) + "\n"


def read(directory: Path) -> list[dict[str, Any]]:
    """The records of a run; a last line that was cut off when the run was killed is left out."""
    path = directory / RECORDS
    if not path.exists():
        return []
    records = []
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        record = _record(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            raise ValueError(f"{path}, line {number} is not a record; the file was changed or damaged")
    return records


def _record(line: bytes) -> dict[str, Any] | None:
    """A record with numbers by name, or None if the line is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    return record if all(isinstance(value, (int, float)) for value in record.values()) else None
