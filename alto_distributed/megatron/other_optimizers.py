"""Another optimizer of Megatron's that is given a checkpoint of ALTO's.

Megatron would hand ALTO's three betas to Adam, which fails at its first step without naming the cause.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any


def refuse_altos_checkpoints(built: Any) -> Any:
    """Have what Megatron built for another optimizer say what to do if it is to load ALTO's states.

    Args:
        built: what ``get_megatron_optimizer`` returned. All else that it does stays as it is.
    """
    for wrapper in getattr(built, "chained_optimizers", [built]):
        wrapper.load_state_dict = _refusing(wrapper, wrapper.load_state_dict)
    return built


def _refusing(wrapper: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_of_alto(state_dict):
            raise ValueError(
                f"this checkpoint was saved by ALTO, and this run's optimizer is {wrapper.config.optimizer}, which "
                "cannot go on with its states. Load the weights alone: --no-load-optim, or --finetune to begin at "
                "iteration 0 too. To go on with ALTO: --optimizer alto"
            )
        return original(state_dict, *args, **kwargs)

    return load_state_dict


def _is_of_alto(state_dict: Any) -> bool:
    """Whether the groups have ALTO's hyperparameters, wherever a wrapper has its groups."""
    if not isinstance(state_dict, Mapping):
        return False
    if isinstance(state_dict.get("optimizer"), Mapping):
        state_dict = state_dict["optimizer"]
    by_parameter = state_dict.get("param_to_group_meta")
    groups = list(by_parameter.values()) if isinstance(by_parameter, Mapping) else state_dict.get("param_groups", ())
    return any("alpha" in group and "layerwise" in group for group in groups)
