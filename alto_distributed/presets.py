"""Settings by name, and what alpha and the betas of a setting amount to. docs/alpha.md has the theory."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

from .errors import did_you_mean, is_one_of, shown
from .hyperparameters import HYPERPARAMETER_NAMES, Hyperparameters, check_betas, refuse_unknown

#: From this global batch size on, the paper uses its large-batch setting.
LARGE_BATCH = 1024

#: Of parameters without the ratio, in every preset but the paper's.
VECTOR_LR = 0.3

#: Name -> what differs from the paper's large-batch setting.
_PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "recommended": {"alpha": 0.0, "betas": (0.99, 0.8, 0.99), "vector_lr": VECTOR_LR},
    "nesterov": {"alpha": 0.8, "betas": (0.0, 0.8, 0.99), "vector_lr": VECTOR_LR},
    "zero-lag": {"alpha": 4.0, "betas": (0.8, 0.8, 0.99), "vector_lr": VECTOR_LR},
}

PRESETS = tuple(_PRESETS)

#: What a preset says: another one that is named later replaces all of it. Not lr and weight_decay, for they are tuned.
PRESET_NAMES = ("alpha", "betas", "eps", "vector_lr")

_NAMES = ("lr", "alpha", "betas", "eps", "weight_decay")


def recipe(global_batch_size: int, preset: str = "paper", **explicit: Any) -> dict[str, Any]:
    """Hyperparameters for a global batch size, as keyword arguments for ALTO.

    - "paper": the paper's, to the letter. From 1024 samples on: alpha -5, beta1 0.99 and lr 1e-2 (the rate of its GPT-2
      run). Below: alpha 0.5, beta1 0.01.
    - "recommended": alpha 0, which is LAMB and needs no third state, beta2 0.8, vectors at 0.3 of lr. On a GPT of 43
      thousand parameters, in 240 steps of 32 samples on one CPU and with 5 seeds, it lowers the loss by 0.63 nats
      beside LAMB with beta2 0.9 and one rate, 0.43 of them by beta2 and 0.20 by the vectors. Whether that holds for
      larger models and longer runs is not known; docs/results/presets.md has the figures.
    - "nesterov": beta1 0 and alpha = beta2, here 0.8, so that m is Nesterov's. In the same runs ahead of "recommended"
      by 0.045 nats, with 4 more bytes a parameter; level with it where embeddings have no ratio.
    - "zero-lag": beta1 = beta2 = b and alpha = b/(1 - b), here with b = 0.8. m lags behind the gradient by 0 steps. In
      the same runs level with "recommended".

    Below 1024 samples no preset has an ``lr``: choose your own.

    Args:
        global_batch_size: samples in one optimizer step, over all ranks and accumulation steps.
        preset: one of the names above.
        **explicit: hyperparameters of your own, which win over the preset's. With ``betas`` and no ``alpha``, the
            alpha of "nesterov" and "zero-lag" follows from the betas.

    Returns:
        ``alpha``, ``betas``, ``eps``, ``weight_decay``, ``vector_lr`` except for the paper's, ``lr`` for large batches,
        and what was explicit.

    Raises:
        ValueError: there is no such preset or hyperparameter, or a value is out of range.

    References:
        Paper, section "Hyperparameters"; table of GPT-2 settings in the appendix.
    """
    whole: Any = global_batch_size
    if isinstance(whole, bool) or not isinstance(whole, numbers.Integral):
        raise ValueError(f"global_batch_size={global_batch_size!r} must be a whole number of samples")
    if global_batch_size < 1:
        raise ValueError(f"global_batch_size={global_batch_size} must be at least 1")
    if not is_one_of(preset, PRESETS):
        known = ", ".join(map(repr, PRESETS))
        raise ValueError(f"preset={shown(preset)} is not one of {known}{did_you_mean(preset, PRESETS)}")
    refuse_unknown(name for name in explicit if name not in HYPERPARAMETER_NAMES)
    chosen: dict[str, Any] = {name: getattr(Hyperparameters, name) for name in _NAMES}
    chosen.update(_PRESETS[preset])
    if global_batch_size < LARGE_BATCH:
        del chosen["lr"]
        if preset == "paper":
            chosen.update(alpha=0.5, betas=(0.01, *Hyperparameters.betas[1:]))
    chosen.update(explicit)
    if "betas" in explicit and "alpha" not in explicit:
        chosen["alpha"] = _alpha_of(preset, check_betas(explicit["betas"]), chosen["alpha"])
    Hyperparameters(**chosen)  # refuses what is out of range
    return chosen


def _alpha_of(preset: str, betas: tuple[float, float, float], alpha: float) -> float:
    """The alpha with which a preset is what it is called for other betas, too; ``alpha`` if it does not follow them."""
    beta1, beta2, _ = betas
    if preset == "zero-lag":
        return beta2 / (1 - beta2)
    if preset != "nesterov":
        return alpha
    if beta1:
        raise ValueError(
            f"betas={betas} with preset='nesterov': only beta1=0 is Nesterov's; write betas={(0.0, *betas[1:])}, "
            "or give alpha as well"
        )
    return beta2


class Momentum(NamedTuple):
    """What alpha, beta1 and beta2 amount to."""

    rho: float
    """Share of the gradient's average in the adapted gradient: -alpha*(1 - beta1)."""
    lag: float
    """Steps by which m lags behind a gradient that changes steadily: beta2/(1 - beta2) - alpha."""
    momentum: float
    """beta2 of a plain average in which the newest gradient has the same weight."""


def momentum_of(hyper: Hyperparameters) -> Momentum:
    """See docs/alpha.md."""
    beta1, beta2, _ = hyper.betas
    rho = -hyper.alpha * (1 - beta1)
    return Momentum(rho, beta2 / (1 - beta2) - hyper.alpha, 1 - (1 - beta2) * (1 - rho))


def describe(hyper: Hyperparameters) -> str:
    """A setting in a line: its numbers, and what they amount to."""
    beta1, beta2, beta3 = hyper.betas
    # What is zero but for rounding is zero.
    rho, lag, momentum = (0.0 if abs(value) < 1e-9 else value for value in momentum_of(hyper))
    given = f"alpha {hyper.alpha:g}, betas {beta1:g} {beta2:g} {beta3:g}, vector_lr {hyper.vector_lr:g}"
    amount = f"rho {rho:.3g}, lag {lag:.3g} steps, effective momentum {momentum:.3g}"
    return f"{given}: {amount}"
