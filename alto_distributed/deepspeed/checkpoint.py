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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import BASE_OPTIMIZER_STATE, OPTIMIZER_STATE_DICT, PARAM_GROUPS, ZERO_STAGE
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from .. import states
from ..adaptor import ALPHA as ESGD_ALPHA
from ..errors import one_line
from ..optimizer import ALTO
from ..safe_load import more_than_data, only_data
from ..states import GRAD_EMA_BETA1
from . import universal_esgd
from .build import ESGD, OPTIMIZERS
from .data_classes import CLASSES
from .nvme import NOT_RESTORED, swaps_states
from .versions import load_state, refuse_universal_stage3
from .wrap import wrap_method

#: If it is set, and not to 0, no ``load_checkpoint`` runs code from a file, whatever the optimizer.
ONLY_DATA = "ALTO_ONLY_DATA"

CONVERTER = "python -m alto_distributed.deepspeed.universal INPUT OUTPUT"


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
        _check_universal(engine, Path(asked["load_dir"]), asked.get("tag"))
    if isinstance(optimizer, ALTO):
        check = optimizer.register_load_state_dict_pre_hook(_refuse_other_optimizers)
        try:
            result = original(*args, **kwargs)
        finally:
            check.remove()
        _settle(engine.optimizer, optimizer)
    else:
        result = original(*args, **kwargs)
        if universal:
            _settle_esgd(engine.optimizer, optimizer)
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


# -- what is refused -----------------------------------------------------------------------------------


