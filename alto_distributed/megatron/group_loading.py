"""Which parameter groups may be loaded: ALTO's own, and Adam's when that was asked for."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.core.optimizer.optimizer import param_group_identifier_keys

from ..hyperparameters import ADDED_LATER
from ..states import GRAD_EMA, GRAD_EMA_BETA1, STEP

#: Hyperparameters that Megatron's scheduler does not set: a resumed run has the checkpoint's.
_FIXED = ("alpha", "betas", "eps", "layerwise", "bias_correction", "trust_clip", "vector_lr")

#: What the scheduler makes the rate and the decay of a group from. Since 0.19 Megatron pairs groups by these too.
_SCHEDULE = ("max_lr", "min_lr", "start_wd", "end_wd")

#: Whether a group is of experts that are spread over ranks.
_EXPERTS = "is_expert_parallel"

#: One of the values by which Megatron pairs groups, lent for :func:`disambiguated`.
_LENT = "is_decoupled_lr"


def has_third_state(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether groups of ALTO's keep grad_ema: always, except for LAMB (alpha 0 from the start)."""
    return any(GRAD_EMA_BETA1 in group for group in groups)


def take_over(saved: Sequence[dict[str, Any]], current: Sequence[dict[str, Any]], adopt: bool) -> list[dict[str, Any]]:
    """The groups of a checkpoint as ALTO's, in the checkpoint's order.

    Args:
        saved: groups that the checkpoint holds.
        current: this optimizer's.
        adopt: the checkpoint is Adam's, and that is known.
    """
    ours = all("alpha" in group for group in saved)
    if ours and adopt:
        raise ValueError(
            f"this checkpoint was saved by ALTO and has {GRAD_EMA!r}, which alto_adopt would set to zero; load it with "
            "alto_adopt=False (leave out --alto-adopt)"
        )
    if not ours and not adopt:
        raise ValueError(
            f"this checkpoint was saved by another optimizer: it has no {GRAD_EMA!r}. To take over the weights, "
            f"moments and step count of Adam, with {GRAD_EMA} from zero, set alto_adopt=True (--alto-adopt) for the "
            "first load"
        )
    own = _counterparts(saved, current)
    if adopt:
        return [_adopted(group, mine) for group, mine in zip(saved, own or [current[0]] * len(saved), strict=True)]
    if has_third_state(saved) != has_third_state(current):
        with_it, without = ("the checkpoint", "this run") if has_third_state(saved) else ("this run", "the checkpoint")
        raise ValueError(
            f"{with_it} has {GRAD_EMA!r} and {without} has not (alpha 0 is LAMB): load with the alpha that was saved, "
            f"alto_alpha={saved[0]['alpha']} (--alto-alpha)"
        )
    for group in saved:
        for name in ADDED_LATER:  # not in checkpoints of earlier versions
            group.setdefault(name, current[0][name])
    for name in _FIXED:  # the same in all groups: overrides of them are refused
        if saved[0][name] != current[0][name]:
            warnings.warn(
                f"ALTO goes on with the checkpoint's {name}={saved[0][name]}, not with this run's {current[0][name]}",
                stacklevel=3,
            )
    if _SCHEDULE[0] not in param_group_identifier_keys:
        _warn_of_other_schedule(zip(saved, own or (), strict=False))
    return list(saved)


