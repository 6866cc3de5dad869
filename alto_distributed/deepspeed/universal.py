"""Convert a DeepSpeed checkpoint to the universal format, with all of ALTO's states.

    python -m alto_distributed.deepspeed.universal INPUT OUTPUT

DeepSpeed's converter (``deepspeed.checkpoint.ds_to_universal``) carries the weights and two states named
``exp_avg`` and ``exp_avg_sq``, and drops any other without a word. It is run twice here: on the checkpoint as it
is, and on a copy in which grad_ema bears the name of ``exp_avg``, so that grad_ema goes wherever exp_avg goes,
however the run was sharded. No code of DeepSpeed is changed for it; a converter that carries every state by
itself would write the same files.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    FP32_FLAT_GROUPS,
    OPTIMIZER_STATE_DICT,
    PARAM,
    PARAM_GROUPS,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)

from .. import states
from ..safe_load import more_than_data, only_data
from .data_classes import CLASSES

_MOMENTS = (states.EXP_AVG, states.EXP_AVG_SQ)


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
        adopt: take over a checkpoint of LAMB or Adam: weights, moments and step count are kept, grad_ema starts from
            zero, and the hyperparameters will be those of the run that loads it.
        extract_workers: processes that read the shards.
        merge_workers: processes that put parameters together; each needs the memory of a whole parameter.
        allowed: classes and functions that the checkpoint may use besides those of DeepSpeed's own checkpoints. A
            pickle can call them with any arguments.

    Raises:
        ValueError: the checkpoint lacks a state, holds more than data, or cannot be converted.
    """
    source, target = Path(source).absolute(), Path(target).absolute()
    with only_data((*CLASSES, *allowed)):
        _refuse_code(source)
        has_average = _check(source, target, adopt)
        with _removed_on_failure(target):
            _convert(source, target, has_average, adopt, extract_workers, merge_workers)


@contextlib.contextmanager
def _removed_on_failure(target: Path) -> Iterator[None]:
    """A conversion that fails leaves nothing: what is half-filled would refuse the next try, and "latest" name it."""
    latest = target.parent / "latest_universal"
    before = latest.read_bytes() if latest.is_file() else None
    try:
        yield
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        if before is not None:
            latest.write_bytes(before)
        else:
            latest.unlink(missing_ok=True)
        raise


def _refuse_code(source: Path) -> None:
    problems = [problem for path in sorted(source.glob("*.pt")) if (problem := more_than_data(path))]
    if problems:
        raise ValueError(
            f"{source} was not converted, for it holds more than data: {'; '.join(problems)}. Loading it would run "
            "code that it names. If you trust where it came from, name each of these after --allow"
        )


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

    # The third state first: a conversion that breaks off then leaves no "latest_universal" behind.
    if has_average:
        scratch = target / "grad_ema_tmp"
        _write_renamed(source, scratch / "renamed")
        run(scratch / "renamed", scratch / "universal")
        for converted in (scratch / "universal" / "zero").rglob(f"{states.EXP_AVG}.pt"):
            folder = target / "zero" / converted.parent.relative_to(scratch / "universal" / "zero")
            folder.mkdir(parents=True, exist_ok=True)
            os.replace(converted, folder / f"{states.GRAD_EMA}.pt")
        shutil.rmtree(scratch)
    run(source, target)
    if adopt:
        _adopt(target / "zero")
    if has_average or adopt:
        _check_complete(target / "zero")


def _optimizer_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*_optim_states.pt"))


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _base_optimizer(saved: Mapping[str, Any]) -> Any:
    """The inner optimizer's state_dict in a file of stage 1, 2 or BF16_Optimizer, or of stage 3."""
    zero = saved[OPTIMIZER_STATE_DICT]
    return zero[BASE_OPTIMIZER_STATE] if BASE_OPTIMIZER_STATE in zero else zero[OPTIMIZER_STATE_DICT]


