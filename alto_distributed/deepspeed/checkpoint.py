"""Loading DeepSpeed's checkpoints: what lacks a state is refused, what DeepSpeed leaves wrong is put right.

DeepSpeed knows Adam's two states. A checkpoint without the third loads into ALTO without a word, and the
average starts again from zero; so every load is looked at first: a universal one before anything has changed,
another before the optimizer has (DeepSpeed loads the module's weights before). Afterwards:

    universal, stage 3    the third state is loaded too; every group gets its own hyperparameters back (all of
                          them were given those of group 0) and its own step count (all of them shared one
                          tensor, which then counted several times a step)
    stages 1, 2 and BF16  parameters are linked to the states that were loaded, which otherwise happens only
                          at the first step of an engine, so that ``safe_get_full_optimizer_state`` works; and to
                          their master weights, which older releases lose

Saving needs one thing: BF16_Optimizer does not say which stage it is, and ``zero_to_fp32`` asks.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import BASE_OPTIMIZER_STATE, PARAM_GROUPS, ZERO_STAGE
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from .. import states
from ..optimizer import ALTO
from ..safe_load import only_data
from ..states import GRAD_EMA_BETA1
from . import universal_esgd
from .build import ESGD, OPTIMIZERS
from .data_classes import CLASSES
from .loadable import (
    check_universal,
    flat_tensors,
    needed_states,
    no_grad_ema,
    refuse_other_groups,
    refuse_other_optimizers,
    saved_globals,
)
from .nvme import NOT_RESTORED, swaps_states
from .versions import load_state
from .wrap import wrap_method

#: If it is set, and not to 0, no ``load_checkpoint`` runs code from a file, whatever the optimizer.
ONLY_DATA = "ALTO_ONLY_DATA"


def install() -> None:
    """Put the checks around DeepSpeed's methods. They pass on whatever does not concern ALTO."""
    wrap_method(DeepSpeedEngine, "load_checkpoint", _load_checkpoint)
    wrap_method(BF16_Optimizer, "state_dict", _bf16_state_dict)
    wrap_method(DeepSpeedZeroOptimizer, "load_state_dict", _load_zero)
    wrap_method(DeepSpeedZeroOptimizer, "_restore_base_optimizer_state", _restore_elastic)
    wrap_method(DeepSpeedZeroOptimizer_Stage3, "load_hp_checkpoint_state_from_checkpoint_dir_stage3", _load_stage3)


