"""Trials as processes: several at a time, each with its share of the devices, and none that is done runs again.

A trial is a run like any other, in a directory of its own. What came of it is in ``trial.json`` there, with the
settings and the data that it is about. One that was interrupted goes on from its checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch

from .. import metrics
from ..checkpoint.changes import differences
from ..checkpoint.manager import with_new_settings
from ..compare import command_of, entry, threads
from ..config.parsing import parse_json
from ..config.settings import Run
from ..data import files
from ..integrity import write_json

_log = logging.getLogger(__name__)

OUTCOME = "trial.json"
SAID = "log.txt"

_DEVICES = "CUDA_VISIBLE_DEVICES"

#: Seconds that an interrupted trial may take for its checkpoint.
_PATIENCE = 60.0


@dataclass(frozen=True)
class Task:
    """A run to do."""

    label: str
    directory: Path
    run: Run
    words: tuple[str, ...]
    """What follows ``pretrain`` on its command line, but ``--into``."""


@dataclass(frozen=True)
class Outcome:
    """What came of a run; NaN where it was not measured, and an infinite loss if it diverged."""

    valid_loss: float
    test_loss: float = math.nan

    @property
    def has_diverged(self) -> bool:
        return not math.isfinite(self.valid_loss)


def shares(ranks: int, jobs: int | None, devices: Sequence[str], cores: int) -> list[dict[str, str]]:
    """The environment of each trial that runs at the same time as others.

    Args:
        ranks: processes of a trial.
        jobs: how many at a time; None for as many as the devices allow.
        devices: the GPUs by the names that CUDA_VISIBLE_DEVICES has for them; none for CPUs.
        cores: of this machine.

    Raises:
        ValueError: there are fewer GPUs than that takes.
    """
    if ranks < 1 or (jobs is not None and jobs < 1):
        raise ValueError(f"--ranks {ranks} and --jobs {jobs} must be at least 1")
    if jobs is None:
        jobs = max(1, (len(devices) or cores) // ranks)
    if devices and jobs * ranks > len(devices):
        raise ValueError(
            f"--jobs {jobs} with --ranks {ranks} takes {jobs * ranks} GPUs, and there are {len(devices)}: lower one"
        )
    of_job = [devices[job * ranks : (job + 1) * ranks] for job in range(jobs)]
    return [{**threads(jobs * ranks, cores), **({_DEVICES: ",".join(own)} if own else {})} for own in of_job]


def visible_devices() -> list[str]:
    """This machine's GPUs as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get(_DEVICES, "").split(",") if name.strip()]
    return named[:count] if len(named) >= count else [str(number) for number in range(count)]


class Trials:
    """Runs them.

    Args:
        environments: of those that run at the same time (:func:`shares`).
        ranks: processes of each.
    """

    def __init__(self, environments: Sequence[Mapping[str, str]], ranks: int) -> None:
        self._environments, self._ranks = environments, ranks
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._is_ending = False

    def outcomes(
        self, tasks: Sequence[Task], done: Callable[[Task, Outcome], None], *, keep: bool = False
    ) -> list[Outcome]:
        """What came of each; those that are not done are run, in the order given.

        Args:
            tasks: what to do.
            done: called when one is.
            keep: let the checkpoints of the runs stay.

        Raises:
            ValueError: a directory has a trial of other settings or data.
            RuntimeError: a trial failed, and not because it diverged.
        """
        known = [known_outcome(task) for task in tasks]
        free: queue.SimpleQueue[Mapping[str, str]] = queue.SimpleQueue()
        for environment in self._environments:
            free.put(environment)

        def run(task: Task) -> Outcome:
            environment = free.get()
            try:
                return self._run(task, environment, keep)
            finally:
                free.put(environment)

        with ThreadPoolExecutor(len(self._environments)) as pool, _signals_interrupt():
            futures = {pool.submit(run, tasks[i]): i for i, outcome in enumerate(known) if outcome is None}
            try:
                for future in as_completed(futures):
                    known[futures[future]] = outcome = future.result()
                    done(tasks[futures[future]], outcome)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._end()
                raise
        return [outcome for outcome in known if outcome is not None]

    def _run(self, task: Task, environment: Mapping[str, str], keep: bool) -> Outcome:
        task.directory.mkdir(parents=True, exist_ok=True)
        # One rank needs no launcher, whose start takes longer than that of many a trial.
        start = command_of(self._ranks) if self._ranks > 1 else [sys.executable, *entry()]
        command = [*start, "pretrain", *task.words, "--into", str(task.directory), "logs.report=false"]
        own = {name: value for name, value in environment.items() if name == _DEVICES}
        variables = {**environment, **os.environ, **own}  # a number of threads that is set stays
        with open(task.directory / SAID, "ab") as said:
            with self._lock:
                if self._is_ending:
                    raise RuntimeError("the sweep ends")
                # A session of its own: Ctrl-C is for us, and we end them.
                process = subprocess.Popen(
                    command, stdout=said, stderr=subprocess.STDOUT, env=variables, start_new_session=True
                )
                self._running.add(process)
            status = process.wait()
            with self._lock:
                self._running.discard(process)
        outcome = _measured(task)
        if outcome is None:
            raise RuntimeError(
                f"{task.label} ended with status {status} before its last step; {task.directory / SAID} says why. The "
                "same command goes on from there"
            )
        _write(task, outcome)
        if not keep:
            shutil.rmtree(task.directory / "checkpoints", ignore_errors=True)
        return outcome

    def _end(self) -> None:
        with self._lock:
            self._is_ending = True
            running = list(self._running)
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM as Ctrl-C: the trials save and end before this process does."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def known_outcome(task: Task) -> Outcome | None:
    """What is written down about a trial that is done.

    Raises:
        ValueError: it is about other settings or data.
    """
    path = task.directory / OUTCOME
    if not path.exists():
        return None
    about = parse_json(path.read_bytes(), str(path))
    settings = about.get("settings") if isinstance(about, dict) else None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} is damaged; remove it, and the trial is repeated")
    changed = list(differences(with_new_settings(settings), json.loads(json.dumps(task.run.as_dict()))))
    if about.get("data") != files.fingerprint(task.run.data.directory):
        changed.append(f"the data in {task.run.data.directory} were others")
    if changed:
        raise ValueError(
            f"{task.directory} has a trial with other settings: {'; '.join(changed)}. Sweep with those, or in another "
            "directory (--into)"
        )
    valid, test = about.get("valid_loss"), about.get("test_loss")
    return Outcome(math.inf if valid is None else float(valid), math.nan if test is None else float(test))


def _write(task: Task, outcome: Outcome) -> None:
    # JSON has no infinity: null is a loss that diverged, or was not measured.
    losses = {name: value if math.isfinite(value) else None for name, value in vars(outcome).items()}
    about = {**losses, "settings": task.run.as_dict(), "data": files.fingerprint(task.run.data.directory)}
    write_json(task.directory / OUTCOME, about)


def _measured(task: Task) -> Outcome | None:
    """What the records of a run say at its last step; None if it has not come there and has not diverged."""
    records = metrics.read(task.directory)
    if records and "diverged" in records[-1]:
        return Outcome(math.inf)
    for record in reversed(records):
        if "valid_loss" in record and record["step"] == task.run.training.iterations:
            loss = float(record["valid_loss"])
            return Outcome(loss if math.isfinite(loss) else math.inf, float(record.get("test_loss", math.nan)))
    return None