def _check(source: Path, target: Path, adopt: bool) -> bool:
    """Whether the checkpoint has grad_ema; or a ValueError if it cannot be converted as asked."""
    files = _optimizer_files(source)
    if not files:
        raise ValueError(
            f"there are no *_optim_states.pt in {source}. Give the folder of one tag, such as SAVED/global_step100. (A "
            "checkpoint of ZeRO stage 0 has none, and needs no conversion: it loads at any world size.)"
        )
    if target.exists() and any(target.iterdir()):
        raise ValueError(
            f"{target} is not empty, and what is in it would mix with the new checkpoint; give a new folder"
        )
    if any(source.glob("*expert_*_model_states.pt")):
        raise ValueError(
            f"{source} has a mixture of experts, which DeepSpeed's universal format does not carry, with any "
            "optimizer. Load it at the world size that saved it"
        )
    _refuse_round_robin(source)
    base = _base_optimizer(_load(files[0]))
    if not isinstance(base, dict):
        raise ValueError('an elastic checkpoint cannot be converted; save with "elastic_checkpoint": false')
    for state in base["state"].values():
        missing = [key for key in (*_MOMENTS, states.STEP) if key not in state]
        if missing:
            raise ValueError(
                f"the optimizer states in {source} have no {', '.join(map(repr, missing))}: only checkpoints of ALTO "
                "and EAdamW can be converted, and with --adopt those of LAMB and Adam"
            )
    found = any(states.GRAD_EMA in state for state in base["state"].values())
    if adopt and found:
        raise ValueError(f"{source} has grad_ema already: convert it without --adopt, which would set it to zero")
    if not adopt:
        _check_saved_by_alto(source, base)
    return found


def _check_saved_by_alto(source: Path, base: Mapping[str, Any]) -> None:
    for group in base[PARAM_GROUPS]:
        lacking = any(states.GRAD_EMA not in base["state"].get(i, {}) for i in group["params"])
        if "alpha" not in group or (group["alpha"] != 0 and lacking):
            raise ValueError(
                f"{source} has no 'grad_ema' and was not saved by ALTO. To take over its weights, moments and step "
                "count, with grad_ema from zero and the hyperparameters of the run that loads it, give --adopt"
            )


def _refuse_round_robin(source: Path) -> None:
    """DeepSpeed notes down the wrong places of pieces then, for every optimizer."""
    for path in sorted(source.glob("mp_rank_*_model_states.pt"))[:1]:
        zero = _load(path).get("ds_config", {}).get("zero_optimization", {})
        if zero.get("round_robin_gradients", False):
            raise ValueError(
                "a checkpoint saved under round_robin_gradients cannot be converted: DeepSpeed notes down the wrong "
                'places of its pieces. Load it at the world size that saved it, with "round_robin_gradients": true, '
                "and go on from there; another world size needs a run without it"
            )


def _write_renamed(source: Path, folder: Path) -> None:
    """The checkpoint with grad_ema in the place of both moments and of the weights; other files are links.

    A group in which alpha is 0 may have no grad_ema; it gets zeros, which loading leaves out again.
    """
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and path not in _optimizer_files(source):
            (folder / path.name).symlink_to(path)
    for path in _optimizer_files(source):
        saved = _load(path)
        flats = []
        for index, state in sorted(_base_optimizer(saved)["state"].items()):
            average = state[states.GRAD_EMA] if states.GRAD_EMA in state else torch.zeros_like(state[states.EXP_AVG])
            _base_optimizer(saved)["state"][index] = {
                **dict.fromkeys(_MOMENTS, average),
                states.STEP: state[states.STEP],
            }
            flats.append(average)
        for weights in (SINGLE_PARTITION_OF_FP32_GROUPS, FP32_FLAT_GROUPS):
            if weights in saved[OPTIMIZER_STATE_DICT]:
                saved[OPTIMIZER_STATE_DICT][weights] = flats
        torch.save(saved, folder / path.name)


def _adopt(zero: Path) -> None:
    """grad_ema from zero, and groups without hyperparameters, so that the loading run keeps its own."""
    moments = sorted(zero.rglob(f"{states.EXP_AVG}.pt"))
    for path in moments:
        moment = _load(path)
        average: Any
        if isinstance(moment, dict):
            average = {**moment, PARAM: torch.zeros_like(moment[PARAM])}
        else:
            average = torch.zeros_like(moment)
        torch.save(average, path.with_name(f"{states.GRAD_EMA}.pt"))
    path = zero / "optimizer_state.pt"
    saved = _load(path)
    # DeepSpeed walks saved groups and those of the run side by side, and forgets the longer list's rest. No run has
    # more groups than parameters.
    saved[PARAM_GROUPS] = [{"params": []} for _ in moments]
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
        help="take over a checkpoint of LAMB or Adam: weights, moments and step count stay, grad_ema starts from zero",
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
    except ValueError as problem:
        parser.exit(2, f"{parser.prog}: {problem}\n")


if __name__ == "__main__":
    main()