def _load_checkpoint(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    with only_data(CLASSES) if os.environ.get(ONLY_DATA, "0") not in ("", "0") else contextlib.nullcontext():
        return _load_checked(original, engine, *args, **kwargs)


def _load_checked(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    optimizer = getattr(engine, "basic_optimizer", None)
    if not isinstance(optimizer, OPTIMIZERS):
        return original(*args, **kwargs)
    if swaps_states(engine.optimizer):
        raise ValueError(f'no checkpoint can be loaded: {NOT_RESTORED}. Use "device": "cpu" in offload_optimizer')
    asked = inspect.signature(original).bind(*args, **kwargs).arguments
    weights_alone = asked.get("load_module_only", False) or not asked.get("load_optimizer_states", True)
    universal = engine.load_universal_checkpoint()
    if universal and weights_alone:
        universal = not _reads_weights_alone(engine.optimizer)
        if universal:
            warnings.warn(
                "load_optimizer_states=False and load_module_only=True do not hold for this universal checkpoint: "
                "DeepSpeed loads its states, step count and hyperparameters too, with any optimizer",
                stacklevel=2,
            )
    if universal:
        check_universal(engine, Path(asked["load_dir"]), asked.get("tag"))
    if isinstance(optimizer, ALTO):
        check = optimizer.register_load_state_dict_pre_hook(refuse_other_optimizers)
        try:
            result = original(*args, **kwargs)
        finally:
            check.remove()
        _restore(engine.optimizer, optimizer)
    else:
        result = original(*args, **kwargs)
        if universal:
            _restore_esgd(engine.optimizer, optimizer)
    if universal:
        _point_to_masters(engine.optimizer, optimizer)
    return result


def _reads_weights_alone(wrapper: Any) -> bool:
    """Whether a universal checkpoint can be loaded without its states: at stage 3, in late releases."""
    return hasattr(wrapper, "load_module_checkpoint_state_from_checkpoint_dir_stage3")


def _bf16_state_dict(original: Callable[..., Any], wrapper: Any) -> Any:
    saved = original()
    if isinstance(wrapper.optimizer, ALTO):
        saved.setdefault(ZERO_STAGE, 1)
    return saved


# -- what is wrapped -------------------------------------------------------------------------------------


def _load_zero(original: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    """Stages 1 and 2: DeepSpeed compares how groups are padded first, and calls other groups another alignment."""
    asked = inspect.signature(original).bind(*args, **kwargs).arguments
    shards = asked.get("state_dict_list") or ()  # None for those of other ranks
    if isinstance(wrapper.optimizer, OPTIMIZERS) and asked.get("load_optimizer_states", True):
        for base in (shard.get(BASE_OPTIMIZER_STATE) for shard in shards if shard is not None):
            if isinstance(base, dict) and PARAM_GROUPS in base:
                refuse_other_optimizers(wrapper.optimizer, base)
                refuse_other_groups(wrapper.optimizer.param_groups, base[PARAM_GROUPS])
    return original(*args, **kwargs)


def _restore_elastic(original: Callable[..., Any], wrapper: Any, saved: Any, *args: Any) -> None:
    """Elastic checkpoints hold no hyperparameters, and are copied state by state."""
    if isinstance(wrapper.optimizer, ALTO):
        by_group = saved["state"] if isinstance(saved, dict) else saved
        for g, group in enumerate(wrapper.optimizer.param_groups):
            missing = [key for key in needed_states(group, {}) if key not in by_group[g]]
            if missing:
                raise no_grad_ema(f"group {g} was saved without {', '.join(map(repr, missing))}")
    original(saved, *args)


# -- what is put right ---------------------------------------------------------------------------------


def _load_stage3(original: Callable[..., Any], wrapper: Any, checkpoint_dir: str, *more: Any) -> None:
    optimizer = wrapper.optimizer
    own = [dict(group) for group in optimizer.param_groups]
    if not isinstance(optimizer, OPTIMIZERS):
        original(checkpoint_dir, *more)
        return
    with universal_esgd.read_by_own_names(wrapper) if isinstance(optimizer, ESGD) else contextlib.nullcontext():
        original(checkpoint_dir, *more)
    zero = Path(checkpoint_dir) / "zero"
    saved_groups = saved_globals(zero)[PARAM_GROUPS]
    for group, before, saved in zip(optimizer.param_groups, own, saved_groups, strict=False):
        group.clear()
        group.update({**before, **saved, "params": []})
    if not isinstance(optimizer, ALTO):
        return
    for g, flat, params in flat_tensors(wrapper, optimizer):
        if GRAD_EMA_BETA1 in optimizer.param_groups[g]:
            pieces = [load_state(wrapper, str(zero / wrapper.param_names[p]), states.GRAD_EMA, p) for p in params]
            optimizer.state[flat][states.GRAD_EMA] = optimizer.new_state(flat, states.GRAD_EMA).copy_(torch.cat(pieces))


def _restore(wrapper: Any, optimizer: ALTO) -> None:
    """States as ALTO keeps them, and the parameters linked to them."""
    for g, flat, _ in flat_tensors(wrapper, optimizer):
        state = optimizer.state[flat]
        state[states.STEP] = states.new_step() + float(state[states.STEP])
        if GRAD_EMA_BETA1 not in optimizer.param_groups[g]:  # alpha was never anything but 0
            state.pop(states.GRAD_EMA, None)
    _link(wrapper)


def _restore_esgd(wrapper: Any, optimizer: Any) -> None:
    """The same for ESGD after a universal checkpoint, of which all groups have all states."""
    for g, flat, _ in flat_tensors(wrapper, optimizer):
        universal_esgd.keep_own(optimizer.param_groups[g], optimizer.state[flat])
    _link(wrapper)


def _link(wrapper: Any) -> None:
    if isinstance(wrapper, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        wrapper._hp_optimizer_states_linked = False
        wrapper._lazy_init_hp_params_optimizer_state()


def _point_to_masters(wrapper: Any, optimizer: Any) -> None:
    """Stages 1 and 2, before 0.19: what ``safe_get_full_fp32_param`` reads has become a part of some state."""
    if isinstance(wrapper, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        for _, flat, params in flat_tensors(wrapper, optimizer):
            for mapping in (getattr(param, "_hp_mapping", None) for param in params):
                if mapping is None:
                    continue
                place = mapping.get_hp_fragment_address()
                mapping.hp_fragment = flat.narrow(0, place.start, place.numel)


def link_late_states(engine: Any) -> None:
    """ESGD allocates a group's states when that first steps, and DeepSpeed links parameters after the first group's."""
    optimizer, wrapper, linked = engine.basic_optimizer, engine.optimizer, 0

    def link_again(*_: Any) -> None:
        nonlocal linked
        if len(optimizer.state) > linked:
            linked = len(optimizer.state)
            wrapper._hp_optimizer_states_linked = False  # DeepSpeed links after each group's step, unless it has

    if isinstance(wrapper, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        optimizer.register_step_post_hook(link_again)
