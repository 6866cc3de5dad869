"""The training loop: the same for every engine."""

from __future__ import annotations

import contextlib
import math
import signal
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from ..diagnostics import Reading
from ..errors import Diverged
from ..sharding.rank_sync import run_on_rank0
from . import loggers
from .batch_size import batch_size, samples_before
from .checkpoint.manager import Checkpoints
from .config.settings import Run
from .data.samples import Samples
from .engines.base import Engine, build
from .memory.usage import peak
from .metrics import Log
from .optimizers import describe
from .readings import ReadingsLog
from .runtime.launch_env import any_rank, end_with_launcher, read_launch_env, wait_at_most
from .runtime.rendezvous import rendezvous_again
from .runtime.run_lock import PATIENCE, keep_run_lock, lock_run
from .runtime.same_settings import same_data
from .schedule import learning_rate
from .starts import note_start
from .throughput import utilisation


def train(
    run: Run,
    directory: Path,
    stop_at: int | None = None,
    *,
    other_data: bool = False,
    changes: Sequence[str] = (),
) -> int:
    """Train, or go on training, in a run's directory. Called by all ranks.

    Args:
        run: its settings.
        directory: for its logs and checkpoints. If it has a checkpoint, the run goes on from there.
        stop_at: stop with a checkpoint after so many steps in all, as SIGTERM would.
        other_data: go on with other data than the checkpoint was trained on.
        changes: settings that may be others than the checkpoint's, see :mod:`.checkpoint.changes`.

    Returns:
        Optimizer steps done. Fewer than ``training.iterations`` if it was told to stop.
    """
    end_with_launcher()
    read_launch_env()
    rendezvous_again(run.training.timeout)
    engine = build(run)
    wait_at_most(run.training.timeout)  # in the groups that the engine has made as well
    run_on_rank0(lambda: lock_run(directory, min(PATIENCE, run.training.timeout / 2)))
    data = same_data(run)
    batches = Batches(run, engine)
    checkpoints = Checkpoints(directory / "checkpoints", run, data, other_data=other_data, changes=changes)
    step, last = 0, run.training.iterations
    newest, changed = run_on_rank0(checkpoints.newest), list[str]()
    if newest is not None:
        changed = checkpoints.load(engine, newest)
        step = newest.step
    last = last if stop_at is None else min(last, max(stop_at, step))

    speaks = dist.get_rank() == 0
    if speaks:
        note_start(directory, run, step, dist.get_world_size())
    opened = Log(directory, step, run.training.iterations, run.logs.tensorboard, speaks, loggers.of_run(run, directory))
    with _asked_to_stop() as asked, opened as log:
        log.say(f"step {step}: {'resumed from ' + str(newest.path) if newest else 'new run'} in {directory}")
        for change in changed:
            log.say(f"step {step}: {change}, from here on")
        log.say(f"optimizer: {describe(run)}")
        if batches.no_test:
            log.say(f"there will be no test at the end: {batches.no_test}")
        if newest is None:
            _validate(engine, batches, log, 0)
        saved = step if newest else None
        watch, skipped, unrecorded = _Stopwatch(run), 0, 0
        readings = ReadingsLog(directory, step)
        while step < last:
            try:
                outcome = engine.train(batches.of_step(step), learning_rate(run, step))
            except Diverged:
                log.record(step + 1, {"diverged": True})
                raise
            step += 1
            log.progress(outcome.loss)
            skipped = _count_skipped(outcome.skipped, skipped, step, run, log)
            unrecorded += outcome.skipped
            watch.add(outcome.seconds, batch_size(run.training, step - 1))
            stop = any_rank(bool(asked), engine.device)
            if step % run.logs.every == 0 or step == last or stop:
                values = {"loss": outcome.loss, "lr": learning_rate(run, step - 1), "grad_norm": outcome.grad_norm}
                if run.training.batch_ramp.start:
                    values["global_batch"] = batch_size(run.training, step - 1)
                lost = {"skipped": outcome.skipped, "skipped_steps": unrecorded}  # the latter since the last record
                log.record(step, {**values, **lost, **watch.read(engine.device)})
                unrecorded = 0
                if not math.isfinite(outcome.loss) and not outcome.skipped:
                    log.record(step, {"diverged": True})
                    raise Diverged(
                        f"the loss is {outcome.loss} at step {step}: lower optimizer.lr, or look at the data"
                    )
            every = run.logs.diagnostics_every
            if every and step % every == 0:
                _trust_ratios(readings.record(step, engine.diagnostics()), log, step)
            if stop:
                last = step
            at_the_end = step == run.training.iterations
            if at_the_end or (run.evaluation.every and step % run.evaluation.every == 0):
                _validate(engine, batches, log, step, at_the_end)
                watch.restart()
            if step == last or (run.checkpoints.every and step % run.checkpoints.every == 0):
                if saved != step and _save(checkpoints, engine, step, log, must=step == last):
                    saved = step
                watch.restart()
        if step < run.training.iterations:
            log.say(f"step {step}: stopped as asked; the same command goes on from here")
    engine.close()
    return step