def _needed(group: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """The states that a group must find; grad_ema unless alpha is 0 both in this run and in the saved one."""
    if ESGD_ALPHA in group:
        return universal_esgd.needed({**group, **saved})
    lamb = group["alpha"] == 0 and saved.get("alpha", 0) == 0
    return [key for key in ALTO.state_keys if key != states.GRAD_EMA or not lamb]


def _other_optimizer(group: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    """Why a saved group is not one that the optimizer in its present setting could have saved."""
    if ESGD_ALPHA in group:
        return None if ESGD_ALPHA in saved else f"it was not saved by ESGD: its parameter groups have no {ESGD_ALPHA!r}"
    if "alpha" not in saved:
        return "it was not saved by ALTO: its parameter groups have no 'alpha'"
    if saved["alpha"] == 0 and group["alpha"] != 0 and GRAD_EMA_BETA1 not in saved:
        return f"it was saved with alpha=0 (LAMB), and this run has alpha={group['alpha']}"
    return None


def _refusal(reason: str, name: str = "ALTO") -> ValueError:
    return ValueError(
        f"the checkpoint has no 'grad_ema' for {name}: {reason}. To take over its weights, moments and step count and "
        f'start grad_ema from zero, convert it with "{CONVERTER} --adopt" and load the result with '
        '"checkpoint": {"load_universal": true}'
    )


def _refuse_other_optimizers(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Before ``ALTO.load_state_dict``, which checks the rest: here it is known what there is to do instead."""
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        reason = _other_optimizer(group, saved)
        if reason:
            raise _refusal(reason, "ESGD" if ESGD_ALPHA in group else "ALTO")


def _load_zero(original: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    """Stages 1 and 2: DeepSpeed compares how groups are padded first, and calls other groups another alignment."""
    asked = inspect.signature(original).bind(*args, **kwargs).arguments
    shards = asked.get("state_dict_list") or ()  # None for those of other ranks
    if isinstance(wrapper.optimizer, OPTIMIZERS) and asked.get("load_optimizer_states", True):
        for base in (shard.get(BASE_OPTIMIZER_STATE) for shard in shards if shard is not None):
            if isinstance(base, dict) and PARAM_GROUPS in base:
                _refuse_other_optimizers(wrapper.optimizer, base)
                _refuse_other_groups(wrapper.optimizer.param_groups, base[PARAM_GROUPS])
    return original(*args, **kwargs)


def _restore_elastic(original: Callable[..., Any], wrapper: Any, saved: Any, *args: Any) -> None:
    """Elastic checkpoints hold no hyperparameters, and are copied state by state."""
    if isinstance(wrapper.optimizer, ALTO):
        by_group = saved["state"] if isinstance(saved, dict) else saved
        for g, group in enumerate(wrapper.optimizer.param_groups):
            missing = [key for key in _needed(group, {}) if key not in by_group[g]]
            if missing:
                raise _refusal(f"group {g} was saved without {', '.join(map(repr, missing))}")
    original(saved, *args)


def _check_universal(engine: Any, load_dir: Path, tag: str | None) -> None:
    """Raise unless the folder holds everything for every parameter of this engine."""
    wrapper = engine.optimizer
    if not isinstance(wrapper, (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3, BF16_Optimizer)):
        raise ValueError(
            "universal checkpoints are for ZeRO. Stage 0 loads what stage 0 saved at any world size: remove "
            '"load_universal" from the config'
        )
    if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        refuse_universal_stage3()
    if getattr(wrapper, "round_robin_gradients", False):
        raise ValueError(
            "DeepSpeed misplaces the pieces of a universal checkpoint under round_robin_gradients; load it with "
            '"round_robin_gradients": false'
        )
    if tag is None:
        latest = load_dir / "latest_universal"
        if not latest.is_file():
            return  # DeepSpeed says so itself
        tag = latest.read_text(errors="replace").strip()
    zero = load_dir / tag / "zero"
    saved = _saved_globals(zero)
    if (OPTIMIZER_STATE_DICT in saved) != isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        raise ValueError(
            f"{zero.parent} was converted from {'' if OPTIMIZER_STATE_DICT in saved else 'a stage other than '}ZeRO "
            "stage 3, and DeepSpeed's universal checkpoints do not go from stage 3 to another or back; keep the stage"
        )
    _check_groups(engine, zero, saved[PARAM_GROUPS])


def _check_groups(engine: Any, zero: Path, saved_groups: Sequence[Mapping[str, Any]]) -> None:
    groups = engine.basic_optimizer.param_groups
    _refuse_groups(groups, saved_groups, type(engine.basic_optimizer).__name__)
    files = ["fp32"] if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3) else ["fp32", states.STEP]
    for g, _, params in _flat_tensors(engine.optimizer, engine.basic_optimizer):
        needed = [*_needed(groups[g], saved_groups[g]), *files]
        for param in params:
            name = engine.param_names[param]
            missing = [key for key in needed if not (zero / name / f"{key}.pt").is_file()]
            if missing:
                raise ValueError(
                    f"the universal checkpoint {zero.parent} has no {', '.join(map(repr, missing))} for parameter "
                    f"{name!r}. DeepSpeed's own converter (ds_to_universal) drops grad_ema: convert the checkpoint "
                    f'that was saved again, with "{CONVERTER}"'
                )


def _refuse_groups(groups: Sequence[Any], saved_groups: Sequence[Mapping[str, Any]], name: str) -> None:
    """Raise if saved groups are none that an optimizer called ``name`` could have saved with these groups."""
    if not is_adopted(saved_groups):
        for group, saved in zip(groups, saved_groups, strict=False):
            reason = _other_optimizer(group, saved)
            if reason:
                raise _refusal(reason, name)
        _refuse_other_groups(groups, saved_groups)
    elif len(saved_groups) < len(groups):  # DeepSpeed would leave the last ones as they are
        _refuse_other_groups(groups, saved_groups)


def _refuse_other_groups(groups: Sequence[Any], saved_groups: Sequence[Any]) -> None:
    if len(groups) != len(saved_groups):
        raise ValueError(
            f"the checkpoint has {len(saved_groups)} parameter groups, this optimizer has {len(groups)}; build the "
            "groups as they were when the checkpoint was saved"
        )


def is_adopted(saved_groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the converter has emptied the groups, for the hyperparameters of the loading run to stay."""
    return all(group.keys() == {"params"} for group in saved_groups)


def _saved_globals(zero: Path) -> dict[str, Any]:
    path = zero / "optimizer_state.pt"
    if not path.is_file():
        raise ValueError(f'{zero.parent} is not a universal checkpoint: make one with "{CONVERTER}"')
    with only_data(CLASSES):
        problem = more_than_data(path)
        if problem:
            raise ValueError(f"{zero.parent} was not loaded, for it holds more than data: {problem}")
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # of any type: the bytes may be anything
            raise ValueError(f"{path} cannot be read: {one_line(error)}; convert the checkpoint again") from None
    for wrong in _not_globals(saved):
        raise ValueError(f'{path} is damaged ({wrong}): convert the checkpoint again, with "{CONVERTER}"')
    return dict(saved)


def _not_globals(saved: Any) -> Iterator[str]:
    """What is missing from the globals of a universal checkpoint, or not of its type, among what is read from them."""
    if not isinstance(saved, dict):
        yield f"it is a {type(saved).__name__}, not a dictionary"
    yield from _not_groups(saved)
    if OPTIMIZER_STATE_DICT in saved:  # stage 3
        inner = saved[OPTIMIZER_STATE_DICT]
        if not isinstance(inner, dict):
            yield f"its {OPTIMIZER_STATE_DICT} is a {type(inner).__name__}"
        yield from _not_groups(inner)
        state = inner.get("state")
        first = state.get(0) if isinstance(state, dict) else None
        if not isinstance(first, dict) or not _is_number(first.get(states.STEP)):
            yield "it does not tell the step"


def _not_groups(saved: Mapping[str, Any]) -> Iterator[str]:
    groups = saved.get(PARAM_GROUPS)
    if not isinstance(groups, list) or not groups:
        yield f"it has no {PARAM_GROUPS}"
    for group in groups or ():
        if not isinstance(group, dict) or not all(isinstance(key, str) for key in group):
            yield f"its {PARAM_GROUPS} are not dictionaries by name"
        for key in ("alpha", ESGD_ALPHA, "momentum"):
            if key in group and not _is_number(group[key]):
                yield f"{key} of a parameter group is no number"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


# -- what is put right ---------------------------------------------------------------------------------


def _flat_tensors(wrapper: Any, optimizer: Any) -> Iterator[tuple[int, torch.Tensor, list[torch.Tensor]]]:
    """(group, flat tensor of the optimizer, the model's parameters in it) for each flat tensor of this rank."""
    if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        for s, (flat, params) in enumerate(zip(wrapper.fp32_partitioned_groups_flat, wrapper.fp16_groups, strict=True)):
            yield wrapper.sub_group_to_group_id[s], flat, params
    elif isinstance(wrapper, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        groups = wrapper.bf16_groups if isinstance(wrapper, BF16_Optimizer) else wrapper.bit16_groups
        for g, params in enumerate(groups):
            yield g, optimizer.param_groups[g]["params"][0], params


def _load_stage3(original: Callable[..., Any], wrapper: Any, checkpoint_dir: str, *more: Any) -> None:
    optimizer = wrapper.optimizer
    own = [dict(group) for group in optimizer.param_groups]
    if not isinstance(optimizer, OPTIMIZERS):
        original(checkpoint_dir, *more)
        return
    with universal_esgd.read_by_own_names(wrapper) if isinstance(optimizer, ESGD) else contextlib.nullcontext():
        original(checkpoint_dir, *more)
    zero = Path(checkpoint_dir) / "zero"
    saved_groups = _saved_globals(zero)[PARAM_GROUPS]
    for group, before, saved in zip(optimizer.param_groups, own, saved_groups, strict=False):
        group.clear()
        group.update({**before, **saved, "params": []})
    if not isinstance(optimizer, ALTO):
        return
    for g, flat, params in _flat_tensors(wrapper, optimizer):
        if GRAD_EMA_BETA1 in optimizer.param_groups[g]:
            pieces = [load_state(wrapper, str(zero / wrapper.param_names[p]), states.GRAD_EMA, p) for p in params]
            optimizer.state[flat][states.GRAD_EMA] = optimizer.new_state(flat, states.GRAD_EMA).copy_(torch.cat(pieces))


def _settle(wrapper: Any, optimizer: ALTO) -> None:
    """States as ALTO keeps them, and the parameters linked to them."""
    for g, flat, _ in _flat_tensors(wrapper, optimizer):
        state = optimizer.state[flat]
        state[states.STEP] = states.new_step() + float(state[states.STEP])
        if GRAD_EMA_BETA1 not in optimizer.param_groups[g]:  # alpha was never anything but 0
            state.pop(states.GRAD_EMA, None)
    _link(wrapper)


def _settle_esgd(wrapper: Any, optimizer: Any) -> None:
    """The same for ESGD after a universal checkpoint, of which all groups have all states."""
    for g, flat, _ in _flat_tensors(wrapper, optimizer):
        universal_esgd.keep_own(optimizer.param_groups[g], optimizer.state[flat])
    _link(wrapper)


def _link(wrapper: Any) -> None:
    if isinstance(wrapper, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        wrapper._hp_optimizer_states_linked = False
        wrapper._lazy_init_hp_params_optimizer_state()


def _point_to_masters(wrapper: Any, optimizer: Any) -> None:
    """Stages 1 and 2, before 0.19: what ``safe_get_full_fp32_param`` reads has become a part of some state."""
    if isinstance(wrapper, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        for _, flat, params in _flat_tensors(wrapper, optimizer):
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
