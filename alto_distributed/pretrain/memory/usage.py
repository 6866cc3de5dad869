"""Bytes that a run will need on each rank, from its settings alone; and what it has needed in the end.

Weights, gradients, master weights, states and buffers are those of :mod:`.footprint`; activations are a rough figure,
for orientation.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from typing import Any

import torch

from ...errors import shown
from ...hyperparameters import Hyperparameters
from ..config.settings import Model, Run
from ..engines.deepspeed import json_settings as deepspeed_json
from .footprint import STATES, Footprint, Setting, footprint
from .shapes import count, of_model


def parameter_count(run: Run) -> int:
    """Of the whole model: embeddings (GPT-2's output is tied to one), layers, last norm."""
    return count(of_model(run.model))


def estimate(run: Run, world: int) -> tuple[Footprint, float]:
    """What one of ``world`` ranks needs, and activations beside it."""
    setting = setting_of(run, world)
    layout = run.megatron
    cut = (layout.tensor_parallel, layout.pipeline_parallel) if run.engine == "megatron" else ()
    return footprint(setting, of_model(run.model, *cut)), activations(run) / run.model_parallel


def setting_of(run: Run, world: int) -> Setting:
    """A run's settings, as far as memory is concerned."""
    common: dict[str, Any] = {
        "engine": run.engine,
        "data_parallel": run.data_parallel(world),
        "precision": run.training.precision,
        "states": states_of(run.optimizer.name, run.optimizer.options),
    }
    if run.engine == "megatron":
        return Setting(**common, distributed_optimizer=run.megatron.distributed_optimizer)
    config = deepspeed_json.read(run.deepspeed.config)
    zero = config.get("zero_optimization") or {}
    contiguous = zero.get("contiguous_gradients", True)
    named = {
        "bucket": zero.get("reduce_bucket_size") if contiguous else 0,
        "overlap": zero.get("overlap_comm"),
        "persistent": zero.get("stage3_param_persistence_threshold", zero.get("param_persistence_threshold")),
        "sub_group": zero.get("sub_group_size"),
        "accumulate_in": (config.get("data_types") or {}).get("grad_accum_dtype"),
    }
    chosen = {key: _value(key, value) for key, value in named.items() if value is not None and value != "auto"}
    return Setting(**common, stage=deepspeed_json.zero_stage(config), **chosen)


def offloads(run: Run) -> bool:
    """Whether the run's DeepSpeed JSON moves states or parameters to the host, which is not estimated."""
    zero = deepspeed_json.read(run.deepspeed.config).get("zero_optimization") or {} if run.engine == "deepspeed" else {}
    kinds = (zero.get("offload_optimizer") or {}, zero.get("offload_param") or {})
    return any(isinstance(kind, dict) and kind.get("device", "none") != "none" for kind in kinds)


def states_of(optimizer: str, options: Mapping[str, Any]) -> dict[str, int]:
    """Bytes an element by state, where ``grad_ema_dtype`` and ``exp_avg_dtype`` may have made some smaller."""
    states = dict(STATES.get(optimizer, STATES["adamw"]))
    for name in ("exp_avg", "grad_ema"):
        small = str(options.get(f"{name}_dtype", "float32")).removeprefix("torch.") == "bfloat16"
        if name in states and small and optimizer in ("alto", "lamb"):
            states[name] = 2
    if optimizer == "alto" and options.get("alpha", Hyperparameters.alpha) == 0:
        states.pop("grad_ema")
    return states


def activations(run: Run) -> float:
    """What a micro-batch leaves behind for the backward pass. Roughly."""
    m, half = run.model, run.training.precision != "fp32"
    tokens = run.training.micro_batch * m.sequence
    wide = 1 if half else 2
    one_layer = _in_a_layer(m) * wide
    in_layers = m.layers * one_layer
    if run.training.recompute:  # every layer's input, and one layer in full
        in_layers = 2 * m.layers * m.hidden * wide + one_layer
    logits = m.vocabulary * 2 * wide + m.vocabulary * 4  # and their float32 copy in the loss
    layers = 1 if run.training.recompute else m.layers
    return float(tokens * (in_layers + logits) + layers * attention_matrices(run))


def _in_a_layer(m: Model) -> int:
    """Bytes a token that a layer keeps in half precision.

    GPT-2: 34 a unit of hidden, of which 16 in the feed-forward block. Llama: norms, residuals and the rotated queries,
    keys and values in attention; gate, up, their SiLU and product in the feed-forward block.
    """
    if m.kind == "gpt2":
        return 18 * m.hidden + 4 * m.inner
    return 16 * m.hidden + 4 * (m.hidden // m.heads) * m.groups + 8 * m.inner


def attention_matrices(run: Run) -> float:
    """Bytes that one layer keeps of the size of attention's matrix, ``sequence`` squared for each head, on a GPU.

    DeepSpeed's model keeps none: torch's fused attention computes it again. (On a CPU only without dropout.) Megatron's
    local layers keep the softmax in float32, the copy that is multiplied with the values (the same tensor in float32
    without dropout), the mask of dropout, and the causal mask, which all heads share.
    """
    if run.engine != "megatron":
        return 0.0
    m, half = run.model, run.training.precision != "fp32"
    softmax, dropout_mask, rounded_or_dropped = 4, 1 if m.dropout else 0, 2 if half else 4 if m.dropout else 0
    kept = softmax + dropout_mask + rounded_or_dropped
    return float(m.sequence**2 * (run.training.micro_batch * m.heads * kept + 1))


def peak(device: torch.device) -> int:
    """The most bytes that this process has had: of the GPU's memory, as torch counts it; on a CPU, of main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _value(setting: str, value: Any) -> Any:
    """A value of the JSON's, which may write 5e8 for a whole number."""
    if setting in ("bucket", "persistent", "sub_group"):
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 2**63:
            return int(value)
    elif isinstance(value, str if setting == "accumulate_in" else bool):
        return value
    raise ValueError(f"the DeepSpeed JSON has {shown(value)} where its {_WRITTEN[setting]} should be")


_WRITTEN = {
    "bucket": "reduce_bucket_size, a number of elements,",
    "persistent": "stage3_param_persistence_threshold, a number of elements,",
    "sub_group": "sub_group_size, a number of elements,",
    "overlap": "overlap_comm, true or false,",
    "accumulate_in": "grad_accum_dtype, the name of a type,",
}
