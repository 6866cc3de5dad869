"""Universal checkpoints of ESGD, whose states are momentum_buffer (with momentum) and grad_ema.

DeepSpeed's converter carries two states, by Adam's names, and stage 3 loads two. ESGD's are shown to both under those
names, and have their own in the files and in the optimizer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import states
from ..adaptor import ALPHA, GATHERED_WITH

MOMENTUM = "momentum_buffer"

#: ESGD's state -> the name under which DeepSpeed knows it.
SHOWN_AS = {MOMENTUM: states.EXP_AVG, states.GRAD_EMA: states.EXP_AVG_SQ}


def is_of_sgd(base: Mapping[str, Any]) -> bool:
    """Whether an optimizer's state_dict is that of ESGD or SGD."""
    return all("dampening" in group for group in base["param_groups"])


def check_saved(source: Path, base: Mapping[str, Any], adopt: bool) -> None:
    """Raise unless it was saved by ESGD, or by SGD where that is to be adopted."""
    adapted = all(ALPHA in group for group in base["param_groups"])
    if adopt and adapted:
        raise ValueError(f"{source} was saved by ESGD: convert it without --adopt, which would set grad_ema to zero")
    if not adopt and not adapted:
        raise ValueError(
            f"{source} was saved by SGD and has no 'grad_ema'. To take over its weights and momentum, with grad_ema "
            "from zero and the hyperparameters of the run that loads it, give --adopt"
        )


def show(base: Mapping[str, Any], lengths: Sequence[int]) -> None:
    """Put the states under the names that DeepSpeed carries. What a group does not have is zeros, which loading drops.

    Args:
        base: the optimizer's state_dict, which is changed.
        lengths: of its tensors.
    """
    for index, length in enumerate(lengths):
        state = base["state"].get(index, {})
        found = {key: state.get(key) for key in SHOWN_AS}
        zeros = torch.zeros(length, dtype=torch.float32, device="cpu")
        base["state"][index] = {
            **{SHOWN_AS[key]: zeros.clone() if value is None else value for key, value in found.items()},
            states.STEP: states.new_step(),
        }


def name_files(zero: Path) -> None:
    """Give the converted files ESGD's names."""
    for own, shown in SHOWN_AS.items():
        for path in list(zero.rglob(f"{shown}.pt")):
            os.replace(path, path.with_name(f"{own}.pt"))


def needed(group: Mapping[str, Any]) -> list[str]:
    """The states that a group of ESGD keeps."""
    kept = [MOMENTUM] if group["momentum"] != 0 else []
    return kept + ([states.GRAD_EMA] if group[ALPHA] != 0 or GATHERED_WITH in group else [])


@contextlib.contextmanager
def read_by_own_names(wrapper: Any) -> Iterator[None]:
    """Stage 3 asks for Adam's files, and gets ESGD's."""
    own_name = {shown: own for own, shown in SHOWN_AS.items()}
    read = wrapper.load_hp_checkpoint_state

    def load_hp_checkpoint_state(folder: str, key: str, **more: Any) -> Any:
        return read(folder, own_name.get(key, key), **more)

    wrapper.load_hp_checkpoint_state = load_hp_checkpoint_state
    try:
        yield
    finally:
        del wrapper.load_hp_checkpoint_state


def keep_own(group: Mapping[str, Any], state: dict[str, Any]) -> None:
    """Of the states that were loaded into a tensor: those that the group keeps, by ESGD's names."""
    for own, shown in SHOWN_AS.items():
        if shown in state:
            state[own] = state.pop(shown)
    for key in [key for key in state if key not in needed(group)]:
        del state[key]
