"""``"skip_nonfinite": true`` under DeepSpeed: its wrappers look at gradients, all groups at once, before they step any.

    wrapper                          what it does about gradients that are not finite          here
    FP16_UnfusedOptimizer            looks at every gradient, and at the norm                   nothing to do
    BF16_Optimizer                   looks at the norm of all of them                           nothing to do
    DeepSpeedZeroOptimizer (1, 2)    looks at every gradient if ``check_grad_overflow``,        turned on
                                     which float32 turns off and bf16's config may
    DeepSpeedZeroOptimizer_Stage3    looks at the norm of all of them                           nothing to do
    none (float32, stage 0)          nothing                                                    ALTO's own check

A wrapper steps ALTO group by group, so that ALTO's own check would come too late for the first group.
"""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ..optimizer import ALTO


def skip_nonfinite(engine: Any) -> None:
    """Have the engine skip steps with gradients that are not finite, on all ranks together."""
    optimizer, wrapper = engine.basic_optimizer, engine.optimizer
    if wrapper is optimizer:
        optimizer.register_step_post_hook(_tell_engine)
        return
    optimizer.leave_nonfinite_to_engine()
    if isinstance(wrapper, DeepSpeedZeroOptimizer):
        if not hasattr(wrapper, "check_grad_overflow"):
            raise ValueError(
                "skip_nonfinite: this DeepSpeed's ZeRO optimizer has no check_grad_overflow; install a version that "
                "alto_distributed supports"
            )
        wrapper.check_grad_overflow = True


def _tell_engine(optimizer: ALTO, *_: Any) -> None:
    """DeepSpeed reads this after a step: it counts skipped steps, and holds the learning rate schedule."""
    optimizer.overflow = optimizer.skipped_in_a_row > 0  # type: ignore[attr-defined]
