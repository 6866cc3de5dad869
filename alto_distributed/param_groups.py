"""Split a model's parameters into those that are decayed and those that are not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

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


def param_groups(
    model_or_named_params: nn.Module | Iterable[tuple[str, torch.Tensor]],
    weight_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Two parameter groups for ALTO: decayed, and undecayed.

    Undecayed are norm layers, biases and whatever has fewer than two dimensions. Under the default
    ``layerwise="decayed"`` the undecayed group also goes without the layer-wise ratio, as in the
    paper's official code. Frozen parameters are left out, a tied one is listed once, an empty group
    is dropped.

    Args:
        model_or_named_params: a module, or pairs of name and parameter (a name that is or ends in
            "bias" marks a bias; norm layers can only be told from a module).
        weight_decay: of the decayed group. By default the group has none of its own, and gets the optimizer's.

    Returns:
        A list to pass to ``ALTO``, to ``deepspeed.initialize(model_parameters=...)`` and the like. The groups have
        ``param_names``, as ``torch.optim`` keeps them.

    Example:
        >>> optimizer = ALTO(param_groups(model), lr=1e-2, weight_decay=1e-4)
    """
    in_norm_layers: set[int] = set()
    if isinstance(model_or_named_params, nn.Module):
        for module in model_or_named_params.modules():
            if isinstance(module, _NORM_LAYERS):
                in_norm_layers.update(id(p) for p in module.parameters(recurse=False))
        named: Iterable[tuple[str, torch.Tensor]] = model_or_named_params.named_parameters()
    else:
        named = model_or_named_params

    decayed: dict[str, torch.Tensor] = {}
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
        if name in decayed or name in undecayed:
            raise ValueError(f"two parameters have the name {name!r}; a name is one parameter's")
        is_undecayed = is_bias or len(whole_shape(parameter)) < 2 or id(parameter) in in_norm_layers
        (undecayed if is_undecayed else decayed)[name] = parameter

    own = {} if weight_decay is None else {"weight_decay": weight_decay}
    groups: list[dict[str, Any]] = [
        {"params": list(decayed.values()), "param_names": list(decayed), **own},
        {"params": list(undecayed.values()), "param_names": list(undecayed), "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
