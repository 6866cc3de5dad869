"""The optimizers that a run may name, and the options that each takes.

alto        see alto_distributed.ALTO
lamb        ALTO with alpha 0: the same layer-wise ratio, the same code
adamw       torch.optim.AdamW
adam        torch.optim.Adam: the decay is added to the gradient (L2)
lion        pytorch_optimizer's
adabelief   pytorch_optimizer's, with decoupled decay
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import did_you_mean, named
from ...hyperparameters import Hyperparameters, check_beta, check_eps
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
}

NAMES = tuple(_DEFAULTS)

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
    options["betas"] = _betas(name, options["betas"])
    if "eps" in options:
        options["eps"] = _eps(name, options["eps"])
    options.update(lr=lr, weight_decay=weight_decay)
    if name not in ALTO_NAMES:
        return options
    if name == "lamb":
        # Without alpha there is no acceleration, and no matter what its decay is.
        options.update(alpha=0.0, betas=(_ALTO["betas"][0], *options["betas"]))
    options["alpha"] = _number("alpha", options["alpha"])
    options["vector_lr"] = _number("vector_lr", options["vector_lr"])
    check_embeddings(options["embeddings"], "optimizer.options.embeddings")
    others = {option: options.pop(option) for option in ("embeddings", "kernel", *STATE_DTYPES) if option in options}
    for option in others.keys() & STATE_DTYPES:
        check_dtype(f"optimizer.options.{option}", others[option])
    hyper = Hyperparameters(**options).as_group()
    del hyper["maximize"]
    return {**hyper, **others}


def _betas(name: str, value: Any) -> tuple[float, ...]:
    wanted = 3 if name == "alto" else 2
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
