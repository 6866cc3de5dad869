"""``engine.offload_states()`` and ``reload_states()`` at stage 3, with ALTO's three states.

DeepSpeed moves two states there, by Adam's names, and asks for its own FusedAdam. It is shown one that was never
built, whose states are ALTO's tensors under those names. Stages 1 and 2 move whatever states there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from .. import states
from ..optimizer import ALTO
from .wrap import wrap_method

_SHOWN = "_shown_for_offloading"


def install() -> None:
    """Wrap the two methods. They pass on whatever does not concern ALTO."""
    wrap_method(DeepSpeedZeroOptimizer_Stage3, "offload_states", _move)
    wrap_method(DeepSpeedZeroOptimizer_Stage3, "reload_states", _move)


def _move(original: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    alto = wrapper.optimizer
    if not isinstance(alto, ALTO):
        return original(*args, **kwargs)
    if not hasattr(wrapper, _SHOWN):
        setattr(wrapper, _SHOWN, _as_fused_adam(alto))
    wrapper.optimizer = getattr(wrapper, _SHOWN)
    try:
        return original(*args, **kwargs)
    finally:
        wrapper.optimizer = alto
        if not wrapper.offloaded_states:
            delattr(wrapper, _SHOWN)


def _as_fused_adam(alto: ALTO) -> Any:
    """ALTO's states as those of Adam, two by two. DeepSpeed keeps its buffers beside them, not in ALTO's own state."""
    pairs: list[dict[str, Any]] = []
    for state in alto.state.values():
        pairs.append({key: state[key] for key in (states.EXP_AVG, states.EXP_AVG_SQ) if key in state})
        if states.GRAD_EMA in state:
            pairs.append({states.EXP_AVG: state[states.GRAD_EMA]})
    shown = FusedAdam.__new__(FusedAdam)
    shown.__dict__["state"] = dict(enumerate(pairs))
    return shown
