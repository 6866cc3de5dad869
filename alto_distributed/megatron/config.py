"""ALTO's hyperparameters in Megatron's configuration."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from megatron.core import optimizer as core_optimizer
from megatron.core.optimizer import OptimizerConfig

from ..diagnostics import Diagnostics
from ..hyperparameters import DEFAULT_LR, Hyperparameters
from ..kernels import check_kernel
from ..lamb import DEFAULT_BETAS as LAMB_BETAS
from ..lamb import as_altos
from ..param_groups import check_embeddings
from ..states import STATE_DTYPES, check_dtype
from . import precision_aware

NAME = "alto"

#: ALTO with alpha 0, under the name that its users know.
LAMB = "lamb"

NAMES = (NAME, LAMB)


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

    alto_betas: tuple[float, float, float] | None = None
    """Decays of the acceleration, the first and the second moment. None is (0.99, 0.9, 0.99), and for LAMB, which has
    no acceleration, 0.9 and 0.999."""

    alto_eps: float | tuple[float, float, float] = Hyperparameters.eps[0]
    """eps1, or the paper's (eps1, eps2, eps3). With eps1 alone, LAMB has no others."""

    alto_layerwise: str = Hyperparameters.layerwise
    """Which parameters get the layer-wise ratio: "decayed" (all but those with ``wd_mult`` 0: biases and
    vectors), "matrices", "all" or "none"."""

    alto_trust_clip: tuple[float, float] | None = Hyperparameters.trust_clip
    """(low, high), limits of the layer-wise ratio; None for no limits."""

    alto_vector_lr: float = Hyperparameters.vector_lr
    """Factor on the learning rate of parameters without the layer-wise ratio."""

    alto_embeddings: str = "ratio"
    """"adam": embeddings, and an output layer that shares their weights, go without the layer-wise ratio."""

    alto_bias_correction: bool = Hyperparameters.bias_correction
    """False is the paper's "ALTO Vanilla"."""

    alto_kernel: str = "auto"
    """See :class:`alto_distributed.ALTO`."""

    alto_diagnostics_every: int = 0
    """See :class:`alto_distributed.ALTO`."""

    alto_skip_nonfinite: bool = False
    """Skip a step, on all ranks, if any gradient is not finite. With a loss scaler (fp16) Megatron does that itself."""

    alto_grad_ema_dtype: str = "float32"
    """"bfloat16" keeps this state in 2 bytes a parameter instead of 4, with stochastic rounding."""

    alto_exp_avg_dtype: str = "float32"
    """The same for the first moment."""

    alto_adopt: bool = False
    """The checkpoint to load is one of Adam's: keep weights, moments and step count, start grad_ema from zero."""

    alto_checkpoint_format: str = ""
    """The format in which the distributed optimizer will be saved, if it is known: one that cannot be right for this
    model is then refused when the optimizer is built, not at the first save."""

    def __post_init__(self) -> None:
        check(self)
        super().__post_init__()

    def finalize(self) -> None:
        """Check the config again. Megatron-Bridge calls this after all overrides."""
        self.__post_init__()

    def provide(
        self,
        model_chunks: Any,
        config_overrides: Any = None,
        use_gloo_process_groups: bool = True,
        pg_collection: Any = None,
    ) -> Any:
        """Build the optimizer. Megatron-Bridge calls this instead of ``get_megatron_optimizer``.

        Args:
            model_chunks: the model's chunks on this rank, or the only one.
            config_overrides: learning rates and weight decay of some parameters.
            use_gloo_process_groups: whether there are gloo groups for checkpoints that are gathered on the host.
            pg_collection: the process groups, if they are not Megatron's global ones.

        Returns:
            Megatron's optimizer with ALTO inside.
        """
        chunks = list(model_chunks) if isinstance(model_chunks, (list, tuple)) else [model_chunks]
        # By keyword, and through the module: it is the function that register() has replaced.
        return core_optimizer.get_megatron_optimizer(
            config=self,
            model_chunks=chunks,
            config_overrides=config_overrides,
            use_gloo_process_groups=use_gloo_process_groups,
            pg_collection=pg_collection,
        )


def of(config: OptimizerConfig, name: str) -> Any:
    """A value of ALTO's own; a plain OptimizerConfig has the defaults."""
    if name == "alpha" and is_lamb(config):
        return 0.0
    if name in STATE_DTYPES and precision_aware.asks_for_bf16(config, name):
        return "bfloat16"
    value = getattr(config, f"alto_{name}", getattr(AltoOptimizerConfig, f"alto_{name}"))
    if name == "betas" and value is None:
        value = LAMB_BETAS if is_lamb(config) else Hyperparameters.betas
    return as_altos({name: value})[name] if is_lamb(config) and name in ("betas", "eps", "layerwise") else value


def is_lamb(config: OptimizerConfig) -> bool:
    return str(config.optimizer).lower() == LAMB


def check(config: OptimizerConfig) -> Hyperparameters:
    """The hyperparameters that a config stands for, or a ValueError that names what is wrong with it."""
    if config.lr is None:
        raise ValueError("ALTO under Megatron: lr is not set; give OptimizerConfig(lr=...) (--lr)")
    alpha = getattr(config, "alto_alpha", 0)
    if is_lamb(config) and alpha not in (0, AltoOptimizerConfig.alto_alpha):
        raise ValueError(f'alto_alpha={alpha} has no effect on LAMB; set optimizer="{NAME}" (--optimizer {NAME})')
    precision_aware.check(config)
    check_kernel(of(config, "kernel"))
    Diagnostics(of(config, "diagnostics_every"))
    for name in STATE_DTYPES:
        check_dtype(f"alto_{name}", of(config, name))
    for name in ("bias_correction", "skip_nonfinite", "adopt"):
        if not isinstance(of(config, name), bool):
            raise ValueError(f"alto_{name}={of(config, name)!r} must be True or False")
    check_embeddings(of(config, "embeddings"), "alto_embeddings")
    names = ("betas", "alpha", "eps", "layerwise", "bias_correction", "trust_clip", "vector_lr")
    return Hyperparameters(lr=config.lr, weight_decay=config.weight_decay, **{name: of(config, name) for name in names})


def warn_of_adams(config: OptimizerConfig) -> None:
    """A value that was set for Adam has no effect; better said than found out."""
    for name in ("adam_beta1", "adam_beta2", "adam_eps"):
        if getattr(config, name) != getattr(OptimizerConfig, name):
            ours = "alto_eps" if name == "adam_eps" else "alto_betas"
            warnings.warn(f"{name}={getattr(config, name)} has no effect on ALTO, which has {ours}", stacklevel=4)
    if config.use_precision_aware_optimizer and config.bf16 and getattr(config, "store_param_remainders", False):
        warnings.warn(
            "store_param_remainders has no effect on ALTO, which keeps float32 weights whole: 2 bytes a parameter more "
            "than bf16 weights with 16-bit remainders. Set it to False to leave this warning out",
            stacklevel=4,
        )
