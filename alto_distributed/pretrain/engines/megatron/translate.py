"""A run's parameters under Megatron's names and in its order, and back. Needs torch alone.

Both are the same function of the same numbers. Megatron keeps matrices as [out, in], and the projections of attention
by group: the queries that share a head of keys and values, that head of keys, that head of values. So tensor
parallelism can cut between groups.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from ...config.settings import Model


class _Names(NamedTuple):
    layers: str
    """Where the layers are in the run's model."""
    in_layer: dict[str, str]
    """A module of a layer in Megatron -> in the run's model."""
    outside: dict[str, str]
    transposed: bool
    """The run's model keeps matrices as [in, out]."""


_NAMES = {
    "gpt2": _Names(
        layers="transformer.h",
        in_layer={
            "input_layernorm": "ln_1",
            "self_attention.linear_qkv": "attn.c_attn",
            "self_attention.linear_proj": "attn.c_proj",
            "pre_mlp_layernorm": "ln_2",
            "mlp.linear_fc1": "mlp.c_fc",
            "mlp.linear_fc2": "mlp.c_proj",
        },
        outside={
            "embedding.word_embeddings.weight": "transformer.wte.weight",
            "embedding.position_embeddings.weight": "transformer.wpe.weight",
            "decoder.final_layernorm.weight": "transformer.ln_f.weight",
            "decoder.final_layernorm.bias": "transformer.ln_f.bias",
            "output_layer.weight": "transformer.wte.weight",  # a copy of it on the last pipeline stage
        },
        transposed=True,
    ),
    "llama": _Names(
        layers="model.layers",
        in_layer={
            "input_layernorm": "input_layernorm",
            "self_attention.linear_qkv": "self_attn.qkv_proj",
            "self_attention.linear_proj": "self_attn.o_proj",
            "pre_mlp_layernorm": "post_attention_layernorm",
            "mlp.linear_fc1": "mlp.gate_up_proj",
            "mlp.linear_fc2": "mlp.down_proj",
        },
        outside={
            "embedding.word_embeddings.weight": "model.embed_tokens.weight",
            "decoder.final_layernorm.weight": "model.norm.weight",
            "output_layer.weight": "lm_head.weight",
        },
        transposed=False,
    ),
}


def name_in_run(model: Model, name: str, layers_before: int = 0) -> str:
    """What the run's model calls a parameter of Megatron's.

    Args:
        model: the run's.
        name: Megatron's, such as ``decoder.layers.0.mlp.linear_fc1.weight``.
        layers_before: on earlier pipeline stages.
    """
    names = _NAMES[model.kind]
    found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if found is None and name in names.outside:
        return names.outside[name]
    if found is None or found[2] not in names.in_layer:
        raise ValueError(f"Megatron's GPTModel has a parameter {name!r} that {model.kind} has not")
    return f"{names.layers}.{int(found[1]) + layers_before}.{names.in_layer[found[2]]}.{found[3]}"


def to_megatron(model: Model, name: str, whole: torch.Tensor) -> torch.Tensor:
    """A whole parameter of the run's model in the order of Megatron's ``name``."""
    if whole.ndim == 2 and _NAMES[model.kind].transposed and name.startswith("decoder.layers."):
        whole = whole.t()
    if ".linear_qkv." not in name:
        return whole
    rest = (model.hidden // model.heads, *whole.shape[1:])
    q, k, v = torch.split(whole.reshape(-1, *rest), [model.heads, model.groups, model.groups])
    by_group = (q.reshape(model.groups, -1, *rest), k[:, None], v[:, None])
    return torch.cat(by_group, dim=1).flatten(0, 2)


def from_megatron(model: Model, name: str, whole: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`to_megatron`."""
    if ".linear_qkv." in name:
        by_group = whole.reshape(model.groups, -1, model.hidden // model.heads, *whole.shape[1:])
        q, k, v = torch.split(by_group, [model.heads // model.groups, 1, 1], dim=1)
        whole = torch.cat([part.flatten(0, 2) for part in (q, k, v)])
    transposed = whole.ndim == 2 and _NAMES[model.kind].transposed and name.startswith("decoder.layers.")
    return (whole.t() if transposed else whole).contiguous()
