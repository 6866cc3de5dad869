"""From the JSON's ``optimizer`` entry to an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..adaptor import E
from ..errors import shown
from ..hyperparameters import Hyperparameters, refuse_unknown
from ..lamb import LAMB
from ..optimizer import ALTO
from ..param_groups import check_embeddings, embedding_parameters, whole_shape

_SGD_NAMES = ("lr", "momentum", "dampening", "weight_decay", "nesterov")


class ESGD(E):
    """SGD with the adapted gradient. It is elementwise, so any shard of it is exact.

    Args:
        params: parameters or groups.
        lr: learning rate.
        alpha: weight of the acceleration.
        beta1: decay of the acceleration.
        **sgd: ``momentum``, ``dampening``, ``weight_decay`` and ``nesterov`` of ``torch.optim.SGD``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        alpha: float = Hyperparameters.alpha,
        beta1: float = Hyperparameters.betas[0],
        **sgd: Any,
    ) -> None:
        known = (*_SGD_NAMES, "alpha", "beta1")
        refuse_unknown((name for name in sgd if name not in known), known)
        super().__init__(torch.optim.SGD(params, lr=lr, **sgd), alpha, beta1)


def _eadamw(params: Any, **options: Any) -> ALTO:
    if options.setdefault("layerwise", "none") != "none":
        raise ValueError('EAdamW is ALTO with layerwise="none"; for another setting use "type": "ALTO"')
    return ALTO(params, **options)


#: Lower-case name in the JSON -> what builds it.
BUILDERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "alto": ALTO,
    "eadamw": _eadamw,
    "esgd": ESGD,
    "alto_lamb": LAMB,
}

#: DeepSpeed has a Lamb of its own. The key of its "params" and the value with which ours is meant.
_ASKED = ("implementation", "alto")

#: A key of "params" that says how bare parameters become groups, and the names that take it.
_EMBEDDINGS = "embeddings"
_KNOWS_EMBEDDINGS = ("alto", "alto_lamb")

#: The keys that DeepSpeed reads from the JSON's "optimizer".
_ENTRY = ("type", "params", "legacy_fusion")

#: Types that an engine hands flat shards to, and that this folder makes exact.
OPTIMIZERS = (ALTO, LAMB, ESGD)


def build(name: str, params: Any, options: Mapping[str, Any]) -> torch.optim.Optimizer:
    """The optimizer that the JSON names, or a ValueError that names what is wrong with it."""
    if "max_grad_norm" in options:
        raise ValueError(
            f'"max_grad_norm" is not a parameter of {name}: set "gradient_clipping" at the top of the DeepSpeed config'
        )
    for key, value in options.items():
        if isinstance(value, str) and value == "auto" and key != "kernel":
            raise ValueError(
                f'"{key}": "auto" of {name} is for Hugging Face\'s Trainer and Accelerate, which put in a value; write '
                "one, or leave it out"
            )
    if name in _KNOWS_EMBEDDINGS:  # the groups were made by it
        options = {key: value for key, value in options.items() if key != _EMBEDDINGS}
    return BUILDERS[name](params, **options)


def refuse_other_than_object(entry: Any) -> None:
    """Raise if the JSON's ``optimizer`` is one of ours and its "params" are no object, on which DeepSpeed fails."""
    if isinstance(entry, dict) and str(entry.get("type")).lower() in BUILDERS:
        params = entry.get("params")
        if params is not None and not isinstance(params, dict):
            raise ValueError(
                f'"params": {shown(params)} of the optimizer {entry["type"]} should be an object such as '
                '{"lr": 0.01}; write one, or leave it out for the defaults'
            )


def refuse_misplaced(config: Any) -> None:
    """Raise if the JSON's ``optimizer`` has keys that DeepSpeed does not read: a hyperparameter beside "params"."""
    entry = config._param_dict["optimizer"]
    for key in entry:
        if key not in _ENTRY:
            raise ValueError(
                f'"{key}": {shown(entry[key])} of the optimizer {entry["type"]} is not among its "params", and would '
                f'be ignored; write "optimizer": {{"type": "{entry["type"]}", "params": {{"{key}": ...}}}}'
            )


def rename_lamb(config: Any) -> None:
    """``"type": "LAMB"`` becomes ours if it was asked for; else it is DeepSpeed's, as it always was."""
    key, value = _ASKED
    options = config.optimizer_params or {}
    if str(config.optimizer_name).lower() != "lamb":
        return
    if key in config._param_dict["optimizer"]:
        refuse_misplaced(config)
    if key in options:
        if options[key] != value:
            raise ValueError(f'"{key}": {shown(options[key])} of LAMB is not "{value}"; leave it out for DeepSpeed\'s')
        config.optimizer_name = "alto_lamb"
        config.optimizer_params = {name: given for name, given in options.items() if name != key}


def split_bare_parameters(
    parameters: list[Any], options: Mapping[str, Any] | None = None, model: torch.nn.Module | None = None
) -> list[Any]:
    """Bare parameters into a decayed group and an undecayed one (fewer than two dimensions); groups as they are.

    Args:
        parameters: bare parameters, or groups.
        options: the JSON's ``params``; with ``"embeddings": "adam"`` in it, embeddings are a group without the ratio.
        model: the one that the parameters are of.

    Raises:
        ValueError: there are groups, which say themselves what is in them, and ``"embeddings": "adam"``.
    """
    rule = check_embeddings((options or {}).get(_EMBEDDINGS, "ratio"))
    if any(isinstance(p, dict) for p in parameters):
        if rule == "adam":
            raise ValueError(
                f'"{_EMBEDDINGS}": "adam" has no effect on parameter groups that are given; leave it out of the JSON, '
                "and make the groups with param_groups(model, embeddings='adam')"
            )
        return parameters
    embeddings = {id(p) for p in embedding_parameters([model])} if rule == "adam" and model is not None else set()
    trainable = [p for p in parameters if p.requires_grad]
    matrices = [p for p in trainable if len(whole_shape(p)) >= 2]
    decayed = [p for p in matrices if id(p) not in embeddings]
    embedded = [p for p in matrices if id(p) in embeddings]
    undecayed = [p for p in trainable if len(whole_shape(p)) < 2]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "name": "decayed"},
        {"params": embedded, "name": "embeddings", "layerwise": "none"},
        {"params": undecayed, "name": "undecayed", "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
