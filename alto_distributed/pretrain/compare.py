"""Optimizers side by side: what ``compare`` and ``sweep`` make of their names, and ``compare`` itself."""

from __future__ import annotations

import argparse
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..extras import require
from . import report
from .config import settings as config
from .config.settings import Run
from .dry_run import check_start
from .optimizers import THIRD_PARTY, arguments, describe

_log = logging.getLogger(__name__)

#: Of a rate that nobody chose.
DEFAULT = "a default"

#: Between settings; one inside of brackets belongs to a value.
_COMMA = re.compile(r",(?![^\[({]*[\])}])")

#: What every run imports sooner or later, the figure at its end included.
_NEEDED = ("matplotlib", "numpy", "tqdm", "transformers")

#: What each engine imports.
_OF_ENGINE = {"deepspeed": "deepspeed", "megatron": "megatron.core"}


def settings(options: argparse.Namespace) -> Run:
    """The run of a command line: ``config``, ``overrides``, ``engine`` and, if it is there, ``optimizer``."""
    overrides = list(options.overrides)
    if options.engine:
        overrides.insert(0, f"engine={options.engine}")
    name = getattr(options, "optimizer", None)
    if name and name != config.load(options.config).optimizer.name:
        overrides.insert(0, f"optimizer={{name: {name}}}")
    run = config.load(options.config, overrides)
    arguments(run)  # refuses an optimizer or options that do not exist
    return run


def modules(run: Run) -> list[str]:
    """All that a run imports, of what extras install."""
    own = ["pytorch_optimizer"] if run.optimizer.name in THIRD_PARTY else []
    loggers = [name for name in ("tensorboard", "wandb", "mlflow") if getattr(run.logs, name)]
    return [*_NEEDED, _OF_ENGINE[run.engine], *own, *loggers]


@dataclass(frozen=True)
class Job:
    """A run of one optimizer among others."""

    choice: str
    """As it was named: ``adamw:lr=1e-3``."""
    run: Run
    rate_from: str
    """Where its rate comes from: "as set", the name of the settings' file, or :data:`DEFAULT`."""
    words: tuple[str, ...]
    """What follows ``pretrain`` on its command line, but ``--into``."""

    @property
    def directory(self) -> str:
        """A name for its runs' directory."""
        return re.sub(r"[^\w.=+-]+", "-", self.choice).strip("-")


def add_arguments(parser: argparse.ArgumentParser, ranks: int, into: str) -> None:
    """The arguments that ``compare`` and ``sweep`` share."""
    parser.add_argument("--config", type=Path, required=True, help="settings: configs/*.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--engine", choices=config.ENGINES, help="overrides the settings")
    parser.add_argument(
        "--optimizers",
        nargs="+",
        action="extend",
        required=True,
        metavar="NAME[:KEY=VALUE,...]",
        help="like alto adamw:lr=1e-3",
    )
    parser.add_argument("--ranks", type=int, default=ranks, help="processes of a run (default: %(default)s)")
    parser.add_argument("--into", type=Path, default=Path(into), help="directory of the runs (default: %(default)s)")


def jobs(options: argparse.Namespace) -> list[Job]:
    """One for each of ``--optimizers``, checked as far as can be before anything trains.

    Raises:
        ValueError: an optimizer, one of its options, the data or the batch is wrong.
    """
    # The list of optimizers has no end of its own, and takes in the overrides that follow it.
    choices = [word for word in options.optimizers if "=" not in word.partition(":")[0]]
    overrides = options.overrides + [word for word in options.optimizers if word not in choices]
    if not choices:
        raise ValueError(f"--optimizers {' '.join(options.optimizers)}: there is no name; write alto adamw:lr=1e-3")
    for choice in choices:
        if choices.count(choice) > 1:
            raise ValueError(f"--optimizers names {choice} twice; give each once")
    made = [_job(choice, options, overrides) for choice in choices]
    require(*dict.fromkeys(module for job in made for module in modules(job.run)))
    for job in made:
        check_start(job.run, options.ranks, options.into / job.directory)
    return made


def _job(choice: str, options: argparse.Namespace, overrides: list[str]) -> Job:
    name, own = choice.partition(":")[0], _overrides_of(choice)
    asked = {"config": options.config, "engine": options.engine, "optimizer": name}
    overrides = [*overrides, *own]  # what is said of this optimizer wins over what is said of all
    run = settings(argparse.Namespace(**asked, overrides=overrides))
    is_set = any(word.startswith("optimizer.lr=") for word in overrides)
    is_of_file = config.load(options.config).optimizer.name == name
    rate_from = "as set" if is_set else options.config.name if is_of_file else DEFAULT
    words = ["--config", str(options.config), "--optimizer", run.optimizer.name]
    words += [*(["--engine", options.engine] if options.engine else []), *overrides]
    return Job(choice, run, rate_from, tuple(words))


def _overrides_of(choice: str) -> list[str]:
    """Of ``adamw:lr=1e-3,options.betas=[0.9,0.95]``: a comma inside of brackets belongs to a value."""
    return [f"optimizer.{setting}" for setting in _COMMA.split(choice.partition(":")[2]) if setting]


def state(made: Sequence[Job]) -> None:
    """Say which rate and decay each one has, and where the rate comes from."""
    for job in made:
        _log.info("%s (rate: %s)", describe(job.run), job.rate_from)


def _warn_of_defaults(made: Sequence[Job]) -> None:
    """Some rates were chosen for this run, and others for another batch: that is no fair comparison."""
    others = [job.choice for job in made if job.rate_from == DEFAULT]
    chosen = [job.choice for job in made if job.rate_from != DEFAULT]
    if others and chosen:
        _log.warning(
            "NOT A FAIR COMPARISON: the rate of %s was chosen for these settings, that of %s is a default: the paper's "
            "for GPT-2 at global batch 4096 (here: %s), or a library's. Find the rates with alto sweep, or set them: "
            "%s:lr=...",
            ", ".join(chosen),
            ", ".join(others),
            made[0].run.training.global_batch,
            others[0].partition(":")[0],
        )


def main(options: argparse.Namespace) -> None:
    made = jobs(options)
    state(made)
    _warn_of_defaults(made)
    variables = {**threads(options.ranks, len(os.sched_getaffinity(0))), **os.environ}
    directories = []
    for job in made:
        directory = options.into / job.directory
        command = [*command_of(options.ranks), "pretrain", *job.words, "--into", str(directory), "logs.report=false"]
        _log.info("+ %s", shlex.join(command))
        if status := subprocess.run(command, env=variables, check=False).returncode:
            raise SystemExit(f"alto_distributed compare: {job.choice} ended with status {status}; it says why above")
        directories.append(directory)
    text, page = report.write(directories, options.into)
    print(f"{text}\n\nreport: {page}")


def command_of(ranks: int) -> list[str]:
    """How to start this program on so many ranks of this machine; what follows is a command of it."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [sys.executable, *torchrun, *entry()]


def threads(processes: int, cores: int) -> dict[str, str]:
    """The environment of processes that share so many cores. torchrun would set one thread, and say so in a banner."""
    return {"OMP_NUM_THREADS": str(max(1, cores // processes))}


def entry() -> list[str]:
    """How to start ranks the way this program was started: as a module, which ``alto`` does too, or by a script."""
    main = sys.modules["__main__"]
    script = Path(getattr(main, "__file__", None) or "").resolve()  # a prompt has none
    as_module = getattr(main, "__spec__", None) is not None or script.suffix != ".py"
    return ["-m", "alto_distributed"] if as_module else [str(script)]
