"""``"bf16_master_weights_and_grads": true``: master weights in bfloat16, rounded stochastically.

DeepSpeed asks for its own CPU Adam then, under offload. ALTO keeps float32 states beside bfloat16 weights anywhere, so
it is not asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from .. import states
from ..optimizer import ALTO
from .versions import option
from .wrap import wrap_method


def install() -> None:
    """Wrap the question, in releases that have it. It is passed on for whatever is not ALTO."""
    for wrapper in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
        if hasattr(wrapper, "_configure_master_weights"):
            wrap_method(wrapper, "_configure_master_weights", _configure_master_weights)


def _configure_master_weights(original: Callable[..., Any], wrapper: Any, **asked: Any) -> Any:
    if isinstance(wrapper.optimizer, ALTO):
        # "bf16_fp32_offload_validator" before 0.19.4
        asked.update({name: None for name in asked if name.startswith("bf16") and name.endswith("offload_validator")})
    return original(**asked)


def round_masters(engine: Any) -> None:
    """Have ALTO round master weights that are in bfloat16."""
    optimizer = engine.basic_optimizer
    if getattr(engine.optimizer, "master_weights_and_grads_dtype", torch.float32) != torch.bfloat16:
        return
    if not isinstance(optimizer, ALTO):
        raise ValueError(
            f"{type(optimizer).__name__} loses small updates of bfloat16 master weights; remove "
            "bf16_master_weights_and_grads from the config"
        )
    chosen = optimizer.description()
    missing = [f'"{name}": "bfloat16"' for name in states.STATE_DTYPES if "bfloat16" not in chosen[name]]
    if option(engine, "bf16_optimizer_states") and missing:
        raise ValueError(
            "bf16_optimizer_states: ALTO has options of its own for that, since exp_avg_sq stays in float32. Remove it "
            f"from the config, and write {', '.join(missing)} among the params of the optimizer"
        )
    optimizer.round_weights_stochastically()
