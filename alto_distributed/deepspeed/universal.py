"""Convert a DeepSpeed checkpoint to the universal format, with all of ALTO's states.

    python -m alto_distributed.deepspeed.universal INPUT OUTPUT

DeepSpeed's converter (``deepspeed.checkpoint.ds_to_universal``) carries the weights and two states named
``exp_avg`` and ``exp_avg_sq``, and drops any other without a word. It is run twice here: on the checkpoint as it
is, and on a copy in which grad_ema bears the name of ``exp_avg``, so that grad_ema goes wherever exp_avg goes,
however the run was sharded. ESGD has two states, which bear both names in a copy (:mod:`.universal_esgd`). No code
of DeepSpeed is changed for it; a converter that carries every state by itself would write the same files.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.constants import (
    FP32_FLAT_GROUPS,
    GROUP_PADDINGS,
    OPTIMIZER_STATE_DICT,
    PARAM,
    PARAM_GROUPS,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)

from .. import states
from ..errors import one_line
from ..safe_load import only_data
from . import universal_esgd
from .convertible import MOMENTS, base_optimizer, check, load, optimizer_files, refuse_code
from .data_classes import CLASSES

#: Under which a file has master weights: of stages 1, 2 and BF16_Optimizer, and of stage 3.
_WEIGHTS = (SINGLE_PARTITION_OF_FP32_GROUPS, FP32_FLAT_GROUPS)


def convert(
    source: str | Path,
    target: str | Path,
    *,
    adopt: bool = False,
    extract_workers: int = 1,
    merge_workers: int = 1,
    allowed: Sequence[Any] = (),
) -> None:
    """Convert the checkpoint in ``source`` (the folder of one tag) to a universal one in ``target``.

    Args:
        source: what ``engine.save_checkpoint`` wrote, with the tag.
        target: a folder that does not exist yet. ``latest_universal`` beside it will name it.
        adopt: take over a checkpoint of LAMB or Adam, or of SGD for ESGD: weights, moments and step count are kept,
            grad_ema starts from zero, and the hyperparameters will be those of the run that loads it.
        extract_workers: processes that read the shards.
        merge_workers: processes that put parameters together; each needs the memory of a whole parameter.
        allowed: classes and functions that the checkpoint may use besides those of DeepSpeed's own checkpoints. A
            pickle can call them with any arguments.

    Raises:
        ValueError: the checkpoint lacks a state, holds more than data, or cannot be converted.
    """
    source, target = Path(source).absolute(), Path(target).absolute()
    with only_data((*CLASSES, *allowed)), _explained(source):
        refuse_code(source)
        has_average = check(source, target, adopt)
        with _removed_on_failure(target):
            _convert(source, target, has_average, adopt, extract_workers, merge_workers)


@contextlib.contextmanager
def _explained(source: Path) -> Iterator[None]:
    """Files that are not as DeepSpeed writes them end in whatever their reader stumbles over."""
    try:
        yield
    except (OSError, ImportError):
        raise
    except Exception as error:
        if type(error) is ValueError:
            raise
        raise ValueError(
            f"{source} cannot be converted ({one_line(error)}): a file of it is damaged, or was not written by "
            "engine.save_checkpoint"
        ) from error


@contextlib.contextmanager
def _removed_on_failure(target: Path) -> Iterator[None]:
    """A conversion that fails leaves nothing: what is half-filled would refuse the next try, and "latest" name it."""
    latest = target.parent / "latest_universal"
    before = latest.read_bytes() if latest.is_file() else None
    try:
        yield
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        with contextlib.suppress(OSError):  # what is told is the failure, not that of tidying up after it
            if before is None:
                latest.unlink(missing_ok=True)
            elif latest.read_bytes() != before:
                latest.write_bytes(before)
        raise


def _convert(
    source: Path, target: Path, has_average: bool, adopt: bool, extract_workers: int, merge_workers: int
) -> None:
    target.mkdir(parents=True, exist_ok=True)

    def run(from_folder: Path, to_folder: Path) -> None:
        ds_to_universal.main(
            argparse.Namespace(
                input_folder=str(from_folder),
                output_folder=str(to_folder),
                num_extract_workers=extract_workers,
                num_merge_workers=merge_workers,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,  # metadata that only some model codes write
            )
        )

    scratch = target / "renamed_tmp"
    if universal_esgd.is_of_sgd(base_optimizer(load(optimizer_files(source)[0]))):
        _write_changed(source, scratch, _show_esgd)
        run(scratch, target)
        shutil.rmtree(scratch)
        universal_esgd.name_files(target / "zero")
        if adopt:
            _empty_groups(target / "zero")
        return
    # The third state first: a conversion that breaks off then leaves no "latest_universal" behind.
    if has_average:
        _write_changed(source, scratch / "renamed", _show_average)
        run(scratch / "renamed", scratch / "universal")
        for converted in (scratch / "universal" / "zero").rglob(f"{states.EXP_AVG}.pt"):
            folder = target / "zero" / converted.parent.relative_to(scratch / "universal" / "zero")
            folder.mkdir(parents=True, exist_ok=True)
            os.replace(converted, folder / f"{states.GRAD_EMA}.pt")
        shutil.rmtree(scratch)
    run(source, target)
    if adopt:
        _write_averages(target / "zero")
        _empty_groups(target / "zero")
    if has_average or adopt:
        _check_complete(target / "zero")


def _write_changed(source: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The checkpoint with its optimizer files changed; other files are links."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and path not in optimizer_files(source):
            (folder / path.name).symlink_to(path)
    for path in optimizer_files(source):
        saved = load(path)
        change(saved)
        torch.save(saved, folder / path.name)


def _show_average(saved: dict[str, Any]) -> None:
    """grad_ema in the place of both moments and of the weights.

    A group in which alpha is 0 may have no grad_ema; it gets zeros, which loading leaves out again.
    """
    flats = []
    for index, state in sorted(base_optimizer(saved)["state"].items()):
        average = state[states.GRAD_EMA] if states.GRAD_EMA in state else torch.zeros_like(state[states.EXP_AVG])
        base_optimizer(saved)["state"][index] = {
            **dict.fromkeys(MOMENTS, average),
            states.STEP: state[states.STEP],
        }
        flats.append(average)
    for weights in _WEIGHTS:
        if weights in saved[OPTIMIZER_STATE_DICT]:
            saved[OPTIMIZER_STATE_DICT][weights] = flats


def _show_esgd(saved: dict[str, Any]) -> None:
    zero = saved[OPTIMIZER_STATE_DICT]
    flats = next(zero[key] for key in _WEIGHTS if key in zero)
    paddings = zero.get(GROUP_PADDINGS, [0] * len(flats))  # which states have and saved weights have not
    universal_esgd.show(
        base_optimizer(saved), [flat.numel() + padding for flat, padding in zip(flats, paddings, strict=True)]
    )


def _write_averages(zero: Path) -> None:
    """grad_ema from zero."""
    for path in sorted(zero.rglob(f"{states.EXP_AVG}.pt")):
        moment = load(path)
        average: Any
        if isinstance(moment, dict):
            average = {**moment, PARAM: torch.zeros_like(moment[PARAM])}
        else:
            average = torch.zeros_like(moment)
        torch.save(average, path.with_name(f"{states.GRAD_EMA}.pt"))


def _empty_groups(zero: Path) -> None:
    """Groups without hyperparameters, so that the loading run keeps its own."""
    path = zero / "optimizer_state.pt"
    saved = load(path)
    # DeepSpeed walks saved groups and those of the run side by side, and forgets the longer list's rest. No run has
    # more groups than parameters.
    saved[PARAM_GROUPS] = [{"params": []} for _ in zero.rglob(f"{states.GRAD_EMA}.pt")]
    if OPTIMIZER_STATE_DICT in saved:
        saved[OPTIMIZER_STATE_DICT][PARAM_GROUPS] = saved[PARAM_GROUPS]
    torch.save(saved, path)


def _check_complete(zero: Path) -> None:
    for path in zero.rglob(f"{states.EXP_AVG}.pt"):
        if not path.with_name(f"{states.GRAD_EMA}.pt").is_file():
            raise ValueError(
                f"DeepSpeed's converter wrote {path} and nothing for grad_ema; this version of it is not supported"
            )


def _named(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--allow {name}: there is no such class or function here ({error})") from None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m alto_distributed.deepspeed.universal",
        description="Convert a DeepSpeed checkpoint of ALTO to the universal format, which loads at any world size "
        'with "checkpoint": {"load_universal": true} in the config.',
    )
    parser.add_argument("input", metavar="INPUT", help="the saved checkpoint, with its tag: SAVED/global_step100")
    parser.add_argument(
        "output", metavar="OUTPUT", help="a new folder, usually beside it: SAVED/global_step100_universal"
    )
    parser.add_argument(
        "--adopt",
        action="store_true",
        help="take over a checkpoint of LAMB, Adam or SGD: weights, moments and step count stay, grad_ema is zero",
    )
    parser.add_argument(
        "--allow",
        nargs="+",
        default=[],
        metavar="MODULE.NAME",
        help="classes and functions that the checkpoint may use besides DeepSpeed's own, as the refusal names them",
    )
    parser.add_argument("--num_extract_workers", type=int, default=4, help="processes that read shards")
    parser.add_argument("--num_merge_workers", type=int, default=2, help="processes that put parameters together")
    options = parser.parse_args(arguments)
    try:
        convert(
            options.input,
            options.output,
            adopt=options.adopt,
            extract_workers=options.num_extract_workers,
            merge_workers=options.num_merge_workers,
            allowed=[_named(name) for name in options.allow],
        )
    except (ValueError, OSError) as problem:
        parser.exit(2, f"{parser.prog}: {problem}\n")


if __name__ == "__main__":
    main()
