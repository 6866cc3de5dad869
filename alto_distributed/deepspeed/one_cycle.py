"""OneCycle cycles the first moment's beta of ALTO, and keeps the second's.

It writes two betas, as Adam has them: the momentum and 0.99, whatever the second one was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.runtime.lr_schedules import OneCycle

from ..hyperparameters import betas_of
from ..optimizer import ALTO
from .wrap import wrap_method


def install() -> None:
    """Wrap the method that makes up the pairs. It is passed on for whatever is not ALTO."""
    wrap_method(OneCycle, "_initialize_momentum", _initialize_momentum)


def _initialize_momentum(
    original: Callable[..., Any], scheduler: Any, optimizer: Any, *args: Any, **named: Any
) -> None:
    if not isinstance(optimizer, ALTO):
        original(optimizer, *args, **named)
        return
    given = [group["betas"] for group in optimizer.param_groups]
    own = [betas_of(group)[2] for group in optimizer.param_groups]
    original(optimizer, *args, **named)
    scheduler.min_moms = [(mom, beta3) for (mom, _), beta3 in zip(scheduler.min_moms, own, strict=True)]
    scheduler.max_moms = [(mom, beta3) for (mom, _), beta3 in zip(scheduler.max_moms, own, strict=True)]
    for group, before, beta3 in zip(optimizer.param_groups, given, own, strict=True):
        if group["betas"] is not before:  # a scheduler that goes on from a batch leaves them
            group["betas"] = (group["betas"][0], beta3)
