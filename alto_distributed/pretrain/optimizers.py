"""The optimizers that a run may name, with the options that each takes.

    alto        see alto_distributed.ALTO
    lamb        ALTO with alpha 0: the same layer-wise ratio, the same code
    adamw       torch.optim.AdamW
    adam        torch.optim.Adam: the decay is added to the gradient (L2)
    lion        pytorch_optimizer's
    adabelief   pytorch_optimizer's, with decoupled decay

All of them get the same two parameter groups. All but alto and lamb treat each element by itself, so that they are
exact on any shard that an engine cuts; alto and lamb look at whole parameters, and need an engine that knows them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from ..errors import did_you_mean, named
from ..extras import require
from ..hyperparameters import Hyperparameters, check_beta, check_eps
from ..optimizer import ALTO
from ..param_groups import param_groups
from ..states import check_dtype
from .config.settings import Run

#: Options of ALTO's that choose the precision of a state.
STATE_DTYPES = ("grad_ema_dtype", "exp_avg_dtype")

_ALTO = {
    **{key: value for key, value in Hyperparameters().as_group().items() if key not in ("lr", "weight_decay")},
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

#: Those that pytorch_optimizer brings.
THIRD_PARTY = {"lion": "Lion", "adabelief": "AdaBelief"}


def default_options(name: str) -> dict[str, Any]:
    """The options of an optimizer and their defaults. ``lr`` and ``weight_decay`` are settings of their own.

    Raises:
        ValueError: there is no such optimizer.
    """
    if name not in _DEFAULTS:
        raise ValueError(f"optimizer.name={name!r} is not one of {', '.join(NAMES)}{did_you_mean(name, NAMES)}")
    return dict(_DEFAULTS[name])


def arguments(run: Run) -> dict[str, Any]:
    """What the optimizer's class is called with: ``lr``, ``weight_decay`` and all options, checked.

    For alto and lamb these are ALTO's, with what the sections ``logs`` and ``training`` say for it.

    Raises:
        ValueError: the optimizer or one of its options does not exist or has no such value.
    """
    name, known = run.optimizer.name, default_options(run.optimizer.name)
    for option in run.optimizer.options:
        if option in ("lr", "weight_decay"):
            raise ValueError(f"optimizer.options.{option} has a place of its own: set optimizer.{option}")
        if option == "alpha" and name == "lamb":
            raise ValueError("optimizer.options.alpha: lamb is ALTO with alpha 0; for another alpha name alto")
        if option not in known:
            raise ValueError(
                f"optimizer.options.{named(option)} does not exist for {name}{did_you_mean(option, list(known))} "
                f"(it has: {', '.join(known)})"
            )
    options = {**known, **run.optimizer.options}
    options["betas"] = _betas(name, options["betas"])
    if "eps" in options:
        options["eps"] = _eps(name, options["eps"])
    options.update(lr=run.optimizer.lr, weight_decay=run.optimizer.weight_decay)
    if name not in ALTO_NAMES:
        return options
    if name == "lamb":
        # Without alpha there is no acceleration, and no matter what its decay is.
        options.update(alpha=0.0, betas=(_ALTO["betas"][0], *options["betas"]))
    options["alpha"] = _number("alpha", options["alpha"])
    others = {option: options.pop(option) for option in ("kernel", *STATE_DTYPES) if option in options}
    for option in others.keys() & STATE_DTYPES:
        check_dtype(f"optimizer.options.{option}", others[option])
    others.update(diagnostics_every=run.logs.diagnostics_every, skip_nonfinite=run.training.skip_nonfinite)
    return {**Hyperparameters(**options).as_group(), **others}


def build_groups(run: Run, model: nn.Module) -> list[dict[str, Any]]:
    """The decayed parameters and the others: norm layers, biases and whatever has fewer than two dimensions."""
    return param_groups(model, run.optimizer.weight_decay)


def build_optimizer(run: Run, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """The run's optimizer over ``groups``.

    Raises:
        ValueError: see :func:`arguments`; or the library that has it is not installed.
    """
    name, options = run.optimizer.name, arguments(run)
    if name in ALTO_NAMES:
        return ALTO(groups, **options)
    if name in THIRD_PARTY:
        require("pytorch_optimizer")
        import pytorch_optimizer

        optimizer = getattr(pytorch_optimizer, THIRD_PARTY[name])(groups, **options)
        optimizer.register_step_pre_hook(_steps_of_tensors_to_groups)
        optimizer.register_step_post_hook(_steps_of_groups_to_tensors)
        return cast(torch.optim.Optimizer, optimizer)
    adam = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
    return adam(groups, **options)


def _steps_of_tensors_to_groups(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """pytorch_optimizer counts steps in the groups, all of them, at every ``step()``. ZeRO stage 3 calls ``step()`` for
    each piece of each group, so that count would run ahead, and the bias correction with it."""
    for group in optimizer.param_groups:
        if group["params"]:
            group["step"] = int(optimizer.state[group["params"][0]].get("step", 0))


def _steps_of_groups_to_tensors(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if optimizer.state[param]:
                optimizer.state[param]["step"] = group["step"]


# -- values ----------------------------------------------------------------------------------------------


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
