"""``python -m alto_distributed prepare | pretrain | compare | report | estimate``."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

from ..extras import require
from ..sharding.lost_rank import lost_rank
from ..sharding.shutdown import shutdown
from . import report
from .checkpoint.manager import Checkpoints
from .config import settings as config
from .config.settings import Run
from .console import log_lines
from .memory import estimate
from .memory import usage as memory
from .optimizers import arguments, describe

_log = logging.getLogger(__name__)

#: What every run imports sooner or later, the figure at its end included; and what each engine does.
_NEEDED = ("matplotlib", "numpy", "tqdm", "transformers")
_MODULES = {"deepspeed": "deepspeed", "megatron": "megatron.core"}

#: Seconds that a rank which has lost the others may take to end.
_ORDERLY_END = 20


def main(arguments: Sequence[str], program: str = "python -m alto_distributed") -> None:
    """Run one of the commands; a problem with its settings ends in a message, not a traceback."""
    parser = _parser(program)
    options = parser.parse_args(arguments)
    try:
        with log_lines():
            options.action(options)
    except (ValueError, OSError) as error:
        raise SystemExit(f"alto_distributed {options.command}: {error}") from error


def _parser(program: str) -> argparse.ArgumentParser:
    from .data import command as preparing

    parser = argparse.ArgumentParser(program, description="GPT-2 pretraining with ALTO.")
    commands = parser.add_subparsers(dest="command", required=True)

    preparation = commands.add_parser("prepare", help="turn text into data to train on")
    preparing.add_arguments(preparation)
    preparation.set_defaults(action=preparing.main)

    pretraining = commands.add_parser("pretrain", help="train, or go on training; under torchrun, mpirun or deepspeed")
    _common(pretraining)
    pretraining.add_argument("--engine", choices=config.ENGINES, help="overrides the settings")
    pretraining.add_argument("--optimizer", help="overrides optimizer.name, with that optimizer's own defaults")
    pretraining.add_argument("--into", type=Path, help="directory of the run (default: runs/CONFIG-ENGINE-OPTIMIZER)")
    pretraining.add_argument("--stop-at", type=int, metavar="STEP", help="stop there with a checkpoint, to go on later")
    pretraining.add_argument("--other-data", action="store_true", help="go on with other data than the checkpoint's")
    pretraining.add_argument("--dry-run", action="store_true", help="print what would run, memory and batch arithmetic")
    pretraining.add_argument("--world", type=int, metavar="RANKS", help="for --dry-run: how many ranks there would be")
    pretraining.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher's
    pretraining.set_defaults(action=_pretrain)

    comparison = commands.add_parser("compare", help="train with several optimizers from the same weights and data")
    _common(comparison)
    comparison.add_argument("--engine", choices=config.ENGINES, help="overrides the settings")
    comparison.add_argument(
        "--optimizers", nargs="+", required=True, metavar="NAME[:KEY=VALUE,...]", help="like alto adamw:lr=1e-3"
    )
    comparison.add_argument("--ranks", type=int, default=2, help="processes on this machine (default: 2)")
    comparison.add_argument("--into", type=Path, default=Path("runs/compare"), help="directory of the runs")
    comparison.set_defaults(action=_compare)

    reporting = commands.add_parser("report", help="table and figure of runs")
    reporting.add_argument("runs", nargs="+", type=Path)
    reporting.add_argument("--into", type=Path, help="where to write report.md and report.png (default: the first run)")
    reporting.set_defaults(action=_report)

    estimating = commands.add_parser("estimate", help="memory on each rank, and of a checkpoint, by part and optimizer")
    estimate.add_arguments(estimating)
    estimating.set_defaults(action=estimate.main)
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, required=True, help="settings: configs/*.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")


def _settings(options: argparse.Namespace) -> Run:
    overrides = list(options.overrides)
    if options.engine:
        overrides.insert(0, f"engine={options.engine}")
    run = config.load(options.config, overrides)
    name = getattr(options, "optimizer", None)
    if name and name != run.optimizer.name:
        named = [f"optimizer={{name: {name}}}"]
        run = config.load(options.config, [*named, *overrides])
    arguments(run)  # refuses an optimizer or options that do not exist
    return run


def _pretrain(options: argparse.Namespace) -> None:
    run = _settings(options)
    directory = options.into or Path("runs") / f"{options.config.stem}-{run.engine}-{run.optimizer.name}"
    if options.dry_run:
        print(plan(run, options.world or int(os.environ.get("WORLD_SIZE", "1")), directory))
        return
    require(*_NEEDED, _MODULES[run.engine], *(["tensorboard"] if run.logs.tensorboard else []))
    from .trainer import train

    try:
        steps = train(run, directory, options.stop_at, other_data=options.other_data)
        shutdown()
    except RuntimeError as error:
        reason = lost_rank(error)
        if reason is None:
            raise
        _end_alone(run, directory, reason)
    if steps == run.training.iterations and int(os.environ["RANK"]) == 0:
        try:
            text, drawing = report.write([directory], directory)
        except (OSError, ValueError) as error:  # the run itself is done, and saved
            _log.warning("there is no report of %s: %s", directory, error)
        else:
            print(f"{text}\n\nfigure: {drawing}")


def _end_alone(run: Run, directory: Path, reason: str) -> NoReturn:
    """End this rank, for others have died or hang."""
    newest = Checkpoints(directory / "checkpoints", run).newest()
    rest = f"goes on from the newest checkpoint, {newest.path}" if newest else "begins anew: there is no checkpoint yet"
    # What an orderly end waits for, such as the destructor of a communicator, may never come.
    faulthandler.dump_traceback_later(_ORDERLY_END, exit=True)
    raise SystemExit(
        f"alto_distributed pretrain: rank {os.environ['RANK']} lost contact with another rank: {reason}. That one has "
        f"died, or has not answered for training.timeout={run.training.timeout:g} seconds; what it or the launcher "
        f"said tells why. The same command {rest}"
    )


def plan(run: Run, world: int, directory: Path) -> str:
    """What a run would be like on ``world`` ranks: batch arithmetic and memory.

    Raises:
        ValueError: the batch does not divide over the ranks, or the ranks not over the model.
    """
    model_parallel = run.model_parallel
    if not 1 <= world < 2**31:
        raise ValueError(f"--world {world}: there must be a rank at least, and not more than anybody has")
    if world % model_parallel:
        raise ValueError(
            f"{world} ranks are not a multiple of tensor_parallel x pipeline_parallel = {model_parallel}; add ranks, "
            "or set megatron.tensor_parallel and megatron.pipeline_parallel"
        )
    data_parallel, t, m = world // model_parallel, run.training, run.model
    accumulation = run.accumulation(data_parallel)
    need, activations = memory.estimate(run, world)
    held = {f.name: getattr(need, f.name) for f in fields(need)}
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in {**held, "activations": activations}.items() if size)
    offloaded = "; as if nothing were offloaded" if memory.offloads(run) else ""
    return "\n".join(
        [
            f"run         {directory}",
            f"engine      {run.engine}, {t.precision}, {world} ranks"
            + (f" = {data_parallel} data-parallel x {model_parallel} model-parallel" if model_parallel > 1 else ""),
            f"model       {memory.parameter_count(run):,} parameters, {m.layers} layers, hidden {m.hidden}, "
            f"sequence {m.sequence}",
            f"optimizer   {describe(run)}",
            f"batch       {t.micro_batch} micro x {accumulation} accumulated x {data_parallel} data-parallel = "
            f"{t.global_batch} samples, {t.global_batch * m.sequence:,} tokens a step, {t.iterations} steps",
            f"memory      about {_gib(need.total + activations)} a rank: {parts}{offloaded}",
        ]
    )


def _compare(options: argparse.Namespace) -> None:
    # The list of optimizers has no end of its own, and takes in the overrides that follow it.
    choices = [word for word in options.optimizers if "=" not in word.partition(":")[0]]
    overrides = options.overrides + [word for word in options.optimizers if word not in choices]
    require(*_NEEDED)
    directories = []
    for choice in choices:
        name, _, settings = choice.partition(":")
        directory = options.into / choice.replace(":", "-").replace(",", "-").replace("/", "_")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
        command += [*_entry(), "pretrain", "--config", str(options.config), "--into", str(directory)]
        command += ["--optimizer", name, *(["--engine", options.engine] if options.engine else [])]
        command += [f"optimizer.{setting}" for setting in settings.split(",") if setting] + overrides
        _log.info("+ %s", shlex.join(command))
        if status := subprocess.run(command, check=False).returncode:
            raise SystemExit(f"alto_distributed compare: {choice} ended with status {status}; it says why above")
        directories.append(directory)
    text, drawing = report.write(directories, options.into)
    print(f"{text}\n\nfigure: {drawing}")


def _entry() -> list[str]:
    """How to start ranks the way this program was started: as a module, which ``alto`` does too, or by a script."""
    main = sys.modules["__main__"]
    script = Path(str(main.__file__)).resolve()
    as_module = getattr(main, "__spec__", None) is not None or script.suffix != ".py"
    return ["-m", "alto_distributed"] if as_module else [str(script)]


def _report(options: argparse.Namespace) -> None:
    text, drawing = report.write(options.runs, options.into or options.runs[0])
    print(f"{text}\n\nfigure: {drawing}")


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"
