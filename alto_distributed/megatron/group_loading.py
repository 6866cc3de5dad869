"""Which parameter groups may be loaded: ALTO's own, and Adam's when that was asked for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.core.optimizer.optimizer import param_group_identifier_keys

from ..states import GRAD_EMA, GRAD_EMA_BETA1, STEP

#: Hyperparameters that Megatron's scheduler does not set: a resumed run has the checkpoint's.
_FIXED = ("alpha", "betas", "eps", "layerwise", "bias_correction")

#: One of the values by which Megatron pairs groups, lent for :func:`disambiguated`.
_LENT = "is_decoupled_lr"


def has_third_state(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether groups of ALTO's keep grad_ema: always, except for LAMB (alpha 0 from the start)."""
    return any(GRAD_EMA_BETA1 in group for group in groups)


def take_over(
    saved: Sequence[dict[str, Any]], current: Sequence[Mapping[str, Any]], adopt: bool
) -> list[dict[str, Any]]:
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
    if adopt:
        return [_adopted(group, current[0]) for group in saved]
    if has_third_state(saved) != has_third_state(current):
        with_it, without = ("the checkpoint", "this run") if has_third_state(saved) else ("this run", "the checkpoint")
        raise ValueError(
            f"{with_it} has {GRAD_EMA!r} and {without} has not (alpha 0 is LAMB): load with the alpha that was saved, "
            f"alto_alpha={saved[0]['alpha']} (--alto-alpha)"
        )
    for name in _FIXED:  # the same in all groups: overrides of them are refused
        if saved[0][name] != current[0][name]:
            warnings.warn(
                f"ALTO goes on with the checkpoint's {name}={saved[0][name]}, not with this run's {current[0][name]}",
                stacklevel=3,
            )
    return list(saved)


def _adopted(saved: dict[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """A group of Adam's: what Megatron put there, its rate, decay and count, and our hyperparameters."""
    keys = set(current) | {"wd_mult", "pre_wd_mult", "lr_mult", "pre_lr_mult", "params", STEP}
    group = {key: value for key, value in saved.items() if key in keys}
    for name in (*_FIXED, GRAD_EMA_BETA1):
        if name in current:
            group[name] = current[name]
    group[STEP] = int(saved.get(STEP, 0))
    group["decayed"] = saved.get("wd_mult", saved.get("pre_wd_mult", 1.0)) != 0
    if not group["decayed"]:  # Adam's groups say otherwise until a scheduler's first step
        group["weight_decay"] = 0.0
    return group


@contextmanager
def disambiguated(saved: Sequence[dict[str, Any]], optimizer: Any) -> Iterator[None]:
    """While Megatron loads: groups that differ in nothing but their ``max_lr`` are paired by their position.

    megatron-core 0.16.1 pairs groups by other values, so that with a decoupled learning rate all of them would go on
    with the rate of the last.

    Args:
        saved: groups to load, in the checkpoint's order.
        optimizer: the inner optimizer, whose groups Megatron exchanges for them.
    """
    identities = [_identity(group) for group in saved]
    if len(set(identities)) == len(saved):
        yield
        return
    if identities != [_identity(group) for group in optimizer.param_groups]:
        raise ValueError(
            f"the checkpoint's parameter groups {identities} ({', '.join(param_group_identifier_keys)}) are not this "
            "run's; build them with the overrides of the learning rate (--decoupled-lr) that were saved"
        )
    flags = [group.get(_LENT, False) for group in saved]
    for i, pair in enumerate(zip(saved, optimizer.param_groups, strict=True)):
        for group in pair:
            group[_LENT] = i
    try:
        yield
    finally:
        for group, flag in zip(optimizer.param_groups, flags, strict=True):
            group[_LENT] = flag


def _identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in param_group_identifier_keys)
