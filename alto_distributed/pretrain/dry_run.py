"""What a run would be like, from its settings and its data: batches, memory, epochs and disk. Nothing is started."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from ..kernels import check_kernel
from .batch_size import samples_before
from .checkpoint.manager import Checkpoints
from .config.settings import Run
from .data import files
from .data.samples import Samples
from .engines.base import check
from .memory import usage as memory
from .memory.footprint import checkpoint
from .memory.shapes import of_model
from .optimizers import ALTO_NAMES, describe


def plan(run: Run, world: int, directory: Path) -> str:
    """What a run would be like on ``world`` ranks: batch arithmetic and memory.

    Raises:
        ValueError: the batch does not divide over the ranks, or the ranks not over the model.
    """
    model_parallel, data_parallel = run.model_parallel, run.data_parallel(world)
    t, m = run.training, run.model
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
            f"{t.global_batch} samples, {t.global_batch * m.sequence:,} tokens a step, {t.iterations} steps"
            + (
                f"; {t.batch_ramp.start} at first, {t.batch_ramp.step} more every {t.batch_ramp.every} steps"
                if t.batch_ramp.start
                else ""
            ),
            f"memory      about {_gib(need.total + activations)} a rank: {parts}{offloaded}",
        ]
    )


@dataclass(frozen=True)
class Start:
    """What a run begins with."""

    lines: tuple[str, ...]
    lacks: tuple[str, ...]
    """What this machine has too little of."""

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def refuse_lack(self) -> None:
        """Raise an OSError if this machine has too little of something."""
        if self.lacks:
            raise OSError(
                f"this machine has not enough {' and '.join(self.lacks)} for the run; the plan above says why"
            )


def check_start(
    run: Run,
    world: int,
    directory: Path,
    *,
    checksums: bool = True,
    other_data: bool = False,
    changes: Sequence[str] = (),
) -> Start:
    """What a run checks before its first step, as far as one process can: the engine's settings, the data, and the
    checkpoint that it would go on from.

    Args:
        run: its settings.
        world: how many ranks it would have.
        directory: of the run.
        checksums: compare those of the data, unless the run does not.
        other_data: as for a run.
        changes: as for a run.

    Returns:
        Lines about the checkpoint, the data, the device and the disk.

    Raises:
        ValueError: the run would be refused, for the same reason.
    """
    data_parallel = run.data_parallel(world)
    check(run, data_parallel)
    if run.optimizer.name in ALTO_NAMES:
        check_kernel(run.optimizer.resolved["kernel"])  # builds the native one, if it is named
    t, m, where = run.training, run.model, run.data.directory
    if checksums and run.data.verify:
        files.verify(where, *files.SPLITS)
    train, valid = (Samples(where, split, m.sequence, m.vocabulary, t.seed) for split in ("train", "valid"))
    valid.validation(run.evaluation.samples, t.micro_batch, 0, data_parallel)
    total = samples_before(t, t.iterations)
    lines = [
        *_resumed(
            Checkpoints(
                directory / "checkpoints", run, files.fingerprint(where), other_data=other_data, changes=changes
            )
        ),
        f"data        {where}: {train.windows * m.sequence:,} tokens for training; the run takes "
        f"{total * m.sequence:,}, {total / train.windows:.3g} epochs",
    ]
    try:
        test = Samples(where, "test", m.sequence, m.vocabulary, t.seed)
        test.validation(run.evaluation.samples, t.micro_batch, 0, data_parallel)
    except ValueError as error:
        lines.append(f"            no test at the end: {error}")
    (device, fits), (disk, has_room) = _device(run, world), _disk(run, world, directory)
    lacks = (*([] if fits else ["memory"]), *([] if has_room else ["disk"]))
    return Start((*lines, device, disk), lacks)


def _resumed(kept: Checkpoints) -> list[str]:
    """A line about the newest checkpoint, if there is one. Its files are looked at by size."""
    newest = kept.newest()
    if newest is None:
        return []
    if damage := kept.damage(newest, sizes_only=True):
        raise ValueError(f"{newest.path} is damaged: {'; '.join(damage)}")
    changed = "".join(f"; {change}" for change in kept.check(newest))
    return [f"goes on     from {newest.path}{changed}"]


def _device(run: Run, world: int) -> tuple[str, bool]:
    """The estimate against the memory of this machine's device, and whether it fits.

    What is offloaded cannot be told from what is not, so then it does.
    """
    need, activations = memory.estimate(run, world)
    if torch.cuda.is_available():
        has, what, ranks = torch.cuda.get_device_properties(0).total_memory, torch.cuda.get_device_name(0), 1
    else:
        has, what, ranks = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "main memory", world
    wanted = ranks * (need.total + activations)
    of_all = f" for {ranks} ranks here" if ranks > 1 else ""
    fits = wanted <= has
    verdict = "enough" if fits else "NOT ENOUGH: lower training.micro_batch, set training.recompute, or add ranks"
    return f"device      {what} {_gib(has)}, needed {_gib(wanted)}{of_all}: {verdict}", fits or memory.offloads(run)


def _disk(run: Run, world: int, directory: Path) -> tuple[str, bool]:
    """The checkpoints that stay and the one being written, against the space there is, and whether they fit."""
    one = checkpoint(memory.setting_of(run, world), of_model(run.model))
    count = run.checkpoints.keep + 1
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    has_room = count * one <= free
    verdict = "enough" if has_room else "NOT ENOUGH: lower checkpoints.keep, or give another --into"
    at_most = f"at most {count} at a time {_gib(count * one)}"
    return f"disk        a checkpoint {_gib(one)}, {at_most}, free {_gib(free)}: {verdict}", has_room


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"
