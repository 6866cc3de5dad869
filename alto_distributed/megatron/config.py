"""ALTO's hyperparameters in Megatron's configuration."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from megatron.core.optimizer import OptimizerConfig

from ..diagnostics import Diagnostics
from ..hyperparameters import DEFAULT_LR, Hyperparameters
from ..kernels import check_kernel

NAME = "alto"


@dataclass
class AltoOptimizerConfig(OptimizerConfig):
    """Megatron's ``OptimizerConfig`` for ALTO; ``lr``, ``weight_decay`` and all the rest keep their meaning.

    Building one checks it. A plain ``OptimizerConfig(optimizer="alto", lr=...)`` is accepted too, and has the
    ``alto_`` values below; its weight decay is Megatron's own default, 0.01.
    """

    optimizer: str = NAME
    lr: float | None = DEFAULT_LR
    weight_decay: float = Hyperparameters.weight_decay

    alto_alpha: float = Hyperparameters.alpha
    """Weight of the acceleration, ``|alpha| < 1/(1 - beta1)``. 0 is LAMB, and needs no third state."""

    alto_betas: tuple[float, float, float] = Hyperparameters.betas
    """Decays of the acceleration, the first and the second moment."""

    alto_eps: float | tuple[float, float, float] = Hyperparameters.eps[0]
    """eps1, or the paper's (eps1, eps2, eps3)."""

    alto_layerwise: str = Hyperparameters.layerwise
    """Which parameters get the layer-wise ratio: "decayed" (all but those with ``wd_mult`` 0: biases and
    vectors), "matrices", "all" or "none"."""

    alto_bias_correction: bool = Hyperparameters.bias_correction
    """False is the paper's "ALTO Vanilla"."""

    alto_kernel: str = "auto"
    """See :class:`alto_distributed.ALTO`."""

    alto_diagnostics_every: int = 0
    """See :class:`alto_distributed.ALTO`."""

    alto_skip_nonfinite: bool = False
    """Skip a step, on all ranks, if any gradient is not finite. With a loss scaler (fp16) Megatron does that itself."""

    alto_adopt: bool = False
    """The checkpoint to load is one of Adam's: keep weights, moments and step count, start grad_ema from zero."""

    alto_checkpoint_format: str = ""
    """The format in which the distributed optimizer will be saved, if it is known: one that cannot be right for this
    model is then refused when the optimizer is built, not at the first save."""

    def __post_init__(self) -> None:
        if self.use_precision_aware_optimizer:  # Megatron would fail an assertion that names Adam
            raise ValueError(PRECISION_AWARE)
        check(self)
        super().__post_init__()


PRECISION_AWARE = (
    "ALTO under Megatron: the precision-aware optimizer keeps its states inside TransformerEngine's Adam; set "
    "use_precision_aware_optimizer=False (leave out --use-precision-aware-optimizer)"
)


def of(config: OptimizerConfig, name: str) -> Any:
    """A value of ALTO's own; a plain OptimizerConfig has the defaults."""
    return getattr(config, f"alto_{name}", getattr(AltoOptimizerConfig, f"alto_{name}"))


def check(config: OptimizerConfig) -> Hyperparameters:
    """The hyperparameters that a config stands for, or a ValueError that names what is wrong with it."""
    if config.lr is None:
        raise ValueError("ALTO under Megatron: lr is not set; give OptimizerConfig(lr=...) (--lr)")
    check_kernel(of(config, "kernel"))
    Diagnostics(of(config, "diagnostics_every"))
    for name in ("bias_correction", "skip_nonfinite", "adopt"):
        if not isinstance(of(config, name), bool):
            raise ValueError(f"alto_{name}={of(config, name)!r} must be True or False")
    names = ("betas", "alpha", "eps", "layerwise", "bias_correction")
    return Hyperparameters(lr=config.lr, weight_decay=config.weight_decay, **{name: of(config, name) for name in names})


def warn_of_adams(config: OptimizerConfig) -> None:
    """A value that was set for Adam has no effect; better said than found out."""
    for name in ("adam_beta1", "adam_beta2", "adam_eps"):
        if getattr(config, name) != getattr(OptimizerConfig, name):
            ours = "alto_eps" if name == "adam_eps" else "alto_betas"
            warnings.warn(f"{name}={getattr(config, name)} has no effect on ALTO, which has {ours}", stacklevel=4)
