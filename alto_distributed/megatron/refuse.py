"""Combinations that cannot be right, or that have never run: refused before training starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fp8_utils import is_float8tensor

from ..sharding.dtensor import is_dtensor
from .experts import packed_experts
from .fsdp import is_fsdp

#: What Megatron's scheduler and ours read from a parameter group.
_OVERRIDES = ("max_lr", "min_lr", "start_wd", "end_wd", "wd_mult", "lr_mult", "is_decoupled_lr")


def refuse_unsupported(config: Any, model_chunks: Sequence[torch.nn.Module], overrides: Any) -> None:
    """Raise a ValueError for the first thing that ALTO must not be used with."""
    for problem in (*_in_config(config), *_in_overrides(overrides or {}), *_in_model(config, model_chunks)):
        raise ValueError(f"ALTO under Megatron: {problem}")


def _in_config(config: Any) -> Iterator[str]:
    if config.optimizer_cpu_offload:
        yield (
            "optimizer_cpu_offload splits the parameters between Adam on the CPU and Adam on the GPU; leave out "
            "--optimizer-cpu-offload (the distributed optimizer over more ranks saves the same memory)"
        )
    if getattr(config, "optimizer_cuda_graph", False):
        yield "optimizer_cuda_graph captures Adam's step; leave out --optimizer-cuda-graph"
    if getattr(config, "use_layer_wise_distributed_optimizer", False):
        yield (
            "the layer-wise distributed optimizer has not been tested; set use_distributed_optimizer=True instead "
            "(--use-distributed-optimizer)"
        )
    if not config.decoupled_weight_decay:
        yield (
            "decoupled_weight_decay=False adds the decay to the gradient, and ALTO's is part of its update; set "
            "decoupled_weight_decay=True, as it is by default"
        )
    if config.reuse_grad_buf_for_mxfp8_param_ag:
        yield "parameters in fp8 have not been tested; leave out --reuse-grad-buf-for-mxfp8-param-ag"


def _in_overrides(overrides: Mapping[Any, Mapping[str, Any]]) -> Iterator[str]:
    for override in overrides.values():
        for name in override:
            if name not in _OVERRIDES:
                yield (
                    f"a config override sets {name!r} for some parameters, which would have no effect; ALTO takes "
                    f"{', '.join(_OVERRIDES[:5])} there (muP's scaling of Adam's epsilon is not for ALTO)"
                )


def _in_model(config: Any, model_chunks: Sequence[torch.nn.Module]) -> Iterator[str]:
    for chunk in model_chunks:
        if type(chunk).__name__ == "TorchFullyShardedDataParallel":
            yield (
                "torch's FSDP2 inside Megatron has not been tested; use Megatron-FSDP (--use-megatron-fsdp) or the "
                "distributed optimizer (--use-distributed-optimizer), without --use-torch-fsdp2"
            )
        if is_fsdp(chunk) and not config.use_distributed_optimizer:
            yield "Megatron-FSDP needs use_distributed_optimizer=True (--use-distributed-optimizer)"
        if is_fsdp(chunk) and config.use_precision_aware_optimizer:
            yield (
                "with Megatron-FSDP, use_precision_aware_optimizer hands gradients to TransformerEngine's Adam; leave "
                "out --use-precision-aware-optimizer, and choose with --alto-exp-avg-dtype bfloat16"
            )
        model: Any = getattr(chunk, "config", None)
        if getattr(model, "use_mup", False):
            yield (
                "use_mup divides the learning rate of hidden layers by their width, as Adam needs it, and ALTO's step "
                "is already relative to the norm of the weights; leave out --use-mup"
            )
        if (
            getattr(model, "num_moe_experts", None)
            and model.expert_model_parallel_size == 1
            and model.expert_tensor_parallel_size != model.tensor_model_parallel_size
        ):
            yield (
                "without expert parallelism Megatron treats experts as ordinary parameters, and reduces them over the "
                "wrong groups unless expert_tensor_parallel_size equals tensor_model_parallel_size; make them equal, "
                "or set expert_model_parallel_size above 1"
            )
        if is_fsdp(chunk) and packed_experts([chunk]):
            yield (
                "with Megatron-FSDP, experts that share a parameter would share a layer-wise ratio; leave out "
                "--moe-use-legacy-grouped-gemm and --moe-single-grouped-weight"
            )
        for name, param in chunk.named_parameters():
            if is_dtensor(param) and not is_fsdp(chunk):
                yield f"{name} is a DTensor; use Megatron's own DistributedDataParallel"
            if is_float8tensor(param):
                yield f"{name} is kept in fp8, which has not been tested; leave out --fp8-param-gather"
    for group in ("get_gtp_weight_remat_world_size", "get_expert_gtp_weight_remat_world_size"):
        if getattr(parallel_state, group, lambda: 1)() > 1:
            yield "weights sharded for rematerialisation (GTP) have not been tested; set the GTP sizes to 1"
