"""What a run writes down: one record a line in metrics.jsonl, the same in metrics.csv and TensorBoard, a progress bar.

A record has a ``step`` (optimizer steps done) and numbers by name. Records of steps that a resumed run is
about to repeat are dropped first, so that a log has every step once.

Logging never ends a run. What cannot be written, on a full disk say, is left out, and one warning says so.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from .loggers import Logger, Openers, TensorBoard

_log = logging.getLogger(__name__)

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
        loggers: other programs that records go to.
    """

    def __init__(
        self,
        directory: Path,
        start: int,
        total: int,
        tensorboard: bool,
        speaks: bool,
        loggers: Openers | None = None,
    ) -> None:
        self.speaks = speaks
        self._directory, self._start = directory, start
        self._sinks: list[Callable[[int, Mapping[str, Any]], None]] | None = None
        events = {"tensorboard": lambda: TensorBoard(directory, start)} if tensorboard else {}
        self._openers: dict[str, Callable[[], Logger]] = {**events, **(loggers or {})}
        self._loggers: dict[str, Logger] = {}
        self._bar: Any = None
        self._warned: set[str] = set()
        if speaks:
            from tqdm import tqdm

            self._attempt("the records", self._open)
            self._bar = tqdm(total=total, initial=start, unit="step", file=sys.stderr, disable=None, dynamic_ncols=True)

    def _open(self) -> list[Callable[[int, Mapping[str, Any]], None]]:
        """What writes records, opened on first use: the disk may have been full when the run began."""
        if self._sinks is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            kept = [record for record in self._known() if record["step"] <= self._start] if self._start else []
            lines = Lines(self._directory / RECORDS, map(_line, kept))
            table = Lines(self._directory / "metrics.csv", (_row(record) for record in ({}, *kept)))
            self._sinks = [
                lambda step, values: lines.append(_line({"step": step, **values})),
                lambda step, values: table.append(_row({"step": step, **values})),
            ]
        return self._sinks

    def _known(self) -> list[dict[str, Any]]:
        """The records so far. A damaged one is left out: a log is not what a run goes on from."""
        damaged: list[int] = []
        records = read(self._directory, damaged)
        if damaged:
            warnings.warn(
                f"{self._directory / RECORDS} has lines that are no records ({', '.join(map(str, damaged[:5]))}"
                f"{', ...' if len(damaged) > 5 else ''}): the file was changed or damaged, and they are left out",
                stacklevel=3,
            )
        return records

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if self._bar is not None:
            self._attempt("the progress bar", self._bar.close)
        for name, logger in self._loggers.items():
            self._attempt(f"the last records for {name}", logger.close, Exception)

    def progress(self, loss: float) -> None:
        """One step is done."""
        if self.speaks:
            self._attempt("the progress bar", lambda: self._advance(loss))

    def _advance(self, loss: float) -> None:
        self._bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
        self._bar.update()

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """Write down what is known after ``step`` steps."""
        if self.speaks:
            for sink in self._attempt("the records", self._open) or ():
                self._attempt("the records", functools.partial(sink, step, values))
            for name in self._openers:
                hand_on = functools.partial(self._hand_on, name, step, values)
                self._attempt(f"records for {name}", hand_on, Exception)  # a logger's errors are of any type
            if "loss" in values and self._bar.disable:  # there is no terminal for the bar to show it on
                speed = f", {values['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in values else ""
                rate = f", lr {values['lr']:.3g}" if "lr" in values else ""
                self.say(f"step {step}: loss {values['loss']:.4f}{rate}{speed}")

    def say(self, line: str) -> None:
        """A line of the log, for whoever watches."""
        if self.speaks:
            self._attempt("messages", lambda: _log.info(line))

    def _hand_on(self, name: str, step: int, values: Mapping[str, Any]) -> None:
        if name not in self._loggers:
            self._loggers[name] = self._openers[name]()
        try:
            numbers = {key: value for key, value in values.items() if isinstance(value, (int, float))}
            self._loggers[name].record(step, numbers)
        except Exception:
            del self._loggers[name]  # it has ended; the next record opens it again
            raise

    def _attempt(self, what: str, write: Callable[[], Any], errors: type[Exception] = OSError) -> Any:
        """What ``write`` returns; None, and a warning the first time, if the disk, the terminal or a logger refuses."""
        try:
            return write()
        except errors as error:
            if what not in self._warned:
                self._warned.add(what)
                with contextlib.suppress(OSError):
                    warnings.warn(
                        f"{what} of this run cannot be written ({error}); training goes on, and later ones are tried "
                        "again",
                        stacklevel=3,
                    )
            return None


class Lines:
    """A file of whole lines: the first ones are put there at once, and a line that does not fit leaves no part behind.

    Args:
        path: of the file. What it had is replaced, by a rename: a run that is killed here must not lose it.
        first: the lines to begin with.
    """

    def __init__(self, path: Path, first: Iterable[str]) -> None:
        self._path = path
        beside = path.with_name(f".{path.name}")
        try:
            beside.write_text("".join(first))
            beside.replace(path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise

    def append(self, line: str) -> None:
        append(self._path, line)


def append(path: Path, line: str) -> None:
    """Add a line to a file. One that does not fit leaves no part behind.

    Raises:
        OSError: it could not be written.
    """
    data = line.encode()
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        before = os.fstat(file).st_size
        try:
            while data:
                data = data[os.write(file, data) :]
        except OSError:
            os.ftruncate(file, before)
            raise
    finally:
        os.close(file)


def _row(record: Mapping[str, Any]) -> str:
    """A line of metrics.csv; for an empty record the names of the columns."""
    text = io.StringIO()
    rows = csv.DictWriter(text, COLUMNS, extrasaction="ignore")
    if record:
        rows.writerow(record)
    else:
        rows.writeheader()
    return text.getvalue()


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record) + "\n"


def read(directory: Path, damaged: list[int] | None = None) -> list[dict[str, Any]]:
    """The records of a run; a last line that was cut off when the run was killed is left out.

    Args:
        directory: the run's.
        damaged: gets the numbers of the lines that are no records. Without it, the first of them is an error.
    """
    path = directory / RECORDS
    if not path.exists():
        return []
    records = []
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        record = _record(line)
        if record is not None:
            records.append(record)
        elif damaged is not None:
            damaged.extend([number] if number < len(lines) else [])
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
    return record if all(map(_is_number, record.values())) else None


def _is_number(value: Any) -> bool:
    """Also as a float: a whole number of a JSON may have any number of digits."""
    try:
        return isinstance(value, (int, float)) and isinstance(float(value), float)
    except OverflowError:
        return False