def _count_skipped(is_skipped: bool, before: int, step: int, run: Run, log: Log) -> int:
    """Skipped steps in a row, this one included."""
    if not is_skipped:
        return 0
    log.say(f"step {step}: skipped, a gradient was not finite ({before + 1} in a row)")
    if before + 1 == run.training.max_skipped:
        log.record(step, {"diverged": True})
        raise Diverged(
            f"{before + 1} steps in a row had gradients that are not finite, the last of them step {step}: lower "
            "optimizer.lr, look at the data, or go on from an earlier checkpoint; training.max_skipped sets the limit"
        )
    return before + 1


def _save(checkpoints: Checkpoints, engine: Engine, step: int, log: Log, must: bool) -> bool:
    """Whether it could be written. If not, the run goes on to the next one, but does not end as if all were well."""
    run_on_rank0(lambda: keep_run_lock(checkpoints.directory.parent))
    try:
        log.say(f"step {step}: saved {checkpoints.save(engine, step)}")
    except OSError as error:
        if must:
            raise
        log.say(f"step {step}: NOT saved, going on without: {error}")
        return False
    return True


class Batches:
    """This rank's part of the data."""

    def __init__(self, run: Run, engine: Engine) -> None:
        self._run = run
        self._rank = engine.data_parallel_rank, engine.data_parallel_size
        self._splits = {split: self._samples(split) for split in ("train", "valid")}
        self.no_test = ""
        """Why there will be no test at the end; a run goes without one rather than not at all."""
        try:
            self._splits["test"] = self._samples("test")
            self.held_out("test")
        except ValueError as error:
            self.no_test = str(error)
        if any_rank(bool(self.no_test), engine.device):  # evaluating is done by all ranks or by none
            self.no_test = self.no_test or "another rank cannot read its part of the test split"

    def _samples(self, split: str) -> Samples:
        model = self._run.model
        return Samples(self._run.data.directory, split, model.sequence, model.vocabulary, self._run.training.seed)

    def of_step(self, step: int) -> list[torch.Tensor]:
        training = self._run.training
        first, size = samples_before(training, step), batch_size(training, step)
        return self._splits["train"].batch_from(first, size, training.micro_batch, *self._rank)

    def held_out(self, split: str) -> list[torch.Tensor]:
        """What is evaluated of "valid" or "test"."""
        return self._splits[split].validation(self._run.evaluation.samples, self._run.training.micro_batch, *self._rank)


def _validate(engine: Engine, batches: Batches, log: Log, step: int, at_the_end: bool = False) -> None:
    splits = {"valid": "validation"}
    if at_the_end and not batches.no_test:
        splits["test"] = "test"
    values: dict[str, float] = {}
    for split, called in splits.items():
        loss = engine.evaluate(batches.held_out(split))
        perplexity = math.exp(min(loss, 50.0))
        values.update({f"{split}_loss": loss, f"{split}_perplexity": perplexity})
        log.say(f"step {step}: {called} loss {loss:.4f}, perplexity {perplexity:.2f}")
    log.record(step, values)


def _trust_ratios(readings: Mapping[str, Reading], log: Log, step: int) -> None:
    """A summary over the parameters that have a ratio."""
    ratios = [reading.trust_ratio for reading in readings.values() if reading.trust_ratio != 1.0]
    if ratios:
        spread = {"min": min(ratios), "median": statistics.median(ratios), "max": max(ratios)}
        log.record(step, {f"trust_ratio_{name}": value for name, value in spread.items()})


class _Stopwatch:
    """Tokens a second since the last reading, without validations and checkpoints."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.restart()

    def restart(self) -> None:
        self.began, self.steps, self.samples = time.perf_counter(), 0, 0
        self.parts: dict[str, float] = {}

    def add(self, seconds: Mapping[str, float] | None, samples: int) -> None:
        self.steps += 1
        self.samples += samples
        for name, value in (seconds or {}).items():
            self.parts[name] = self.parts.get(name, 0.0) + value

    def read(self, device: torch.device) -> dict[str, float]:
        elapsed, steps, parts = time.perf_counter() - self.began, self.steps, self.parts
        speed = self.samples * self.run.model.sequence / elapsed
        self.restart()
        values = {"tokens_per_second": speed, "seconds_per_step": elapsed / steps, "peak_gib": peak(device) / 2**30}
        used = utilisation(self.run.model, speed, device)
        if used is not None:
            values["mfu"] = used
        return {**values, **{f"seconds_{name}": total / steps for name, total in parts.items()}}


@contextlib.contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """A list that gets an entry when this process is asked to end: by a scheduler (SIGTERM), by hand (SIGINT), or by
    one who wants torchrun to stay out of it (SIGUSR1): after SIGTERM it gives its ranks 30 seconds.

    A second SIGINT ends it at once, as it would without us. A second SIGTERM does not: where a scheduler sends one to
    every process, torchrun hands on its own.
    """
    asked: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}

    def ask(number: int, _: FrameType | None) -> None:
        asked.append(number)
        if number == signal.SIGINT:
            signal.signal(number, before[signal.SIGINT] or signal.SIG_DFL)

    for number in before:
        signal.signal(number, ask)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
