"""Which saved checkpoints can be converted to the universal format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    FP32_FLAT_GROUPS,
    OPTIMIZER_STATE_DICT,
    PARAM_GROUPS,
)

from .. import states
from ..safe_load import more_than_data
from . import universal_esgd
from .versions import refuse_universal_stage3

MOMENTS = (states.EXP_AVG, states.EXP_AVG_SQ)


def refuse_code(source: Path) -> None:
    problems = [problem for path in sorted(source.glob("*.pt")) if (problem := more_than_data(path))]
    if problems:
        raise ValueError(
            f"{source} was not converted, for it holds more than data: {'; '.join(problems)}. Loading it would run "
            "code that it names. If you trust where it came from, name each of these after --allow"
        )


def optimizer_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*_optim_states.pt"))


def load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def base_optimizer(saved: Mapping[str, Any]) -> Any:
    """The inner optimizer's state_dict in a file of stage 1, 2 or BF16_Optimizer, or of stage 3."""
    zero = saved[OPTIMIZER_STATE_DICT]
    return zero[BASE_OPTIMIZER_STATE] if BASE_OPTIMIZER_STATE in zero else zero[OPTIMIZER_STATE_DICT]


def check(source: Path, target: Path, adopt: bool) -> bool:
    """Whether the checkpoint has grad_ema; or a ValueError if it cannot be converted as asked."""
    files = optimizer_files(source)
    if not files:
        raise ValueError(
            f"there are no *_optim_states.pt in {source}. Give the folder of one tag, such as SAVED/global_step100. (A "
            "checkpoint of ZeRO stage 0 has none, and needs no conversion: it loads at any world size.)"
        )
    if target.exists() and any(target.iterdir()):
        raise ValueError(
            f"{target} is not empty, and what is in it would mix with the new checkpoint; give a new folder"
        )
    if any(source.glob("*expert_*_model_states.pt")):
        raise ValueError(
            f"{source} has a mixture of experts, which DeepSpeed's universal format does not carry, with any "
            "optimizer. Load it at the world size that saved it"
        )
    _refuse_round_robin(source)
    first = load(files[0])
    if FP32_FLAT_GROUPS in first[OPTIMIZER_STATE_DICT]:
        refuse_universal_stage3()
    base = base_optimizer(first)
    if not isinstance(base, dict):
        raise ValueError('an elastic checkpoint cannot be converted; save with "elastic_checkpoint": false')
    if universal_esgd.is_of_sgd(base):
        universal_esgd.check_saved(source, base, adopt)
        return False
    for state in base["state"].values():
        missing = [key for key in (*MOMENTS, states.STEP) if key not in state]
        if missing:
            raise ValueError(
                f"the optimizer states in {source} have no {', '.join(map(repr, missing))}: only checkpoints of "
                "ALTO, EAdamW and ESGD can be converted, and with --adopt those of LAMB, Adam and SGD"
            )
    found = any(states.GRAD_EMA in state for state in base["state"].values())
    if adopt and found:
        raise ValueError(f"{source} has grad_ema already: convert it without --adopt, which would set it to zero")
    if not adopt:
        _check_saved_by_alto(source, base)
    return found


def _check_saved_by_alto(source: Path, base: Mapping[str, Any]) -> None:
    for group in base[PARAM_GROUPS]:
        lacking = any(states.GRAD_EMA not in base["state"].get(i, {}) for i in group["params"])
        if "alpha" not in group or (group["alpha"] != 0 and lacking):
            raise ValueError(
                f"{source} has no 'grad_ema' and was not saved by ALTO. To take over its weights, moments and step "
                "count, with grad_ema from zero and the hyperparameters of the run that loads it, give --adopt"
            )


def _refuse_round_robin(source: Path) -> None:
    """DeepSpeed notes down the wrong places of pieces then, for every optimizer."""
    for path in sorted(source.glob("mp_rank_*_model_states.pt"))[:1]:
        zero = load(path).get("ds_config", {}).get("zero_optimization", {})
        if zero.get("round_robin_gradients", False):
            raise ValueError(
                "a checkpoint saved under round_robin_gradients cannot be converted: DeepSpeed notes down the wrong "
                'places of its pieces. Load it at the world size that saved it, with "round_robin_gradients": true, '
                "and go on from there; another world size needs a run without it"
            )
