"""The commands of the training program: ``alto prepare``, ``pretrain``, ``compare``, ``sweep`` and so on."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ..errors import Diverged, Parser, did_you_mean, refused, shown
from ..extras import require
from ..sharding.lost_rank import lost_rank
from ..sharding.shutdown import end, shutdown
from . import compare, model_commands, report
from .checkpoint.changes import MAY_CHANGE, names_of
from .checkpoint.manager import Checkpoints
from .config import settings as config
from .config.settings import Run
from .console import log_lines
from .dry_run import check_start, plan
from .memory import estimate
from .sweep import command as sweep

__all__ = ["main", "plan"]

_log = logging.getLogger(__name__)

#: Seconds that a rank which has lost the others may take to end.
_ORDERLY_END = 20


def main(arguments: Sequence[str], program: str = "python -m alto_distributed") -> None:
    """Run one of the commands; a problem with its settings ends in a message, not a traceback."""
    options = _parse(_parser(program), arguments)
    try:
        with log_lines():
            options.action(options)
    except (ValueError, OSError, Diverged) as error:
        raise refused(options.command, error) from error


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command. Its words, such as overrides, may stand before, between and behind them."""
    options, rest = parser.parse_known_args(arguments)
    words: list[str] = getattr(options, options.words)
    for word in rest:
        if word.startswith("-"):
            known = options.flags
            hint = did_you_mean(word.partition("=")[0], known, cutoff=0.6)
            raise refused(options.command, f"there is no option {shown(word)}{hint} (known: {', '.join(known)})")
        words.append(word)
    return options


def _parser(program: str) -> argparse.ArgumentParser:
    from .data import command as preparing

    parser = Parser(program, description="Language-model pretraining with ALTO.")
    commands = parser.add_subparsers(dest="command", required=True)

    preparation = commands.add_parser("prepare", help="turn text into data to train on")
    preparing.add_arguments(preparation)
    preparation.set_defaults(action=preparing.main, words="input")

    pretraining = commands.add_parser("pretrain", help="train, or go on training; under torchrun, mpirun or deepspeed")
    _common(pretraining)
    pretraining.add_argument("--engine", choices=config.ENGINES, help="overrides the settings")
    pretraining.add_argument("--optimizer", help="overrides optimizer.name, with that optimizer's own defaults")
    pretraining.add_argument("--into", type=Path, help="directory of the run (default: runs/CONFIG-ENGINE-OPTIMIZER)")
    pretraining.add_argument("--stop-at", type=int, metavar="STEP", help="stop there with a checkpoint, to go on later")
    pretraining.add_argument("--other-data", action="store_true", help="go on with other data than the checkpoint's")
    pretraining.add_argument(
        "--resume-with",
        nargs="+",
        action="extend",
        default=[],
        metavar="section.key=value",
        help=f"go on from the newest checkpoint with these changes; possible for {MAY_CHANGE}",
    )
    pretraining.add_argument(
        "--dry-run", action="store_true", help="check settings and data, print what would run, and stop"
    )
    pretraining.add_argument(
        "--check", action="store_true", help="check what --dry-run does, but no checksums, say nothing if all is well"
    )
    pretraining.add_argument(
        "--world", type=int, metavar="RANKS", help="for --dry-run and --check: how many ranks there would be"
    )
    pretraining.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher's
    pretraining.set_defaults(action=_pretrain)

    comparison = commands.add_parser("compare", help="train with several optimizers from the same weights and data")
    compare.add_arguments(comparison, ranks=2, into="runs/compare")
    comparison.set_defaults(action=compare.main)

    sweeping = commands.add_parser("sweep", help="find the best rate of each optimizer, and compare them at these")
    sweep.add_arguments(sweeping)
    sweeping.set_defaults(action=sweep.main)

    reporting = commands.add_parser("report", help="a page, a table and figures of runs")
    reporting.add_argument("runs", nargs="+", type=Path)
    reporting.add_argument("--into", type=Path, help="where to write report.html and the rest (default: the first run)")
    reporting.add_argument("--watch", action="store_true", help="write it again while the runs go on")
    reporting.add_argument("--every", type=int, default=30, metavar="SECONDS", help="with --watch (default: 30)")
    reporting.set_defaults(action=_report, words="runs")

    model_commands.add(commands)

    estimating = commands.add_parser("estimate", help="memory on each rank, and of a checkpoint, by part and optimizer")
    estimate.add_arguments(estimating)
    estimating.set_defaults(action=estimate.main)
    for command in commands.choices.values():
        flags = [flag for action in command._actions for flag in action.option_strings if flag.startswith("--")]
        command.set_defaults(flags=sorted(flags), words=command.get_default("words") or "overrides")
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, required=True, help="settings: configs/*.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")


def _pretrain(options: argparse.Namespace) -> None:
    changes = names_of(options.resume_with)
    options.overrides += options.resume_with
    run = compare.settings(options)
    directory = options.into or Path("runs") / f"{options.config.stem}-{run.engine}-{run.optimizer.name}"
    kept = {"other_data": options.other_data, "changes": changes}
    if changes and Checkpoints(directory / "checkpoints", run).newest() is None:
        raise ValueError(f"--resume-with: {directory} has no checkpoint to go on from")
    require(*compare.modules(run))
    if options.dry_run or options.check:
        world = options.world if options.world is not None else int(os.environ.get("WORLD_SIZE", "1"))
        said = plan(run, world, directory)
        if options.dry_run:
            print(said)
        start = check_start(run, world, directory, checksums=options.dry_run, **kept)
        if options.dry_run:
            print(start)
            start.refuse_lack()
        return
    from .trainer import train

    try:
        steps = train(run, directory, options.stop_at, **kept)
        shutdown()
    except RuntimeError as error:
        reason = lost_rank(error)
        if reason is None:
            raise
        _end_alone(run, directory, reason)
    if steps == run.training.iterations and run.logs.report and int(os.environ["RANK"]) == 0:
        try:
            text, page = report.write([directory], directory)
        except (OSError, ValueError) as error:  # the run itself is done, and saved
            _log.warning("there is no report of %s: %s", directory, error)
        else:
            print(f"{text}\n\nreport: {page}")


def _end_alone(run: Run, directory: Path, reason: str) -> NoReturn:
    """End this rank, for others have died or hang."""
    newest = Checkpoints(directory / "checkpoints", run).newest()
    rest = f"goes on from the newest checkpoint, {newest.path}" if newest else "begins anew: there is no checkpoint yet"
    # What an orderly end waits for, such as the destructor of a communicator, may never come.
    faulthandler.dump_traceback_later(_ORDERLY_END, exit=True)
    print(
        f"alto_distributed pretrain: rank {os.environ['RANK']} lost contact with another rank: {reason}. That one has "
        f"died, or has not answered for training.timeout={run.training.timeout:g} seconds; what it or the launcher "
        f"said tells why. The same command {rest}",
        file=sys.stderr,
    )
    end(1)  # the interpreter's own end would now and then be a SIGABRT of the groups' threads


def _report(options: argparse.Namespace) -> None:
    runs = [Path(run) for run in options.runs]
    into = options.into or runs[0]
    if not 1 <= options.every < 2**31:
        raise ValueError(f"--every {options.every}: it must be a second at least")
    if options.watch:
        with contextlib.suppress(KeyboardInterrupt):
            report.watch(runs, into, options.every, _log.info)
        return
    text, page = report.write(runs, into)
    print(f"{text}\n\nreport: {page}")
