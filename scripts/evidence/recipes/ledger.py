"""Finished runs: one JSON line each, appended and never run again."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..places import RESULTS
from .trials import Trial

RUNS = RESULTS / "recipes.jsonl"


class OutOfTime(Exception):
    """The time for new runs is over."""


class Ledger:
    """Losses of trials, from the file, or by running them.

    Args:
        path: of the file.
        seconds: for new runs; 0 for none at all, None for no limit.
    """

    def __init__(self, path: Path = RUNS, seconds: float | None = 0) -> None:
        self._path = path
        self._until = math.inf if seconds is None else time.monotonic() + seconds
        self._done: dict[Trial, dict[str, Any]] = {}
        if path.is_file():
            for line in path.read_text().splitlines():
                told = json.loads(line)
                self._done[Trial.from_json(told["trial"])] = told

    def __len__(self) -> int:
        return len(self._done)

    def __contains__(self, trial: Trial) -> bool:
        return trial in self._done

    def __iter__(self) -> Iterator[Trial]:
        return iter(self._done)

    def loss(self, trial: Trial, split: str = "valid") -> float:
        """Of a finished run, or of one that is done now; infinite if it broke down.

        Raises:
            OutOfTime: the run is not there and the time is over.
        """
        if trial not in self._done:
            if time.monotonic() >= self._until:
                raise OutOfTime(str(trial))
            self._run(trial)
        value = self._done[trial][split]
        return math.inf if value is None else float(value)

    def seconds(self) -> float:
        """Of the processor, that all runs took."""
        return float(sum(told["seconds"] for told in self._done.values()))

    def _run(self, trial: Trial) -> None:
        from .training import train  # the report needs no model

        told = {"trial": trial.as_json(), **train(trial), "torch": torch.__version__}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a") as file:
            file.write(json.dumps(told) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._done[trial] = told
        print(f"{trial.setting} {trial.optimizer} {told}", flush=True)
