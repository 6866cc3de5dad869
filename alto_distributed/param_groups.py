"""Split a model's parameters into those that are decayed and those that are not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .errors import did_you_mean, is_one_of, shown

#: How embeddings are moved: as other matrices, or by Adam's steps.
EMBEDDING_RULES = ("ratio", "adam")

#: Layers whose weights are embeddings. Plugins add those of their frameworks.
_EMBEDDINGS: list[type[nn.Module]] = [nn.Embedding, nn.EmbeddingBag]

_NORM_LAYERS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.modules.batchnorm._NormBase,
)


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """A parameter's shape. ``deepspeed.zero.Init`` leaves an empty vector, and the shape in ``ds_shape``."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def know_embedding(layer: type[nn.Module]) -> None:
    """Count a class of layers among the embeddings. Plugins call this for their frameworks' own."""
    if layer not in _EMBEDDINGS:
        _EMBEDDINGS.append(layer)


def embedding_parameters(models: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """The weights of embedding layers. An output layer that shares one has the same parameter."""
    for model in models:
        for module in model.modules():
            if isinstance(module, tuple(_EMBEDDINGS)):
                yield from module.parameters(recurse=False)


def check_embeddings(rule: Any, name: str = "embeddings") -> str:
    """One of EMBEDDING_RULES, or a ValueError."""
    if not is_one_of(rule, EMBEDDING_RULES):
        known = ", ".join(map(repr, EMBEDDING_RULES))
        raise ValueError(f"{name}={shown(rule)} is not one of {known}{did_you_mean(rule, EMBEDDING_RULES)}")
    return str(rule)


def param_groups(
    model_or_named_params: nn.Module | Iterable[tuple[str, torch.Tensor]],
    weight_decay: float | None = None,
    *,
    vector_lr: float | None = None,
    embeddings: str = "ratio",
) -> list[dict[str, Any]]:
    """Two parameter groups for ALTO, decayed and undecayed; three with ``embeddings="adam"``.

    Undecayed are norm layers, biases and whatever has fewer than two dimensions. Under the default
    ``layerwise="decayed"`` the undecayed group also goes without the layer-wise ratio, as in the
    paper's official code. Frozen parameters are left out, a tied one is listed once, an empty group
    is dropped.

    Args:
        model_or_named_params: a module, or pairs of name and parameter (a name that is or ends in
            "bias" marks a bias; norm layers can only be told from a module).
        weight_decay: of the decayed groups. By default they have none of their own, and get the optimizer's.
        vector_lr: factor on lr for parameters without the ratio, in every group. By default the optimizer's.
        embeddings: "ratio": embeddings are matrices as others. "adam": those of a module's embedding layers are in a
            group of their own that goes without the layer-wise ratio, with the same decay.

    Returns:
        A list to pass to ``ALTO``, to ``deepspeed.initialize(model_parameters=...)`` and the like. The groups have
        ``param_names``, as ``torch.optim`` keeps them.

    Example:
        >>> optimizer = ALTO(param_groups(model), lr=1e-2, weight_decay=1e-4)
    """
    in_norm_layers: set[int] = set()
    in_embeddings: set[int] = set()
    if check_embeddings(embeddings) == "adam":
        if not isinstance(model_or_named_params, nn.Module):
            raise ValueError('embeddings="adam" needs the module: pairs of name and parameter do not tell embeddings')
        in_embeddings.update(id(p) for p in embedding_parameters([model_or_named_params]))
    if isinstance(model_or_named_params, nn.Module):
        for module in model_or_named_params.modules():
            if isinstance(module, _NORM_LAYERS):
                in_norm_layers.update(id(p) for p in module.parameters(recurse=False))
        named: Iterable[tuple[str, torch.Tensor]] = model_or_named_params.named_parameters()
    else:
        named = model_or_named_params

    decayed: dict[str, torch.Tensor] = {}
    embedded: dict[str, torch.Tensor] = {}
    undecayed: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for pair in named:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], torch.Tensor)):
            raise ValueError(
                "param_groups takes a module or (name, parameter) pairs such as model.named_parameters(), "
                f"got an item of type {type(pair).__name__}"
            )
        name, parameter = pair
        if id(parameter) in seen or not parameter.requires_grad:
            continue
        seen.add(id(parameter))
        is_bias = name.rsplit(".", 1)[-1].endswith("bias")
        if name in decayed or name in embedded or name in undecayed:
            raise ValueError(f"two parameters have the name {name!r}; a name is one parameter's")
        is_undecayed = is_bias or len(whole_shape(parameter)) < 2 or id(parameter) in in_norm_layers
        (undecayed if is_undecayed else embedded if id(parameter) in in_embeddings else decayed)[name] = parameter

    common = {} if vector_lr is None else {"vector_lr": vector_lr}
    own = common if weight_decay is None else {**common, "weight_decay": weight_decay}
    groups: list[dict[str, Any]] = [
        {"params": list(decayed.values()), "param_names": list(decayed), **own},
        {"params": list(embedded.values()), "param_names": list(embedded), **own, "layerwise": "none"},
        {"params": list(undecayed.values()), "param_names": list(undecayed), **common, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
