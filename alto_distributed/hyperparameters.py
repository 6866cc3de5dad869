"""Hyperparameters: one dataclass, checked in one place.

Every way into ALTO (the constructor, a parameter group, a DeepSpeed JSON, a Megatron argument, a
loaded checkpoint) ends in :class:`Hyperparameters`, so a value is either refused there with a message
that names it, or it is good everywhere.

Symbols are those of "Exploring Landscapes for Better Minima along Valleys" (NeurIPS 2025), Algorithm
"ALTO".
"""

from __future__ import annotations

import logging
import math
import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from .errors import UnknownHyperparameter, did_you_mean, is_one_of, nearest, shown

LAYERWISE_MODES = ("decayed", "matrices", "all", "none")

DEFAULT_LR = 1e-2
DEFAULT_EPS2 = 1e-6
DEFAULT_EPS3 = 1e-10

#: Group key: beta1, of the acceleration. Whoever writes Adam's betas into a group (two of them, or momentum into the
#: first of three) does not change it.
OWN_BETA1 = "alto_beta1"

#: Group key: beta2 as it was before a scheduler cycled momentum, which leaves betas[1] alone.
OWN_BETA2 = "alto_beta2"

#: Group key that OneCycleLR and CyclicLR leave if they cycle momentum, which they write to betas[0], Adam's beta1.
_CYCLED = "base_momentum"

#: What other optimizers call the same, for hints.
OTHER_NAMES = {
    "wd": "weight_decay",
    "decay_rate": "weight_decay",
    "alp": "alpha",
    "learning_rate": "lr",
    "momentum": "betas",
    **{f"beta{i}": "betas" for i in ("", 1, 2, 3)},
    **{f"{name}{i}": "eps" for name in ("eps", "epsilon") for i in ("", 1, 2, 3) if name + str(i) != "eps"},
    **dict.fromkeys(("max_coeff", "min_coeff", "clamp_value", "trust_ratio_clip"), "trust_clip"),
    **dict.fromkeys(("debias", "correct_bias"), "bias_correction"),
}

logger = logging.getLogger("alto_distributed")


