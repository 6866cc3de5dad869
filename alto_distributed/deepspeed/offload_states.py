"""``engine.offload_states()`` and ``reload_states()`` at stage 3, with all states of ALTO and ESGD.

DeepSpeed moves two states there, by Adam's names, and asks for its own FusedAdam. It is shown one that was never
built, whose states are ours under those names. Stages 1 and 2 move whatever states there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from .. import states
from .build import OPTIMIZERS
from .wrap import wrap_method

_SHOWN = "_shown_for_offloading"


def install() -> None:
    """Wrap the two methods. They pass on whatever does not concern our optimizers."""
    wrap_method(DeepSpeedZeroOptimizer_Stage3, "offload_states", _move)
    wrap_method(DeepSpeedZeroOptimizer_Stage3, "reload_states", _move)


def _move(original: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    own = wrapper.optimizer
    if not isinstance(own, OPTIMIZERS):
        return original(*args, **kwargs)
    if not hasattr(wrapper, _SHOWN):
        setattr(wrapper, _SHOWN, _as_fused_adam(own))
    wrapper.optimizer = getattr(wrapper, _SHOWN)
    try:
        return original(*args, **kwargs)
    finally:
        wrapper.optimizer = own
        if not wrapper.offloaded_states:
            delattr(wrapper, _SHOWN)


def _as_fused_adam(own: Any) -> Any:
    """Our states as those of Adam, two by two. DeepSpeed keeps its buffers beside them, not in our state."""
    pairs: list[dict[str, Any]] = []
    for state in own.state.values():
        kept = [value for key, value in state.items() if isinstance(value, torch.Tensor) and key != states.STEP]
        for start in range(0, len(kept), 2):
            pairs.append(dict(zip((states.EXP_AVG, states.EXP_AVG_SQ), kept[start : start + 2], strict=False)))
    shown = FusedAdam.__new__(FusedAdam)
    shown.__dict__["state"] = dict(enumerate(pairs))
    return shown
