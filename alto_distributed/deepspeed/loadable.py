"""What a checkpoint of DeepSpeed must hold for ALTO to load it, and what to do about one that does not.

A checkpoint without the third state would load without a word, and the average would start again from zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT, PARAM_GROUPS
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from .. import states
from ..adaptor import ALPHA as ESGD_ALPHA
from ..errors import one_line
from ..optimizer import ALTO
from ..safe_load import more_than_data, only_data
from ..states import GRAD_EMA_BETA1
from . import universal_esgd
from .data_classes import CLASSES
from .versions import refuse_universal_stage3

CONVERTER = "python -m alto_distributed.deepspeed.universal INPUT OUTPUT"


def needed_states(group: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
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


def no_grad_ema(reason: str, name: str = "ALTO") -> ValueError:
    return ValueError(
        f"the checkpoint has no 'grad_ema' for {name}: {reason}. To take over its weights, moments and step count and "
        f'start grad_ema from zero, convert it with "{CONVERTER} --adopt" and load the result with '
        '"checkpoint": {"load_universal": true}'
    )


def refuse_other_optimizers(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Before ``ALTO.load_state_dict``, which checks the rest: here it is known what there is to do instead."""
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        reason = _other_optimizer(group, saved)
        if reason:
            raise no_grad_ema(reason, "ESGD" if ESGD_ALPHA in group else "ALTO")


def check_universal(engine: Any, load_dir: Path, tag: str | None) -> None:
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
    saved = saved_globals(zero)
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
    for g, _, params in flat_tensors(engine.optimizer, engine.basic_optimizer):
        needed = [*needed_states(groups[g], saved_groups[g]), *files]
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
    if not _is_adopted(saved_groups):
        for group, saved in zip(groups, saved_groups, strict=False):
            reason = _other_optimizer(group, saved)
            if reason:
                raise no_grad_ema(reason, name)
        refuse_other_groups(groups, saved_groups)
    elif len(saved_groups) < len(groups):  # DeepSpeed would leave the last ones as they are
        refuse_other_groups(groups, saved_groups)


def refuse_other_groups(groups: Sequence[Any], saved_groups: Sequence[Any]) -> None:
    if len(groups) != len(saved_groups):
        raise ValueError(
            f"the checkpoint has {len(saved_groups)} parameter groups, this optimizer has {len(groups)}; build the "
            "groups as they were when the checkpoint was saved"
        )


def _is_adopted(saved_groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the converter has emptied the groups, for the hyperparameters of the loading run to stay."""
    return all(group.keys() == {"params"} for group in saved_groups)


def saved_globals(zero: Path) -> dict[str, Any]:
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


def flat_tensors(wrapper: Any, optimizer: Any) -> Iterator[tuple[int, torch.Tensor, list[torch.Tensor]]]:
    """(group, flat tensor of the optimizer, the model's parameters in it) for each flat tensor of this rank."""
    if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        for s, (flat, params) in enumerate(zip(wrapper.fp32_partitioned_groups_flat, wrapper.fp16_groups, strict=True)):
            yield wrapper.sub_group_to_group_id[s], flat, params
    elif isinstance(wrapper, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        groups = wrapper.bf16_groups if isinstance(wrapper, BF16_Optimizer) else wrapper.bit16_groups
        for g, params in enumerate(groups):
            yield g, optimizer.param_groups[g]["params"][0], params