@dataclass(frozen=True)
class Hyperparameters:
    """The numbers of one parameter group. Building one checks it. The defaults of the whole package are here."""

    lr: float | torch.Tensor = DEFAULT_LR
    """Learning rate (eta). A 0-dim tensor is allowed, as in ``torch.optim``."""

    betas: tuple[float, float, float] = (0.99, 0.9, 0.99)
    """Decay of the acceleration (beta1), of the first moment (beta2) and of the second (beta3)."""

    alpha: float = -5.0
    """Weight of the acceleration. Negative explores, 0 is LAMB; ``|alpha| < 1/(1 - beta1)``."""

    eps: tuple[float, float, float] = (1e-6, DEFAULT_EPS2, DEFAULT_EPS3)
    """(eps1, eps2, eps3): under the square root's quotient, in the ratio, and in phi(x) = x + eps3."""

    weight_decay: float = 1e-4
    """Decay (lambda), inside r: it is scaled by the layer-wise ratio with the rest of r."""

    layerwise: str = "decayed"
    """Which parameters get the layer-wise ratio: "decayed", "matrices", "all" or "none"."""

    bias_correction: bool = True
    """Divide m by 1 - beta2^k and v by 1 - beta3^k. False is the paper's "ALTO Vanilla"."""

    trust_clip: tuple[float, float] | None = None
    """(low, high): limits of the layer-wise ratio. None for no limits."""

    maximize: bool = False
    """Climb instead of descend: the gradient is negated."""

    vector_lr: float = 1.0
    """Factor on lr for parameters without the layer-wise ratio, which take Adam steps."""

    def __post_init__(self) -> None:
        check = object.__setattr__  # frozen: normalize what came from JSON or from numpy
        check(self, "lr", check_lr(self.lr))
        check(self, "betas", check_betas(self.betas))
        check(self, "alpha", check_alpha(self.alpha, self.betas[0]))
        check(self, "eps", check_eps(self.eps))
        check(self, "weight_decay", _number("weight_decay", self.weight_decay, low=0.0))
        if not is_one_of(self.layerwise, LAYERWISE_MODES):
            raise ValueError(
                f"layerwise={shown(self.layerwise)} is not one of {', '.join(map(repr, LAYERWISE_MODES))}"
                f"{did_you_mean(self.layerwise, LAYERWISE_MODES)}"
            )
        for name in ("bias_correction", "maximize"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={shown(getattr(self, name))} must be True or False")
        check(self, "trust_clip", check_trust_clip(self.trust_clip))
        check(self, "vector_lr", _number("vector_lr", self.vector_lr, low=0.0))

    @classmethod
    def from_group(cls, group: Mapping[str, Any]) -> Hyperparameters:
        """The checked hyperparameters of a parameter group (other keys are the framework's)."""
        if not isinstance(group.get("decayed", True), bool):
            raise ValueError(f"decayed={shown(group['decayed'])} of a parameter group must be True or False")
        values = {name: group[name] for name in HYPERPARAMETER_NAMES if name in group or name not in ADDED_LATER}
        return cls(**{**values, "betas": betas_of(group)})

    def as_group(self) -> dict[str, Any]:
        """The same as a plain dict, the form that parameter groups and checkpoints hold."""
        return {name: getattr(self, name) for name in HYPERPARAMETER_NAMES}

    def in_words(self, whose: str) -> dict[str, str]:
        """For comparison with another rank's. A tensor is not read: it may be on a device."""
        values = self.as_group().items()
        return {f"{name} {whose}": "a tensor" if isinstance(v, torch.Tensor) else repr(v) for name, v in values}


HYPERPARAMETER_NAMES: tuple[str, ...] = tuple(field.name for field in fields(Hyperparameters))

#: Not in checkpoints of earlier versions, which go on with the defaults of these.
ADDED_LATER = ("trust_clip", "maximize", "vector_lr")


def is_cycled(group: Mapping[str, Any]) -> bool:
    """Whether a scheduler writes momentum, the first moment's beta, to the first of a group's betas."""
    return _CYCLED in group and OWN_BETA1 in group


def betas_of(group: Mapping[str, Any]) -> Any:
    """A group's three betas, not yet checked, also where somebody wrote Adam's."""
    betas = group["betas"]
    if is_cycled(group) and is_sequence(betas, 3):
        if betas[1] != group.get(OWN_BETA2, betas[1]):
            raise ValueError(
                f"betas={shown(betas)} of a parameter group: betas[1] was changed from {shown(group[OWN_BETA2])} "
                "although a scheduler cycles momentum there. It writes the first moment's beta to betas[0], and "
                "betas[1] has no effect. Give betas to ALTO or its groups, before the scheduler; or delete "
                f"{_CYCLED!r} from the group, which ends the cycle"
            )
        return (group[OWN_BETA1], betas[0], betas[2])
    return adams_betas(betas, group[OWN_BETA1]) if OWN_BETA1 in group and is_sequence(betas, 2) else betas


_said: set[str] = set()


def adams_betas(betas: Sequence[Any], beta1: float = Hyperparameters.betas[0]) -> tuple[Any, Any, Any]:
    """Adam's (beta1, beta2) as ALTO's last two. It is said once, by the first rank."""
    if "two betas" not in _said and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "ALTO: betas=%s are two, as Adam has them. They are taken as beta2 and beta3, of the first and the second "
            "moment, with beta1=%g of the acceleration",
            shown(betas),
            beta1,
        )
    _said.add("two betas")
    return (beta1, *betas)


def is_sequence(value: Any, length: int) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) == length


def check_lr(lr: Any) -> float | torch.Tensor:
    """lr >= 0 and finite. A tensor is taken on trust: reading it could stall a GPU every step."""
    if isinstance(lr, torch.Tensor):
        if lr.numel() != 1:
            raise ValueError(f"Tensor lr must be 1-element, got shape {tuple(lr.shape)}; write lr=torch.tensor(0.01)")
        if not lr.is_floating_point() or lr.layout != torch.strided:
            raise ValueError(f"lr as a tensor must hold a floating-point number, got {lr.dtype}, {lr.layout}")
        return lr
    return _number("lr", lr, low=0.0)


def check_betas(betas: Any) -> tuple[float, float, float]:
    """Three numbers, or Adam's two."""
    if is_sequence(betas, 2):
        for i, beta in enumerate(betas):
            check_beta(f"betas[{i}] (beta{i + 2})", beta)
        betas = adams_betas(betas)
    if not is_sequence(betas, 3):
        raise ValueError(
            f"betas={shown(betas)} must be three numbers (beta1 of the acceleration, beta2 of the first moment, "
            "beta3 of the second), or Adam's two, which are ALTO's (beta2, beta3)"
        )
    beta1, beta2, beta3 = (check_beta(f"betas[{i}] (beta{i + 1})", beta) for i, beta in enumerate(betas))
    return beta1, beta2, beta3