def _warn_of_other_schedule(pairs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> None:
    """Before 0.19, Megatron goes on with the checkpoint's, whatever the flags of the scheduler say."""
    for saved, current in pairs:
        for name in _SCHEDULE:
            if None not in (saved.get(name), current.get(name)) and saved[name] != current[name]:
                warnings.warn(
                    f"Megatron goes on with the checkpoint's {name}={saved[name]}, not this run's {current[name]}. "
                    "This release does so with any optimizer; megatron-core 0.19 and later take the new value with "
                    "--override-opt_param-scheduler",
                    stacklevel=4,
                )
                return


def _adopted(saved: dict[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """A group of Adam's: what Megatron put there, with our hyperparameters and this run's schedule.

    Adam's rate is no rate for ALTO. The group's ``lr`` stays until the scheduler's first step.
    """
    keys = set(current) | {"wd_mult", "pre_wd_mult", "lr_mult", "pre_lr_mult", "params", STEP}
    group = {key: value for key, value in saved.items() if key in keys}
    for name in (*_FIXED, *_SCHEDULE, GRAD_EMA_BETA1):
        if name in current:
            group[name] = current[name]
    group[STEP] = int(saved.get(STEP, 0))
    group["decayed"] = saved.get("wd_mult", saved.get("pre_wd_mult", 1.0)) != 0
    if not group["decayed"]:  # Adam's groups say otherwise until a scheduler's first step
        group["weight_decay"] = 0.0
    return group


def _counterparts(saved: Sequence[Mapping[str, Any]], current: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The current group of each saved one, or None if they are not the same groups.

    They are paired by what Megatron pairs them by, apart from the schedule; those that are alike, by their order.
    """
    waiting = list(current)
    found = []
    for group in saved:
        alike = [mine for mine in waiting if _identity(mine, _SCHEDULE) == _identity(group, _SCHEDULE)]
        if not alike:
            return None
        found.append(alike[0])
        waiting = [mine for mine in waiting if mine is not alike[0]]
    return None if waiting else found


def regrouped(saved: Sequence[dict[str, Any]], current: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A saved group for each current one, whether it held experts or not.

    Args:
        saved: groups of all optimizers of the run that saved.
        current: the groups of one optimizer of this run.

    Raises:
        ValueError: none fits, or several that go on differently.
    """
    found = []
    for mine in current:
        same = [group for group in saved if _identity(group, _SCHEDULE) == _identity(mine, _SCHEDULE)]
        without = (*_SCHEDULE, _EXPERTS)
        same = same or [group for group in saved if _identity(group, without) == _identity(mine, without)]
        same = [group for group in same if all(group.get(key) == mine.get(key) for key in _SCHEDULE)] or same
        values = {repr({**group, "params": None, _EXPERTS: None}) for group in same}
        if len(values) != 1:
            raise ValueError(
                f"the checkpoint has {len(values)} groups for this run's {_identity(mine)} "
                f"({', '.join(param_group_identifier_keys)}), at another expert parallelism; load it with the expert "
                "parallelism and the overrides of the learning rate (--decoupled-lr) that were saved"
            )
        found.append({**same[0], _EXPERTS: mine[_EXPERTS]})
    return found


@contextmanager
def disambiguated(saved: Sequence[dict[str, Any]], optimizer: Any) -> Iterator[None]:
    """While Megatron loads: groups are paired whatever their schedules, and those that are alike by their order.

    megatron-core before 0.19 does not look at ``max_lr``, so that with a decoupled learning rate all groups would go on
    with the rate of the last. Later ones do, and find no group for a run with another learning rate.

    Args:
        saved: groups to load, in the checkpoint's order.
        optimizer: the inner optimizer, whose groups Megatron exchanges for them.
    """
    identities = [_identity(group) for group in saved]
    mine = optimizer.param_groups
    if len(set(identities)) == len(saved) and set(map(_identity, mine)) <= set(identities):
        yield
        return
    pairs = _counterparts(saved, mine)
    if pairs is None:
        raise ValueError(
            f"the checkpoint's parameter groups {identities} ({', '.join(param_group_identifier_keys)}) are not this "
            "run's; build them with the overrides of the learning rate (--decoupled-lr) that were saved"
        )
    before = [{key: group[key] for key in (*_SCHEDULE, _LENT) if key in group} for group in pairs]
    flags = {}
    for i, (group, own) in enumerate(zip(saved, pairs, strict=True)):
        flags[f"group {i}"] = group.get(_LENT, False)
        own.update({key: group[key] for key in _SCHEDULE if key in group})
        group[_LENT] = own[_LENT] = f"group {i}"
    try:
        yield
    finally:
        for own, values in zip(pairs, before, strict=True):
            own.update(values)
        for group in optimizer.param_groups:
            group[_LENT] = flags.get(group[_LENT], group[_LENT])


def _identity(group: Mapping[str, Any], leave_out: Sequence[str] = ()) -> tuple[Any, ...]:
    keys = (key for key in param_group_identifier_keys if key not in leave_out)
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in keys)
