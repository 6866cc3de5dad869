"""The optimizer that a run names (:mod:`.config.optimizer_options` lists them), built.

All of them get the same two parameter groups; muon has a third, of embeddings. alto and lamb look at whole parameters,
and need an engine that knows them. muon, mars and soap do so too, and know no shards. The others treat each element by
itself, so that they are exact on any shard that an engine cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from .. import presets
from ..extras import require
from ..hyperparameters import HYPERPARAMETER_NAMES, Hyperparameters
from ..optimizer import ALTO
from ..param_groups import param_groups
from .config.optimizer_options import ALTO_NAMES, NAMES, default_options
from .config.settings import Run

__all__ = [
    "ALTO_NAMES",
    "NAMES",
    "THIRD_PARTY",
    "arguments",
    "build_groups",
    "build_optimizer",
    "default_options",
    "describe",
]

#: Those that pytorch_optimizer brings.
THIRD_PARTY = {
    "lion": "Lion",
    "adabelief": "AdaBelief",
    "ademamix": "AdEMAMix",
    "muon": "Muon",
    "mars": "MARS",
    "soap": "SOAP",
}


def arguments(run: Run) -> dict[str, Any]:
    """What the optimizer's class is called with: ``lr``, ``weight_decay`` and all options.

    For alto and lamb these are ALTO's, with what the sections ``logs`` and ``training`` say for it.

    Raises:
        ValueError: the optimizer or one of its options does not exist or has no such value.
    """
    chosen = dict(run.optimizer.resolved)
    if run.optimizer.name in ALTO_NAMES:
        chosen.update(diagnostics_every=run.logs.diagnostics_every, skip_nonfinite=run.training.skip_nonfinite)
    return chosen


def describe(run: Run) -> str:
    """The run's optimizer in a line; for alto and lamb with what alpha and the betas amount to."""
    chosen = run.optimizer.resolved
    line = f"{run.optimizer.name}, lr {run.optimizer.lr:g}, decay {run.optimizer.weight_decay:g}"
    if run.optimizer.name not in ALTO_NAMES:
        return line
    hyper = Hyperparameters(**{name: chosen[name] for name in HYPERPARAMETER_NAMES if name in chosen})
    return f"{line}, {presets.describe(hyper)}"


def build_groups(run: Run, model: nn.Module) -> list[dict[str, Any]]:
    """The decayed parameters and the others: norm layers, biases and whatever has fewer than two dimensions.

    With alto and lamb, embeddings may be a group of their own. With muon they are.
    """
    if run.optimizer.name == "muon":
        matrices, *others = param_groups(model, run.optimizer.weight_decay, embeddings="adam")
        groups = [{**matrices, "use_muon": True}, *({**group, "use_muon": False} for group in others)]
        return [{key: value for key, value in group.items() if key != "layerwise"} for group in groups]
    return param_groups(model, run.optimizer.weight_decay, embeddings=arguments(run).get("embeddings", "ratio"))


def build_optimizer(run: Run, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """The run's optimizer over ``groups``.

    Raises:
        ValueError: see :func:`arguments`; or the library that has it is not installed.
    """
    name, options = run.optimizer.name, arguments(run)
    if name in ALTO_NAMES:
        del options["embeddings"]  # the groups were made by it
        return ALTO(groups, **options)
    if name in THIRD_PARTY:
        require("pytorch_optimizer")
        import pytorch_optimizer

        optimizer = getattr(pytorch_optimizer, THIRD_PARTY[name])(groups, **_theirs(name, options))
        optimizer.register_step_pre_hook(_steps_of_tensors_to_groups)
        optimizer.register_step_post_hook(_steps_of_groups_to_tensors)
        return cast(torch.optim.Optimizer, optimizer)
    adam = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
    return adam(groups, **options)


def _theirs(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """What pytorch_optimizer calls the options. Decay is decoupled: the default of most, and in AdEMAMix's paper."""
    if name == "soap":
        return options  # it knows no other decay
    if name == "muon":
        betas, eps = options.pop("betas"), options.pop("eps")
        adam = {"adamw_lr": options["lr"], "adamw_betas": betas, "adamw_eps": eps, "adamw_wd": options["weight_decay"]}
        options = {**options, **adam, "use_adjusted_lr": True}
    if name == "mars":
        options = {**options, "lr_1d": options["lr"], "weight_decay_1d": 0.0}
    return {**options, "weight_decouple": True}


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
