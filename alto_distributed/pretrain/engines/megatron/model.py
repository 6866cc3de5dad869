"""A run's model as megatron-core's GPTModel, with the weights of the run's (:mod:`.translate`)."""

from __future__ import annotations

import functools
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
from ...llama import NORM_EPS
from .checks import check_layout
from .translate import name_in_run, to_megatron


def transformer_config(run: Run, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's configuration of a run's model."""
    m, layout = run.model, run.megatron
    check_layout(run)
    kinds: dict[str, dict[str, Any]] = {
        "gpt2": {"activation_func": functools.partial(F.gelu, approximate="tanh")},
        "llama": {
            "activation_func": F.silu,
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "normalization": "RMSNorm",
            "layernorm_epsilon": NORM_EPS,
            "num_query_groups": m.groups,
            "bias_activation_fusion": False,
        },
    }
    return TransformerConfig(
        **kinds[m.kind],
        ffn_hidden_size=m.inner,
        num_layers=m.layers,
        hidden_size=m.hidden,
        num_attention_heads=m.heads,
        hidden_dropout=m.dropout,
        attention_dropout=m.dropout,
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
        _mark(self, config)


class RootMeanSquareNorm(torch.nn.RMSNorm):
    """The same for Llama's."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = NORM_EPS) -> None:
        super().__init__(hidden_size, eps=eps)
        _mark(self, config)


def _mark(norm: torch.nn.Module, config: TransformerConfig) -> None:
    for param in norm.parameters():
        param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Megatron's own layers on this pipeline stage, with our norms before, between and after them."""
    norm = RootMeanSquareNorm if config.normalization == "RMSNorm" else Norm
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=norm)


def build_model(run: Run, config: TransformerConfig, weights: Mapping[str, torch.Tensor]) -> GPTModel:
    """This rank's part of the model, with its part of the run's weights."""
    m = run.model
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(config),
        vocab_size=m.vocabulary,
        max_sequence_length=m.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=m.kind == "gpt2",
        position_embedding_type="learned_absolute" if m.kind == "gpt2" else "rope",
        rotary_base=m.rope_theta,
    )
    before = layers_before(model)
    with torch.no_grad():
        for name, param in model.named_parameters():
            whole = to_megatron(m, name, weights[name_in_run(m, name, before)])
            param.copy_(_piece(whole, param, is_gated=m.kind == "llama" and ".linear_fc1." in name))
    return model


def layers_before(model: GPTModel) -> int:
    """Layers on earlier pipeline stages."""
    return int(model.decoder.layers[0].layer_number) - 1 if len(model.decoder.layers) else 0


def _piece(whole: torch.Tensor, param: Any, is_gated: bool) -> torch.Tensor:
    """What tensor parallelism leaves of a parameter on this rank: of gate and up together, a piece of each."""
    if not getattr(param, "tensor_model_parallel", False):
        return whole
    group, dim = parallel_state.get_tensor_model_parallel_group(), int(param.partition_dim)
    parts = torch.chunk(whole, 2, dim) if is_gated else (whole,)
    return torch.cat([torch.chunk(part, int(group.size()), dim)[int(group.rank())] for part in parts], dim)
