"""Checkpoints of a run: ``RUN/checkpoints/step-00000500``, whole or not there.

A checkpoint is written beside, under a name that no reader looks for, and gets its own by a rename when every
rank has finished.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .config import Run
from .engine import Engine

#: What a resumed run may change; anything else would make it another run.
_FREE = (
    *("logs", "evaluation", "checkpoints", "deepspeed", "megatron", "data.directory"),
    *("training.micro_batch", "training.recompute"),
)

_ABOUT = "run.json"


@dataclass(frozen=True)
class Checkpoint:
    step: int
    """Optimizer steps done."""
    path: Path


class Checkpoints:
    """Those of one run.

    Args:
        directory: where they are; made on the first save.
        run: the run's settings.
    """

    def __init__(self, directory: Path, run: Run) -> None:
        self.directory = directory
        self.run = run

    def all(self) -> list[Checkpoint]:
        """The whole ones, oldest first."""
        found = []
        for path in self.directory.glob("step-*"):
            name = re.fullmatch(r"step-(\d+)", path.name)
            if name and (path / _ABOUT).is_file():
                found.append(Checkpoint(int(name.group(1)), path))
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def newest(self) -> Checkpoint | None:
        return max(self.all(), key=lambda checkpoint: checkpoint.step, default=None)

    def save(self, engine: Engine, step: int) -> Path:
        """Write one, and delete the oldest beyond ``checkpoints.keep``. Called by all ranks."""
        final = self.directory / f"step-{step:08d}"
        beside = self.directory / f".{final.name}.partial"
        if dist.get_rank() == 0:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
        dist.barrier()
        engine.save(beside)
        dist.barrier()
        if dist.get_rank() == 0:
            about = {"step": step, "world_size": dist.get_world_size(), "settings": self.run.as_dict()}
            (beside / _ABOUT).write_text(json.dumps(about, indent=1))
            shutil.rmtree(final, ignore_errors=True)
            beside.rename(final)
            for old in self.all()[: -self.run.checkpoints.keep]:
                shutil.rmtree(old.path)
        dist.barrier()
        return final

    def load(self, engine: Engine, checkpoint: Checkpoint) -> None:
        """Continue from one. Called by all ranks.

        Raises:
            ValueError: it belongs to a run with other settings.
        """
        about = json.loads((checkpoint.path / _ABOUT).read_text())
        changed = list(differences(about["settings"], self.run.as_dict()))
        if changed:
            raise ValueError(
                f"{checkpoint.path} was written by a run with other settings: {'; '.join(changed)}. Go on with those, "
                "or start in another directory (--into)"
            )
        engine.load(checkpoint.path)


def differences(saved: Mapping[str, Any], here: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """ "training.seed was 1, is 2" for everything that a resumed run must not change."""
    for key in sorted({*saved, *here}):
        name = f"{where}{key}"
        before, now = saved.get(key), here.get(key)
        if name in _FREE or before == now:
            continue
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            yield from differences(before, now, f"{name}.")
        else:
            yield f"{name} was {before!r}, is {now!r}"