def check_beta(name: str, beta: Any) -> float:
    """A number, also as the 0-dim tensor that a scheduler with such a momentum writes."""
    if isinstance(beta, torch.Tensor) and beta.ndim == 0 and beta.device.type == "cpu":
        beta = beta.item()
    return _number(name, beta, low=0.0, below=1.0)


def check_alpha(alpha: Any, beta1: float) -> float:
    """|alpha| < 1/(1 - beta1): with rho = -alpha*(1 - beta1), that is |rho| < 1."""
    value = _number("alpha", alpha)
    if not abs(value) * (1.0 - beta1) < 1.0:
        raise ValueError(
            f"alpha={value:g} is out of range: |alpha| must be below 1/(1 - beta1) = {1.0 / (1.0 - beta1):g} "
            f"for beta1={beta1:g}"
        )
    return value


def check_eps(eps: Any) -> tuple[float, float, float]:
    """One number is eps1, with the paper's eps2 and eps3; three numbers are all of them."""
    if isinstance(eps, (str, bytes)) or not isinstance(eps, Sequence):
        return _number("eps (eps1)", eps, low=0.0), DEFAULT_EPS2, DEFAULT_EPS3
    if len(eps) != 3:
        raise ValueError(f"eps={shown(eps)} must be one number (eps1) or three (eps1, eps2, eps3)")
    eps1, eps2, eps3 = (_number(f"eps[{i}] (eps{i + 1})", value, low=0.0) for i, value in enumerate(eps))
    return eps1, eps2, eps3


def check_trust_clip(limits: Any) -> tuple[float, float] | None:
    """None, or (low, high) with 0 <= low <= high; high may be infinite."""
    if limits is None:
        return None
    if not is_sequence(limits, 2):
        raise ValueError(f"trust_clip={shown(limits)} must be None or two numbers, (low, high), such as (0.01, 10.0)")
    low = _number("trust_clip[0] (low)", limits[0], low=0.0)
    high = math.inf if limits[1] == math.inf else _number("trust_clip[1] (high)", limits[1], low=0.0)
    if low > high:
        raise ValueError(f"trust_clip={shown(limits)}: low is above high; write ({high:g}, {low:g})")
    return low, high


def refuse_unknown(names: Iterable[str], known: Sequence[str] = HYPERPARAMETER_NAMES, whose: str = "ALTO") -> None:
    """Raise for the first name that is not a hyperparameter, with the nearest that is."""
    for name in names:
        raise UnknownHyperparameter(
            f"{shown(name)} is not a hyperparameter of {whose}{_hint(name, known)} (it has: {', '.join(known)})"
        )


def refuse_near_misses(names: Iterable[str], known: Sequence[str] = HYPERPARAMETER_NAMES) -> None:
    """Raise for a name that is almost a hyperparameter, or another optimizer's name for one.

    Parameter groups carry keys of other people's (``initial_lr``, ``wd_mult``, ``name``), so an
    unknown key there is no error by itself; a slip of one or two letters is.
    """
    for name in names:
        if name in known:
            continue
        near = nearest(name, known, cutoff=0.8)
        if name in OTHER_NAMES or (near and abs(len(near) - len(name)) <= 2):
            hint = _hint(name, [near] if near else known)
            raise UnknownHyperparameter(f"parameter group key {shown(name)} is not a hyperparameter of ALTO{hint}")


def _hint(name: Any, known: Sequence[str]) -> str:
    meant = OTHER_NAMES.get(name) if isinstance(name, str) else None
    if meant == "betas":
        return "; did you mean 'betas'? (beta1 of the acceleration, beta2 of the first moment, beta3 of the second)"
    return f"; did you mean {meant!r}?" if meant in known else did_you_mean(name, known)


def _number(name: str, value: Any, *, low: float = -math.inf, below: float = math.inf) -> float:
    """``value`` as a float in [low, below), or a ValueError that says what it was and may be."""
    if low == -math.inf:
        allowed = "a finite number"
    elif below == math.inf:
        allowed = f"a finite number >= {low:g}"
    else:
        allowed = f"a number in [{low:g}, {below:g})"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name}={shown(value)} must be {allowed}, not a {type(value).__name__}")
    try:
        result = float(value)
    except OverflowError:  # a whole number may have any number of digits
        result = math.inf
    if not math.isfinite(result) or not low <= result < below:
        raise ValueError(f"{name}={result!r} is out of range: it must be {allowed}")
    return result
