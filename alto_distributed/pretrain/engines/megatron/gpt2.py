"""GPT-2 as megatron-core's GPTModel, with the weights of transformers' GPT2LMHeadModel.

Both are the same function of the same numbers under other names: Megatron keeps matrices as [out, in] and
the three projections of attention interleaved by head, so that tensor parallelism can cut whole heads.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch.nn import functional as F

from ...config.settings import Run

#: A parameter of a layer in Megatron -> in transformers. Matrices there are transposed.
_LAYER = {
    "input_layernorm": "ln_1",
    "self_attention.linear_qkv": "attn.c_attn",
    "self_attention.linear_proj": "attn.c_proj",
    "pre_mlp_layernorm": "ln_2",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}
_OUTSIDE = {
    "embedding.word_embeddings.weight": "wte.weight",
    "embedding.position_embeddings.weight": "wpe.weight",
    "decoder.final_layernorm.weight": "ln_f.weight",
    "decoder.final_layernorm.bias": "ln_f.bias",
    "output_layer.weight": "wte.weight",
}


def transformer_config(run: Run, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's configuration of a run's model."""
    m, layout = run.model, run.megatron
    if m.vocabulary % layout.tensor_parallel:
        raise ValueError(
            f"model.vocabulary={m.vocabulary} does not divide over megatron.tensor_parallel={layout.tensor_parallel}; "
            f"set it to {-(-m.vocabulary // (128 * layout.tensor_parallel)) * 128 * layout.tensor_parallel}"
        )
    return TransformerConfig(
        num_layers=m.layers,
        hidden_size=m.hidden,
        num_attention_heads=m.heads,
        hidden_dropout=m.dropout,
        attention_dropout=m.dropout,
        activation_func=functools.partial(F.gelu, approximate="tanh"),
        init_method_std=m.init_std,
        tensor_model_parallel_size=layout.tensor_parallel,
        pipeline_model_parallel_size=layout.pipeline_parallel,
        sequence_parallel=layout.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        use_cpu_initialization=True,
        recompute_granularity="full" if run.training.recompute else None,
        recompute_method="uniform" if run.training.recompute else None,
        recompute_num_layers=1 if run.training.recompute else None,
        # Fusions need Apex or TransformerEngine, or another form of the activation; the plain ones are everywhere.
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
    )


class Norm(torch.nn.LayerNorm):
    """torch's norm, with the mark by which Megatron sums its gradients over the ranks of sequence parallelism.

    Without Apex, Megatron's own wrapper of torch's norm refuses sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps)
        for param in self.parameters():
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Megatron's own layers on this pipeline stage, with :class:`Norm` before, between and after them."""
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=Norm)


def build_model(run: Run, config: TransformerConfig, weights: Mapping[str, torch.Tensor]) -> GPTModel:
    """This rank's part of the model, with its part of transformers' weights."""
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(config),
        vocab_size=run.model.vocabulary,
        max_sequence_length=run.model.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        position_embedding_type="learned_absolute",
    )
    before = model.decoder.layers[0].layer_number - 1 if len(model.decoder.layers) else 0
    with torch.no_grad():
        for name, param in model.named_parameters():
            whole = _translated(name, before, weights, run.model.heads)
            param.copy_(_piece(whole, param))
    return model


def _translated(name: str, layers_before: int, weights: Mapping[str, torch.Tensor], heads: int) -> torch.Tensor:
    """The whole parameter that Megatron calls ``name`` on this pipeline stage."""
    in_layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if in_layer is None:
        if name not in _OUTSIDE:
            raise ValueError(f"Megatron's GPTModel has a parameter {name!r} that GPT-2 has not")
        return weights[f"transformer.{_OUTSIDE[name]}"]
    index, module, kind = in_layer.groups()
    if module not in _LAYER:
        raise ValueError(f"Megatron's GPTModel has a parameter {name!r} that GPT-2 has not")
    whole = weights[f"transformer.h.{int(index) + layers_before}.{_LAYER[module]}.{kind}"]
    if whole.ndim == 2:
        whole = whole.t()
    if (
        module == "self_attention.linear_qkv"
    ):  # [q of all heads, k, v] -> [q, k, v] of the first head, of the second ...
        by_kind = whole.reshape(3, heads, -1, *whole.shape[1:])
        whole = by_kind.transpose(0, 1).reshape(whole.shape)
    return whole


def _piece(whole: torch.Tensor, param: Any) -> torch.Tensor:
    """What tensor parallelism leaves of a parameter on this rank."""
    if not getattr(param, "tensor_model_parallel", False):
        return whole
    group = parallel_state.get_tensor_model_parallel_group()
    pieces = torch.chunk(whole, int(group.size()), int(param.partition_dim))
    return pieces[int(group.rank())]
