"""``python -m alto_distributed sweep --config FILE --optimizers NAME ... --budget N``."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from .. import compare
from ..compare import Job
from . import results
from .halving import FEWEST, Found, Grid, Trial, first_grid, lengths, search
from .trials import Outcome, Task, Trials, shares, visible_devices

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Find the best rate of each optimizer by successive halving over a half-octave grid, with the same number of "
        "trials for each, then train at these rates with several seeds. Run it again after an interruption: it goes on."
    )
    compare.add_arguments(parser, ranks=1, into="runs/sweep")
    parser.add_argument("--budget", type=int, required=True, metavar="RATES", help="rates to try, over all optimizers")
    parser.add_argument("--rungs", type=int, default=3, help="lengths of runs, each twice the last (default: 3)")
    parser.add_argument("--seeds", type=int, default=3, help="runs at each best rate (default: 3)")
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="runs at the same time (default: as many as the GPUs, or cores, allow)"
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, and stop")


def main(options: argparse.Namespace) -> None:
    """Sweep, and print the table.

    Raises:
        ValueError: something is wrong with the settings, before anything trains.
    """
    jobs = {job.choice: job for job in compare.jobs(options)}
    count = options.budget // len(jobs)
    if count < FEWEST:
        raise ValueError(
            f"--budget {options.budget} leaves {count} rates for each of {len(jobs)} optimizers, and a best one inside "
            f"of a grid takes {FEWEST}: give at least {FEWEST * len(jobs)}"
        )
    if options.rungs < 1 or options.seeds < 1:
        raise ValueError(f"--rungs {options.rungs} and --seeds {options.seeds} must be at least 1")
    for job in jobs.values():
        if not job.run.optimizer.lr:
            raise ValueError(f"{job.choice} has the rate 0, and there is no grid around it; set another")
    iterations = next(iter(jobs.values())).run.training.iterations
    rungs = lengths(iterations, options.rungs)
    environments = shares(options.ranks, options.jobs, visible_devices(), len(os.sched_getaffinity(0)))
    compare.state(list(jobs.values()))
    _state(jobs, count, rungs, options.seeds, len(environments))
    if options.dry_run:
        return
    sweep = _Sweep(jobs, options.into, Trials(environments, options.ranks))
    try:
        centers = {name: job.run.optimizer.lr for name, job in jobs.items()}
        found = search(centers, count, rungs, sweep.losses)
        winners = sweep.winners(found, iterations, options.seeds)
    except KeyboardInterrupt:
        raise SystemExit("interrupted; the same command goes on from here") from None
    except RuntimeError as error:
        raise SystemExit(f"alto_distributed sweep: {error}") from None
    text, drawing = results.write(winners, sweep.measured, options.into)
    print(f"{text}\n\nfigure: {drawing}")


def _state(jobs: Mapping[str, Job], count: int, rungs: Sequence[int], seeds: int, at_once: int) -> None:
    """Say what will run."""
    first = first_grid(count)
    for name, job in jobs.items():
        rates = ", ".join(f"{rate:g}" for rate in Grid.around(job.run.optimizer.lr, first).rates)
        _log.info("grid of %s: %s", name, rates)
    _log.info(
        "%s of %s rates each at first, the others if a best rate is at an edge; runs of %s steps, half of them go on "
        "to the next; then %s seeds at each best rate; %s at a time",
        first, count, ", ".join(map(str, rungs)), seeds, at_once,
    )  # fmt: skip


class _Sweep:
    """Trials of some optimizers, with what is known about them."""

    def __init__(self, jobs: Mapping[str, Job], into: Path, trials: Trials) -> None:
        self._jobs, self._into, self._trials = jobs, into, trials
        self.measured: dict[Trial, float] = {}

    def losses(self, wanted: Sequence[Trial]) -> Mapping[Trial, float]:
        """Of each trial, run if it was not yet."""
        new = [trial for trial in wanted if trial not in self.measured]
        tasks = [self._task(trial, self._jobs[trial.optimizer].run.training.seed) for trial in new]
        for trial, outcome in zip(new, self._trials.outcomes(tasks, _say), strict=True):
            self.measured[trial] = outcome.valid_loss
        return self.measured

    def winners(self, found: Mapping[str, Found], iterations: int, seeds: int) -> list[results.Winner]:
        """The optimizers at their best rates, with seeds that took no part in the choice."""
        at = {name: Trial(name, about.rate, iterations) for name, about in found.items()}
        first = next(iter(self._jobs.values())).run.training.seed + 1
        numbers = range(first, first + seeds)
        tasks = {(name, seed): self._task(trial, seed) for name, trial in at.items() for seed in numbers}
        known = dict(zip(tasks, self._trials.outcomes(list(tasks.values()), _say, keep=True), strict=True))
        return [
            results.Winner(
                name,
                about,
                {seed: known[name, seed] for seed in numbers},
                [tasks[name, seed].directory for seed in numbers],
            )
            for name, about in found.items()
        ]

    def _task(self, trial: Trial, seed: int) -> Task:
        job = self._jobs[trial.optimizer]
        share = trial.steps / job.run.training.iterations
        ramp = replace(job.run.training.batch_ramp, every=_part(job.run.training.batch_ramp.every, share))
        training = replace(job.run.training, iterations=trial.steps, seed=seed, batch_ramp=ramp)
        schedule = replace(job.run.schedule, warmup=_part(job.run.schedule.warmup, share))
        run = replace(
            job.run, training=training, schedule=schedule, optimizer=replace(job.run.optimizer, lr=trial.rate)
        )
        words = (
            f"training.iterations={training.iterations}",
            f"training.seed={training.seed}",
            f"schedule.warmup={schedule.warmup}",
            f"training.batch_ramp.every={ramp.every}",
            f"optimizer.lr={trial.rate!r}",
            "checkpoints.keep=1",
        )
        label = f"{trial.optimizer}, rate {trial.rate:g}, {trial.steps} steps, seed {seed}"
        directory = self._into / job.directory / f"lr-{trial.rate:g}-steps-{trial.steps}-seed-{seed}"
        return Task(label, directory, run, (*job.words, *words))


def _part(steps: int, share: float) -> int:
    """Of a warm-up or a ramp: as much of a short run as of the full one."""
    return max(1, round(steps * share)) if steps else 0


def _say(task: Task, outcome: Outcome) -> None:
    _log.info("%s: %s", task.label, "diverged" if outcome.has_diverged else f"loss {outcome.valid_loss:.4f}")
