"""Checkpoints from another expert parallelism.

Megatron has one optimizer for all parameters, or a second one for the experts while they are spread over ranks. A
``fully_reshardable`` checkpoint names each parameter's states alike in both. What differs is where its groups are:

    saved by one optimizer:    {"optimizer": {"param_groups": [...]}, ...}
    saved by two:              {0: {"optimizer": ...}, 1: {"optimizer": ...}}

``dist_checkpointing`` adds the states that were asked for, at the places where this run has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.optimizer.optimizer import ChainedOptimizer

from .group_loading import regrouped

_FORMAT, _STATES = "param_state_sharding_type", "param_state"


class AltoChainedOptimizer(ChainedOptimizer):
    """A ChainedOptimizer becomes one by its ``__class__``."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(_rearranged(state_dict, self.chained_optimizers))


def _rearranged(state_dict: Any, wrappers: Sequence[Any]) -> Any:
    """What was loaded, with an entry for each of this run's optimizers."""
    saved = _saved_entries(state_dict)
    if len(saved) == len(wrappers) or not wrappers:
        return state_dict
    if not isinstance(state_dict, Mapping) or any(entry.get(_FORMAT) != "fully_reshardable" for entry in saved):
        raise ValueError(
            f"the checkpoint is of {len(saved)} optimizers and this run has {len(wrappers)}: Megatron has a second one "
            "for experts while they are spread over ranks. Load it with the expert parallelism that was saved, or save "
            "it as fully_reshardable (--dist-ckpt-optim-fully-reshardable), which goes to another one"
        )
    groups = [group for entry in saved for group in entry["optimizer"]["param_groups"]]
    entries = {}
    for i, wrapper in enumerate(wrappers):
        loaded = state_dict if len(wrappers) == 1 else state_dict[i]
        mine = {"param_groups": regrouped(groups, wrapper.optimizer.param_groups)}
        entries[i] = {**saved[0], "optimizer": mine, _STATES: loaded[_STATES]}
    return entries[0] if len(wrappers) == 1 else entries


def _saved_entries(state_dict: Any) -> list[Any]:
    """Of each optimizer that saved: what is not a tensor of a parameter."""
    if not isinstance(state_dict, Mapping):
        return list(state_dict)
    numbered = [state_dict[key] for key in sorted(key for key in state_dict if isinstance(key, int))]
    several = [entry for entry in numbered if any(key != _STATES for key in entry)]
    return several or [state_dict]
