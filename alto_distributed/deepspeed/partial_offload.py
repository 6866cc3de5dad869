"""Twin-Flow: ``"ratio"`` below 1 of offload_optimizer, where stage 3 leaves some sub-groups on the accelerator.

DeepSpeed steps those by a second optimizer, an AdamW that it builds beside its own DeepSpeedCPUAdam, and asks for that
class. ALTO steps a sub-group wherever it is, so it is its own second one. DeepSpeed is shown a ratio of 1 until it has
asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from .build import OPTIMIZERS
from .wrap import wrap_method

_RATIO = "_ratio_for_alto"


def install() -> None:
    """Wrap the methods before and after the question. They pass on whatever does not concern ALTO."""
    wrap_method(DeepSpeedZeroOptimizer_Stage3, "_configure_offloading", _configure_offloading)
    wrap_method(DeepSpeedZeroOptimizer_Stage3, "_create_fp32_partitions", _create_fp32_partitions)


def _configure_offloading(original: Callable[..., Any], wrapper: Any, *args: Any) -> Any:
    if isinstance(wrapper.optimizer, OPTIMIZERS):
        setattr(wrapper, _RATIO, wrapper.partial_offload)
        wrapper.partial_offload = 1.0
    return original(*args)


def _create_fp32_partitions(original: Callable[..., Any], wrapper: Any) -> Any:
    if hasattr(wrapper, _RATIO):
        wrapper.partial_offload = getattr(wrapper, _RATIO)
        wrapper.backup_optimizer = wrapper.optimizer
    return original()
