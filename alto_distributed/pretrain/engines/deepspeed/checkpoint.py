"""Checkpoints of a pretraining run under DeepSpeed: saved, and continued at the same or another number of ranks."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.checkpoint import ds_to_universal

from ....deepspeed import universal
from ....deepspeed.data_classes import CLASSES
from ....errors import one_line
from ....safe_load import only_data
from ....sharding.rank_sync import run_on_rank0
from ... import optimizers
from ...checkpoint import manifest
from ...checkpoint.io import Written, describe, failing_late, replaced
from ...checkpoint.safe_load import refuse_code
from ...config.parsing import parse_json
from ...config.settings import Run
from ...integrity import checksum

TAG, _UNIVERSAL, _ABOUT, _SOURCE = "saved", "universal", "saved_by.json", "converted_from.json"


def save(engine: Any, run: Run, directory: Path) -> dict[Path, Written]:
    """Write a checkpoint of DeepSpeed's, and beside it what it was written by. Called by all ranks.

    Returns:
        This rank's files.

    Raises:
        OSError: on the ranks that could not write, when all are through.
    """
    files = engine.checkpoint_engine
    original = files.save
    written: dict[Path, Written] = {}

    def save_and_note(state_dict: Any, path: str) -> None:
        original(state_dict, path)
        written[Path(path)] = Written(dist.get_rank(), describe(state_dict))

    with (
        replaced(files, "save", save_and_note),
        failing_late((files, "save"), (files, "makedirs"), (engine, "_copy_recovery_script")) as attempt,
    ):
        engine.save_checkpoint(str(directory), tag=TAG, save_latest=False)
        if dist.get_rank() == 0:
            attempt(lambda: _write_about(engine, run, directory))
        dist.barrier()
    return written


def _write_about(engine: Any, run: Run, directory: Path) -> None:
    (directory / "latest").write_text(TAG)  # for zero_to_fp32.py, which DeepSpeed puts there
    # Last, and in one piece: a checkpoint without it was not finished.
    part = directory / f"{_ABOUT}.part"
    part.write_text(json.dumps(_about(engine, run), indent=2) + "\n")
    os.replace(part, directory / _ABOUT)


def load(engine: Any, run: Run, directory: Path, saved_by: int) -> None:
    """Continue from what :func:`save` wrote. Called by all ranks.

    Hyperparameters and clipping stay those of the run: DeepSpeed would take those of the checkpoint.

    Raises:
        ValueError: on all ranks, if the checkpoint is not one that this run can continue from.
    """
    now = _about(engine, run)
    run_on_rank0(lambda: _refuse_others(directory, now))
    refuse_code(directory, (directory / TAG).glob("*.pt"), CLASSES)
    names = optimizers.arguments(run)
    own = [{key: group[key] for key in group if key in names} for group in engine.basic_optimizer.param_groups]
    tag = TAG
    if saved_by != dist.get_world_size() and now["zero_stage"] > 0:
        with only_data(CLASSES):
            run_on_rank0(lambda: _convert(directory, run))
        tag = _UNIVERSAL
    engine._config.load_universal_checkpoint = tag == _UNIVERSAL
    try:
        with only_data(CLASSES):
            loaded, _ = engine.load_checkpoint(str(directory), tag=tag)
    finally:
        engine._config.load_universal_checkpoint = False
    if loaded is None:
        raise ValueError(f"DeepSpeed could not load {directory / tag}; what it says about that is in its log")
    for group, ours in zip(engine.basic_optimizer.param_groups, own, strict=True):
        group.update(ours)
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = run.training.clip
    for state in engine.basic_optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            # In stage 3 one tensor may have been given to all, and would count once for each of them.
            state["step"] = state["step"].clone()


def _about(engine: Any, run: Run) -> dict[str, Any]:
    return {
        "zero_stage": int(engine.zero_optimization_stage()) if engine.zero_optimization() else 0,
        "precision": run.training.precision,
        "wrapper": type(engine.optimizer).__name__,
        "optimizer": run.optimizer.name,
    }


_ADVICE = {
    "zero_stage": "name the same stage's JSON in deepspeed.config",
    "precision": "set training.precision as it was",
    "wrapper": "use the DeepSpeed JSON that it was saved with (data_types or offload have changed)",
    "optimizer": "name the same optimizer, or start a new run",
}


def _refuse_others(directory: Path, now: dict[str, Any]) -> None:
    """Raise for a checkpoint that this run cannot continue from."""
    path = directory / _ABOUT
    if not path.is_file():
        raise ValueError(
            f"{directory} holds no finished checkpoint of the DeepSpeed engine: there is no {_ABOUT} in it"
        )
    saved = parse_json(path.read_bytes(), str(path))
    if not isinstance(saved, dict):
        raise ValueError(f"{path} does not say what saved the checkpoint")
    for key, advice in _ADVICE.items():
        if saved.get(key) != now[key]:
            raise ValueError(
                f"{directory} was saved with {key} {saved.get(key)}, and this run has {now[key]}; {advice}"
            )


def _convert(directory: Path, run: Run) -> None:
    """Write the universal form of a checkpoint beside it, unless it is there from an earlier start, and whole."""
    target, name = directory / _UNIVERSAL, run.optimizer.name
    listed = directory / manifest.NAME  # not there where an engine saves by itself
    source = {"manifest": checksum(listed) if listed.is_file() else ""}
    if target.is_dir() and _is_whole(target, source):
        return
    if name not in (*optimizers.ALTO_NAMES, "adam", "adamw"):
        raise ValueError(
            f"{directory} was saved by another number of ranks, and DeepSpeed's universal checkpoints, which it would "
            f"take to load it, do not hold the states of {name}; go on with as many ranks as before"
        )
    part = directory / f"{_UNIVERSAL}.part"
    shutil.rmtree(part, ignore_errors=True)
    convert = universal.convert if name in optimizers.ALTO_NAMES else _convert_adam
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            convert(directory / TAG, part)
    except (OSError, ValueError):
        raise
    except Exception as error:  # of DeepSpeed's converter, or of torch.load
        raise ValueError(
            f"{directory} could not be converted for another number of ranks: {one_line(error)}"
        ) from error
    (part / _SOURCE).write_text(json.dumps(source))
    names = [str(path.relative_to(part)) for path in part.rglob("*") if path.is_file()]
    files = {name: manifest.entry_of(part / name, 0, {}) for name in names}
    manifest.write(part, manifest.Manifest(0, 1, manifest.versions(), files))
    shutil.rmtree(target, ignore_errors=True)
    os.replace(part, target)
    (directory / "latest_universal").write_text(_UNIVERSAL)


def _is_whole(target: Path, source: dict[str, str]) -> bool:
    """Whether a conversion is as it was written, and of this checkpoint. If not, it is made again from the checkpoint.

    Another checkpoint may have been copied over the one that it was made from.
    """
    try:
        listed = manifest.read(target)
        damaged = manifest.problems(target, listed, listed.files)
        return _SOURCE in listed.files and not damaged and json.loads((target / _SOURCE).read_text()) == source
    except (ValueError, OSError):
        return False


def _convert_adam(source: Path, target: Path) -> None:
    """DeepSpeed's own conversion, which knows Adam's two states."""
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(source),
            output_folder=str(target),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )
