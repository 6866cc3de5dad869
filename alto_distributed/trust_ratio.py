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
    plan: StepPlan, hypers: Sequence[Hyperparameters], partial: Mapping[torch.device, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ratio of each slot, and lr times that, from this rank's sums. A slot that nobody summed has ratio 1."""
    if all(hyper.layerwise == "none" for hyper in hypers):
        device = next(iter(partial), torch.device("cpu"))
        ones = torch.ones(len(plan.norms.slots), dtype=sums_dtype(device), device=device)
        return ones, ones
    sums = plan.norms.complete(partial)
    theta_norm, r_norm = sums.sqrt()
    ratios, step_sizes = torch.ones_like(theta_norm), torch.empty_like(theta_norm)
    for hyper, slots in zip(hypers, plan.group_slots, strict=True):
        index = slots.on(sums.device)
        ratio = trust_ratio(theta_norm[index], r_norm[index], *hyper.eps[1:], one_at_zero=hyper.layerwise != "all")
        if hyper.trust_clip is not None:
            ratio = ratio.clamp(*hyper.trust_clip)
        ratios[index] = ratio
        step_sizes[index] = ratio * hyper.lr
    return ratios, step_sizes
