"""Megatron's two wrappers that do not shard over data parallelism. Their checkpoints take any states."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

from .. import states
from . import config as configs
from .group_loading import disambiguated, take_over


class AltoFP32Optimizer(FP32Optimizer):
    """Float32 training without the distributed optimizer."""

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return _describe(self, super().sharded_state_dict, *args, **kwargs)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        _make_altos(self, state_dict)
        with disambiguated(state_dict["param_groups"], self.optimizer):
            super().load_state_dict(state_dict)


class AltoFloat16Optimizer(Float16OptimizerWithFloat16Params):
    """bf16 or fp16 with a float32 copy of every weight on every rank."""

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return _describe(self, super().sharded_state_dict, *args, **kwargs)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        _make_altos(self, state_dict["optimizer"])
        with disambiguated(state_dict["optimizer"]["param_groups"], self.optimizer):
            super().load_state_dict(state_dict)


def _describe(
    wrapper: Any, original: Any, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
) -> Any:
    """Megatron's description of what is saved, or to be loaded: without grad_ema if that is not there yet."""
    wrapper.optimizer.initialize_state()
    described = original(model_sharded_state_dict, is_loading, metadata)
    if is_loading and configs.of(wrapper.config, "adopt"):
        inner = described if "param_groups" in described else described["optimizer"]
        for state in inner["state"].values():
            if isinstance(state, dict):
                state.pop(states.GRAD_EMA, None)
    return described


def _make_altos(wrapper: Any, saved: dict[str, Any]) -> None:
    """Check what was saved of the inner optimizer, and complete what Adam does not have."""
    adopt = configs.of(wrapper.config, "adopt")
    saved["param_groups"] = take_over(saved["param_groups"], wrapper.optimizer.param_groups, adopt)
    common = saved["state"].pop("common_step", None)
    for group in saved["param_groups"]:
        step = float(common if common is not None else group.get(states.STEP, 0))
        for index in group["params"]:
            state = saved["state"].get(index)
            if state is None:
                continue
            # Megatron saves no step before the first; Adams of TransformerEngine and Apex count in the group.
            state.setdefault(states.STEP, states.new_step() + step)
            step = float(state[states.STEP])
            if adopt:
                state[states.GRAD_EMA] = torch.zeros_like(state[states.EXP_AVG])
        group[states.STEP] = int(step)
