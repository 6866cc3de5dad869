"""What is allowed and rarely meant: said once, when an engine is built."""

from __future__ import annotations

import gc
import inspect
import warnings
from typing import Any

import torch
from deepspeed.runtime import lr_schedules

from .build import OPTIMIZERS


def warn_of_other_peak(engine: Any) -> None:
    """WarmupDecayLR has a peak of its own, which replaces the optimizer's ``lr`` unless the JSON names it."""
    if engine.client_lr_scheduler is not None:
        return
    scheduler = getattr(lr_schedules, str(engine.scheduler_name()), None)
    if not isinstance(scheduler, type) or "warmup_max_lr" in (engine.scheduler_params() or {}):
        return
    peak = inspect.signature(scheduler).parameters.get("warmup_max_lr")
    rates = sorted({float(group["lr"]) for group in engine.basic_optimizer.param_groups})
    if peak is not None and isinstance(peak.default, float) and rates != [peak.default]:
        warnings.warn(
            f"the scheduler {engine.scheduler_name()} warms up to its default of {peak.default:g}, and the optimizer's "
            f"lr of {', '.join(f'{rate:g}' for rate in rates)} is not used. Write "
            f'"warmup_max_lr": {rates[-1]:g} among the params of the scheduler',
            stacklevel=2,
        )


def warn_of_dropped(engine: Any) -> None:
    """An optimizer of ours was built for this model, and the engine trains with another one.

    Hugging Face's Trainer does not hand over what ``optimizers=`` gave it.
    """
    parameters = set(engine.module.parameters())

    def is_dropped(thing: Any) -> bool:
        if not issubclass(type(thing), OPTIMIZERS) or thing is engine.basic_optimizer or thing.state:
            return False
        return any(p in parameters for group in thing.param_groups for p in group["params"])

    dropped = next(filter(is_dropped, gc.get_objects()), None)
    if dropped is not None:
        warnings.warn(
            f"{_name(dropped)} was built for this model and never reached DeepSpeed, which trains with "
            f'{_name(engine.basic_optimizer)}. Name it in the DeepSpeed config ("optimizer": {{"type": "ALTO", ...}}), '
            "or give it to deepspeed.initialize. Trainer(optimizers=...) has no effect under DeepSpeed",
            stacklevel=2,
        )


def _name(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__name__
