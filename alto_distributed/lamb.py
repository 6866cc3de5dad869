"""LAMB, exact on every shard: ALTO without its exploration term, under its own name and with its usual defaults.

Provenance: "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (ICLR 2020), Algorithm 2.
docs/lamb.md says what to write for the options of other implementations.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from .errors import shown
from .hyperparameters import Hyperparameters, is_sequence
from .optimizer import ALTO
from .options import refusing_unknown

DEFAULT_BETAS = (0.9, 0.999)


class LAMB(ALTO):
    """LAMB: Adam's direction with decay, times |theta| / |direction| per whole parameter. No third state.

    Args:
        params: parameters or parameter groups; ``param_groups(model)`` makes the usual two. A group that says
            ``"decayed": True`` gets the ratio also without decay.
        lr: learning rate.
        betas: decays of the first and the second moment.
        eps: added to the root of the second moment. There is none in the ratio, which is 1 where a norm is 0.
        weight_decay: decay inside the update, scaled by the ratio.
        layerwise: "decayed", "matrices" or "none"; see :class:`ALTO`.
        bias_correction: correct the moments.
        trust_clip: (low, high), limits of the ratio; None for no limits.
        vector_lr: factor on lr for parameters without the ratio.
        kernel, diagnostics_every, skip_nonfinite, exp_avg_dtype, maximize: see :class:`ALTO`.
        foreach, fused, capturable, differentiable: see :class:`ALTO`.

    States, checkpoints and groups are those of ``ALTO(alpha=0)``: each loads into the other. In groups, ``betas`` has
    three numbers, the first of them unused.
    """

    @refusing_unknown
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        layerwise: str = "decayed",
        bias_correction: bool = True,
        trust_clip: Sequence[float] | None = None,
        vector_lr: float = 1.0,
        kernel: str = "auto",
        diagnostics_every: int = 0,
        skip_nonfinite: bool = False,
        exp_avg_dtype: str | torch.dtype = "float32",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            **as_altos({"betas": betas, "eps": eps, "layerwise": layerwise}),
            alpha=0.0,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
            trust_clip=trust_clip,
            vector_lr=vector_lr,
            kernel=kernel,
            diagnostics_every=diagnostics_every,
            skip_nonfinite=skip_nonfinite,
            exp_avg_dtype=exp_avg_dtype,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
            capturable=capturable,
            differentiable=differentiable,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):
            param_group.update(as_altos(param_group))
        super().add_param_group(param_group)

    def _checked(self, group: dict[str, Any]) -> Hyperparameters:
        group["eps"] = as_altos(group)["eps"]
        return super()._checked(group)

    def _check_saved(self, state_dict: Mapping[str, Any]) -> None:
        super()._check_saved(state_dict)
        for group in state_dict["param_groups"]:
            as_altos(group)


def as_altos(values: Mapping[str, Any]) -> dict[str, Any]:
    """LAMB's values in ALTO's form: three betas, three eps."""
    if values.get("alpha", 0) != 0:
        raise ValueError(f"alpha={shown(values['alpha'])} is not LAMB's: it has no acceleration. Use ALTO")
    if values.get("layerwise") == "all":
        raise ValueError(
            "layerwise='all' has no ratio of 1 for parameters that start at 0, which LAMB then never moves; leave it "
            'out, and write "decayed": True into a group to give all of its parameters the ratio'
        )
    altos: dict[str, Any] = {name: values[name] for name in ("betas", "eps", "layerwise") if name in values}
    if is_sequence(altos.get("betas"), 2):
        altos["betas"] = (Hyperparameters.betas[0], *altos["betas"])
    if isinstance(altos.get("eps"), numbers.Real):
        altos["eps"] = (altos["eps"], 0.0, 0.0)
    return altos
