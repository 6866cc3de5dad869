"""The layer-wise ratio: which parameters get one, and what it is."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .hyperparameters import Hyperparameters
from .kernels.reference import trust_ratio
from .sharding.norms import sums_dtype
from .sharding.plan import StepPlan
from .spans import NONZERO


def ratio_for(group: Mapping[str, Any], hyper: Hyperparameters) -> str:
    """Which segments of a group get the ratio: "every", "matrices" or "no" segment."""
    if hyper.layerwise == "decayed":
        return "every" if is_decayed(group) else "no"
    return {"matrices": "matrices", "all": "every", "none": "no"}[hyper.layerwise]


def is_decayed(group: Mapping[str, Any]) -> bool:
    """A group's intent, if it states one; else whether its weight decay is not 0 today."""
    decayed: bool = group.get("decayed", group["weight_decay"] != 0)
    return decayed


def warn_if_nobody_gets_one(param_groups: Sequence[Mapping[str, Any]]) -> None:
    """Under "decayed" without decay the ratio would vanish in silence."""
    groups = [group for group in param_groups if group["params"]]
    if groups and all(group["layerwise"] == "decayed" and not is_decayed(group) for group in groups):
        warnings.warn(
            'ALTO: no parameter group has weight decay, so under layerwise="decayed" no parameter gets the '
            'layer-wise ratio. Set a weight_decay, or layerwise="matrices" or "all" to have the ratio without '
            'decay, or layerwise="none" if that is what you want.',
            stacklevel=3,  # whoever built the optimizer
        )


def complete(
    plan: StepPlan,
    groups: Sequence[Mapping[str, Any]],
    hypers: Sequence[Hyperparameters],
    partial: Mapping[torch.device, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ratio of each slot, and lr times that, from this rank's sums.

    A parameter whose whole gradient is 0 has ratio 0: LAMB's ratio would move it by stale momentum at full length.
    Under "none" there is no ratio, and the step is AdamW's. Without a ratio the rate is lr times ``vector_lr``.
    """
    count = len(plan.norms.slots)
    without = [g for g, hyper in enumerate(hypers) if hyper.layerwise == "none"]
    if len(without) == len(hypers):
        device = next(iter(partial), torch.device("cpu"))
        ratios = torch.ones(count, dtype=sums_dtype(device), device=device)
    else:
        sums = plan.norms.complete(partial)
        plan.witness.look(sums, plan.norms)
        theta_norm, r_norm = sums[:NONZERO].sqrt()
        is_still = sums[NONZERO] == 0
        ratios = torch.ones_like(theta_norm)
        for g, (group, hyper) in enumerate(zip(groups, hypers, strict=True)):
            slots = plan.slots_with_ratio(g, ratio_for(group, hyper))
            if len(slots):
                at = slots.on(sums.device)
                ratio = trust_ratio(theta_norm[at], r_norm[at], *hyper.eps[1:], one_at_zero=hyper.layerwise != "all")
                ratios[at] = ratio if hyper.trust_clip is None else ratio.clamp(*hyper.trust_clip)
        for g in without:
            is_still.index_fill_(0, plan.group_slots[g].on(sums.device), False)
        ratios.masked_fill_(is_still, 0.0)
    scaled = ratios
    if any(hyper.vector_lr != 1 for hyper in hypers):
        vector_lrs = [(ratio_for(group, hyper), hyper.vector_lr) for group, hyper in zip(groups, hypers, strict=True)]
        scaled = ratios * plan.factors(vector_lrs, ratios)
    rates = [_number(hyper.lr) for hyper in hypers]
    if all(isinstance(rate, float) and rate == rates[0] for rate in rates):
        return ratios, scaled * rates[0] if rates else scaled
    step_sizes = torch.empty_like(ratios)
    for rate, slots in zip(rates, plan.group_slots, strict=True):
        at = slots.on(ratios.device)
        step_sizes[at] = scaled[at] * rate
    return ratios, step_sizes


def _number(lr: float | torch.Tensor) -> float | torch.Tensor:
    """A number on the host is read here, for nothing; one on a device stays there."""
    return float(lr) if isinstance(lr, torch.Tensor) and lr.device.type == "cpu" else lr
