"""What is allowed and rarely meant: said once, when an engine is built."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from deepspeed.runtime import lr_schedules

from ..eager import EagerStep
from .build import OPTIMIZERS


def warn_of_other_peak(engine: Any) -> None:
    """A default rate of a scheduler's own replaces the optimizer's ``lr`` unless the JSON names that rate.

    WarmupDecayLR has such a peak, LRRangeTest a lowest rate, and older releases of WarmupLR a peak.
    """
    if engine.client_lr_scheduler is not None:
        return
    scheduler = getattr(lr_schedules, str(engine.scheduler_name()), None)
    if not isinstance(scheduler, type):
        return
    given = engine.scheduler_params() or {}
    rates = sorted({float(group["lr"]) for group in engine.basic_optimizer.param_groups})
    for name, parameter in inspect.signature(scheduler).parameters.items():
        own = parameter.default
        if name.endswith("_lr") and name not in given and isinstance(own, float) and own > 0 and rates != [own]:
            warnings.warn(
                f"the scheduler {engine.scheduler_name()} takes its default {name} of {own:g}, and the optimizer's lr "
                f"of {', '.join(f'{rate:g}' for rate in rates)} is not used. Write "
                f'"{name}": {rates[-1]:g} among the params of the scheduler',
                stacklevel=2,
            )


def warn_of_dropped(engine: Any) -> None:
    """An optimizer of ours was built for this model, and the engine trains with another one.

    Hugging Face's Trainer does not hand over what ``optimizers=`` gave it.
    """
    parameters = set(engine.module.parameters())

    def is_dropped(optimizer: torch.optim.Optimizer) -> bool:
        if not isinstance(optimizer, OPTIMIZERS) or optimizer is engine.basic_optimizer or optimizer.state:
            return False
        return any(p in parameters for group in optimizer.param_groups for p in group["params"])

    dropped = next(filter(is_dropped, list(EagerStep.alive)), None)
    if dropped is not None:
        warnings.warn(
            f"{_name(dropped)} was built for this model and never reached DeepSpeed, which trains with "
            f'{_name(engine.basic_optimizer)}. Name it in the DeepSpeed config ("optimizer": {{"type": "ALTO", ...}}), '
            "or give it to deepspeed.initialize. Trainer(optimizers=...) has no effect under DeepSpeed",
            stacklevel=2,
        )


def _name(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__name__
