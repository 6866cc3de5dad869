"""Combinations that cannot be right, or that have never run: refused before training starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import fp8_utils, parallel_state

from ..sharding.dtensor import is_dtensor
from . import config as configs
from .config import AltoOptimizerConfig
from .experts import packed_experts
from .fsdp import is_fsdp

#: What Megatron's scheduler and ours read from a parameter group.
_OVERRIDES = ("max_lr", "min_lr", "start_wd", "end_wd", "wd_mult", "lr_mult", "is_decoupled_lr")

#: What the command line refuses too, before the model is built.
_MUP = (
    "use_mup divides the learning rate of hidden layers by their width, as Adam needs it, and ALTO's step is already "
    "relative to the norm of the weights; leave out --use-mup"
)
_FP4 = "parameters in fp4 (fp4_param) have not been tested; leave out --fp4-param-gather"


def refuse_unsupported(config: Any, model_chunks: Sequence[torch.nn.Module], overrides: Any) -> None:
    """Raise a ValueError for the first thing that ALTO must not be used with."""
    for problem in (*_in_config(config), *_in_overrides(overrides or {}), *_in_model(config, model_chunks)):
        raise ValueError(f"ALTO under Megatron: {problem}")


def refuse_arguments(args: Any) -> None:
    """Raise a ValueError for a flag of Megatron-LM's that would be refused once the model is built."""
    for problem, names in ((_MUP, ("use_mup",)), (_FP4, ("fp4_param_gather", "fp4_param"))):
        if any(getattr(args, name, False) for name in names):
            raise ValueError(f"ALTO under Megatron: {problem}")


def _in_config(config: Any) -> Iterator[str]:
    if config.optimizer_cpu_offload and not config.use_distributed_optimizer:
        yield (
            "optimizer_cpu_offload needs use_distributed_optimizer=True (--use-distributed-optimizer), as Megatron's "
            "own does"
        )
    if config.optimizer_cpu_offload and not 0 <= config.optimizer_offload_fraction <= 1:
        yield (
            f"optimizer_offload_fraction={config.optimizer_offload_fraction} is not the share of the parameters on the "
            "host; set it between 0 and 1 (--optimizer-offload-fraction)"
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
        yield "mxfp8 in the gradient buffer has not been tested; leave out --reuse-grad-buf-for-mxfp8-param-ag"


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
        if type(chunk).__name__ == "FullyShardedDataParallelV2":
            yield (
                "version 2 of Megatron-FSDP has not been tested; set ddp_config.megatron_fsdp_version=1 "
                "(--megatron-fsdp-version 1), or leave out --use-megatron-fsdp"
            )
        if is_fsdp(chunk) and not config.use_distributed_optimizer:
            yield "Megatron-FSDP needs use_distributed_optimizer=True (--use-distributed-optimizer)"
        if is_fsdp(chunk) and config.use_precision_aware_optimizer:
            yield (
                "with Megatron-FSDP, use_precision_aware_optimizer hands gradients to TransformerEngine's Adam; leave "
                "out --use-precision-aware-optimizer, and choose with --alto-exp-avg-dtype bfloat16"
            )
        if is_fsdp(chunk) and config.optimizer_cpu_offload:
            yield "optimizer_cpu_offload does not work with Megatron-FSDP; leave out --optimizer-cpu-offload"
        model: Any = getattr(chunk, "config", None)
        if is_fsdp(chunk) and getattr(model, "expert_model_parallel_size", 1) > 1:
            yield (
                f"expert_model_parallel_size={model.expert_model_parallel_size} has not been tested with "
                "Megatron-FSDP; set it to 1 (--expert-model-parallel-size 1), or leave out --use-megatron-fsdp"
            )
        if getattr(model, "use_mup", False):
            yield _MUP
        ddp_config = getattr(chunk, "ddp_config", None)
        if getattr(model, "fp4_param", False) or getattr(ddp_config, "fp4_param_gather", False):
            yield _FP4
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
        if is_fsdp(chunk) and configs.of(config, "embeddings") != AltoOptimizerConfig.alto_embeddings:
            yield (
                f"alto_embeddings={configs.of(config, 'embeddings')!r} has no effect with Megatron-FSDP; leave out "
                "--alto-embeddings, or use the distributed optimizer without --use-megatron-fsdp"
            )
        if is_fsdp(chunk) and packed_experts([chunk]):
            yield (
                "with Megatron-FSDP, experts that share a parameter would share a layer-wise ratio; leave out "
                "--moe-use-legacy-grouped-gemm and --moe-single-grouped-weight"
            )
        for name, param in chunk.named_parameters():
            if is_dtensor(param) and not is_fsdp(chunk):
                yield f"{name} is a DTensor; use Megatron's own DistributedDataParallel"
            if fp8_utils.is_float8tensor(param) and config.optimizer_cpu_offload:
                yield (
                    f"{name} is kept in fp8, which Megatron makes from float32 weights on the GPU; leave out "
                    "--fp8-param-gather or --optimizer-cpu-offload"
                )
            if fp8_utils.is_float8tensor(param) and (is_fsdp(chunk) or not config.use_distributed_optimizer):
                yield (
                    f"{name} is kept in fp8; use the distributed optimizer (--use-distributed-optimizer, without "
                    "--use-megatron-fsdp), or leave out --fp8-param-gather"
                )
    for group in ("get_gtp_weight_remat_world_size", "get_expert_gtp_weight_remat_world_size"):
        if getattr(parallel_state, group, lambda: 1)() > 1:
            yield "weights sharded for rematerialisation (GTP) have not been tested; set the GTP sizes to 1"
