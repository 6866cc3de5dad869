"""The optimizers that a run may name, and the options that each takes.

alto        see alto_distributed.ALTO
lamb        ALTO with alpha 0: the same layer-wise ratio, the same code
adamw       torch.optim.AdamW
adam        torch.optim.Adam: the decay is added to the gradient (L2)
lion        pytorch_optimizer's
adabelief   pytorch_optimizer's, with decoupled decay
ademamix    pytorch_optimizer's, with decoupled decay
muon        pytorch_optimizer's for matrices, with steps of AdamW's size; AdamW for embeddings and vectors
mars        pytorch_optimizer's (MARS-AdamW) for matrices, AdamW for vectors
soap        pytorch_optimizer's
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import did_you_mean, is_one_of, named, shown
from ...hyperparameters import DEFAULT_LR, Hyperparameters, check_beta, check_eps
from ...kernels import KERNELS
from ...param_groups import check_embeddings
from ...states import STATE_DTYPES, check_dtype

#: Settings of their own, and what no run wants.
_ELSEWHERE = ("lr", "weight_decay", "maximize")

_ALTO = {
    **{key: value for key, value in Hyperparameters().as_group().items() if key not in _ELSEWHERE},
    "embeddings": "ratio",
    "kernel": "auto",
    **dict.fromkeys(STATE_DTYPES, "float32"),
}

#: Name -> option -> what it is if the run does not say.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "alto": _ALTO,
    "lamb": {
        **{key: value for key, value in _ALTO.items() if key not in ("alpha", "grad_ema_dtype")},
        "betas": _ALTO["betas"][1:],
    },
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8},
    "adam": {"betas": (0.9, 0.999), "eps": 1e-8},
    "lion": {"betas": (0.9, 0.99)},
    "adabelief": {"betas": (0.9, 0.999), "eps": 1e-16},
    "ademamix": {"betas": (0.9, 0.999, 0.9999), "eps": 1e-8, "alpha": 5.0},
    "muon": {"betas": (0.9, 0.95), "eps": 1e-10, "momentum": 0.95},
    "mars": {"betas": (0.95, 0.99), "eps": 1e-8, "gamma": 0.025},
    "soap": {"betas": (0.95, 0.95), "eps": 1e-8, "precondition_frequency": 10},
}

#: The rate of an optimizer for which a run names none. Those of alto, lamb, adamw and adam are the paper's for GPT-2 at
#: batch 4096; the others are the libraries' own.
DEFAULT_RATES: Mapping[str, float] = {
    "alto": DEFAULT_LR,
    "lamb": DEFAULT_LR,
    "adamw": 8e-4,
    "adam": 6e-4,
    "lion": 1e-4,
    "adabelief": 1e-3,
    "ademamix": 1e-3,
    "muon": 8e-4,  # AdamW's, for its steps are scaled to AdamW's size
    "mars": 3e-3,
    "soap": 3e-3,
}

#: The decay of an optimizer for which a run names none: ALTO's own; torch's for adam and adamw; pytorch_optimizer's for
#: adabelief and soap; AdamW's for those whose papers compare themselves with it at equal decay.
DEFAULT_DECAYS: Mapping[str, float] = {
    "alto": Hyperparameters.weight_decay,
    "lamb": Hyperparameters.weight_decay,
    "adamw": 1e-2,
    "adam": 0.0,
    "lion": 1e-2,
    "adabelief": 0.0,
    "ademamix": 1e-2,
    "muon": 1e-2,
    "mars": 1e-2,
    "soap": 1e-2,
}

#: Options that are numbers from 0 on.
_FROM_ZERO = {"ademamix": ("alpha",), "mars": ("gamma",)}

NAMES = tuple(_DEFAULTS)

#: Those that look at whole parameters, and take pieces of them for parameters.
WHOLE_NAMES = ("muon", "mars", "soap")

#: Those that :class:`alto_distributed.ALTO` is.
ALTO_NAMES = ("alto", "lamb")


def default_options(name: str) -> dict[str, Any]:
    """The options of an optimizer and their defaults. ``lr`` and ``weight_decay`` are settings of their own.

    Raises:
        ValueError: there is no such optimizer.
    """
    if name not in _DEFAULTS:
        raise ValueError(f"optimizer.name={name!r} is not one of {', '.join(NAMES)}{did_you_mean(name, NAMES)}")
    return dict(_DEFAULTS[name])


def resolve(name: str, lr: float, weight_decay: float, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """What the optimizer's class is called with; for alto and lamb these are arguments of ALTO.

    Raises:
        ValueError: the optimizer or one of its options does not exist or has no such value.
    """
    known = default_options(name)
    for option in chosen:
        if option in ("lr", "weight_decay"):
            raise ValueError(f"optimizer.options.{option} has a place of its own: set optimizer.{option}")
        if option == "alpha" and name == "lamb":
            raise ValueError("optimizer.options.alpha: lamb is ALTO with alpha 0; for another alpha name alto")
        if option not in known:
            raise ValueError(
                f"optimizer.options.{named(option)} does not exist for {name}{did_you_mean(option, list(known))} "
                f"(it has: {', '.join(known)})"
            )
    options = {**known, **chosen}
    options["betas"] = check_run_betas(name, options["betas"])
    if "eps" in options:
        options["eps"] = _eps(name, options["eps"])
    options.update(lr=lr, weight_decay=weight_decay)
    for option in _FROM_ZERO.get(name, ()):
        options[option] = _number(option, options[option])
        if not isinstance(options[option], (int, float)) or not 0 <= options[option] < math.inf:
            raise ValueError(f"optimizer.options.{option}={options[option]!r} must be a number from 0 on for {name}")
    if name == "muon":
        options["momentum"] = check_beta("optimizer.options.momentum", _number("momentum", options["momentum"]))
    if name == "mars" and not lr:
        raise ValueError("optimizer.lr=0 is not possible with mars, which divides by it")
    if name == "soap":
        every = options["precondition_frequency"]
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"optimizer.options.precondition_frequency={every!r} must be a whole number from 1 on")
    if name not in ALTO_NAMES:
        return options
    if name == "lamb":
        # Without alpha there is no acceleration, and no matter what its decay is.
        options.update(alpha=0.0, betas=(_ALTO["betas"][0], *options["betas"]))
    options["alpha"] = _number("alpha", options["alpha"])
    options["vector_lr"] = _number("vector_lr", options["vector_lr"])
    check_embeddings(options["embeddings"], "optimizer.options.embeddings")
    if not is_one_of(options["kernel"], KERNELS):
        raise ValueError(
            f"optimizer.options.kernel={shown(options['kernel'])} is not one of {', '.join(KERNELS)}"
            f"{did_you_mean(options['kernel'], KERNELS)}"
        )
    others = {option: options.pop(option) for option in ("embeddings", "kernel", *STATE_DTYPES) if option in options}
    for option in others.keys() & STATE_DTYPES:
        check_dtype(f"optimizer.options.{option}", others[option])
    hyper = Hyperparameters(**options).as_group()
    del hyper["maximize"]
    return {**hyper, **others}


def check_run_betas(name: str, value: Any) -> tuple[float, ...]:
    """The betas of an optimizer, as many as it has; a text is a number that YAML did not know."""
    wanted = 3 if name in ("alto", "ademamix") else 2
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != wanted:
        hint = " (those of the first and the second moment; ALTO's beta2 and beta3)" if name == "lamb" else ""
        raise ValueError(f"optimizer.options.betas={value!r} must be {wanted} numbers for {name}{hint}")
    return tuple(
        check_beta(f"optimizer.options.betas[{i}]", _number(f"betas[{i}]", beta)) for i, beta in enumerate(value)
    )


def _eps(name: str, value: Any) -> Any:
    several = isinstance(value, Sequence) and not isinstance(value, str)
    if several and name in ALTO_NAMES:
        return check_eps([_number(f"eps[{i}]", eps) for i, eps in enumerate(value)])
    if several:
        raise ValueError(f"optimizer.options.eps={value!r} must be one number for {name}")
    eps = check_eps(_number("eps", value))
    return eps if name in ALTO_NAMES else eps[0]


def _number(option: str, value: Any) -> Any:
    """YAML reads 1e-8 as text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"optimizer.options.{option}={value!r} must be a number") from None
    return value
