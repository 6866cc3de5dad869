"""``diagnostics.jsonl``: what each parameter's step looked like, a line for each step that was looked at."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path

from ..diagnostics import Reading
from ..sharding.rank_sync import gather_on_rank0
from .metrics import Lines

FILE = "diagnostics.jsonl"

#: Step -> parameter -> reading.
Readings = dict[int, dict[str, Reading]]


class ReadingsLog:
    """Rank 0's writes; the others only send theirs.

    Args:
        directory: the run's.
        start: steps that were done before; later lines are dropped.
    """

    def __init__(self, directory: Path, start: int) -> None:
        self._directory, self._start = directory, start
        self._lines: Lines | None = None

    def record(self, step: int, own: Mapping[str, Reading]) -> dict[str, Reading]:
        """Write down the readings of all ranks after a step. Called by all of them.

        Returns:
            On rank 0 those of all parameters; on the others none.
        """
        # A rank knows the parameters of which it holds a shard, and on a pipeline stage no others.
        found = {name: reading for of_rank in gather_on_rank0(dict(own)) for name, reading in of_rank.items()}
        if found:
            try:
                self._append(step, found)
            except OSError as error:
                warnings.warn(f"{FILE} of this run cannot be written ({error}); training goes on", stacklevel=2)
        return found

    def _append(self, step: int, found: Mapping[str, Reading]) -> None:
        if self._lines is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            kept = {step: of_step for step, of_step in read(self._directory).items() if step <= self._start}
            self._lines = Lines(self._directory / FILE, (_line(*one) for one in kept.items()))
        self._lines.append(_line(step, found))


def _line(step: int, found: Mapping[str, Reading]) -> str:
    return json.dumps({"step": step, "parameters": {name: list(reading) for name, reading in found.items()}}) + "\n"


def read(directory: Path) -> Readings:
    """The readings of a run; lines that are none, such as one that was cut off, are left out."""
    found: Readings = {}
    with contextlib.suppress(OSError):
        for line in (directory / FILE).read_bytes().splitlines():
            with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError, AttributeError, OverflowError):
                record = json.loads(line)
                of_step = {str(name): Reading(*map(float, four)) for name, four in record["parameters"].items()}
                found[int(record["step"])] = of_step
    return found
