"""configs/images/*.yaml: what is read of them, and refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .image_training import OPTIMIZERS
from .networks import RESNETS

CLASSES = {"cifar10": 10, "cifar100": 100, "imagenet": 1000}
SCHEDULES = ("quarters", "thirds", "polynomial")
_TOP = {"data", "model", "schedule", "weight_decay", "batches"}
_BATCH = {"epochs", "warmup_epochs", "lr", "alto"}


@dataclass(frozen=True)
class Settings:
    """Of one run."""

    data: str
    model: str
    schedule: str
    weight_decay: float
    batch: int
    epochs: int
    warmup_epochs: float
    optimizer: str
    lr: float
    alto: dict[str, Any]
    """alpha and betas for ALTO."""


def read_settings(path: Path, batch: int, optimizer: str) -> Settings:
    """One run out of a file.

    Raises:
        ValueError: the file has something unknown or lacks something, or has no such batch or optimizer.
    """
    import yaml

    told = yaml.safe_load(path.read_text())
    _same_keys(str(path), told, _TOP, set())
    if batch not in told["batches"]:
        raise ValueError(f"{path} has no batch {batch}: it has {', '.join(map(str, told['batches']))}")
    part = told["batches"][batch]
    _same_keys(f"{path}, batch {batch}", part, _BATCH, {"warmup_epochs"})
    for key, known in (("data", CLASSES), ("model", RESNETS), ("schedule", SCHEDULES)):
        if told[key] not in known:
            raise ValueError(f"{path}: {key}={told[key]!r} is not one of {', '.join(known)}")
    if unknown := set(part["lr"]) - set(OPTIMIZERS):
        raise ValueError(f"{path}: lr of {', '.join(sorted(unknown))}: the optimizers are {', '.join(OPTIMIZERS)}")
    if optimizer not in part["lr"]:
        raise ValueError(f"{path} has no rate of {optimizer} at batch {batch}: it has {', '.join(part['lr'])}")
    return Settings(
        data=told["data"],
        model=told["model"],
        schedule=told["schedule"],
        weight_decay=float(told["weight_decay"]),
        batch=batch,
        epochs=int(part["epochs"]),
        warmup_epochs=float(part.get("warmup_epochs", 0)),
        optimizer=optimizer,
        lr=float(part["lr"][optimizer]),
        alto=dict(part["alto"]),
    )


def _same_keys(where: str, told: Any, known: set[str], optional: set[str]) -> None:
    if not isinstance(told, dict):
        raise ValueError(f"{where} is not a mapping of settings")
    if wrong := (set(told) - known) | (known - optional - set(told)):
        raise ValueError(f"{where}: unknown or missing: {', '.join(sorted(map(str, wrong)))}")


def factor(schedule: str, epoch: float, epochs: int, warmup_epochs: float) -> float:
    """What the rate is multiplied by after so many epochs (and parts of one)."""
    if epoch < warmup_epochs:
        return epoch / warmup_epochs
    if schedule == "polynomial":
        return max(0.0, (epochs - epoch) / (epochs - warmup_epochs))
    steps = 4 if schedule == "quarters" else 3
    return float(0.1 ** math.floor(steps * epoch / epochs))
