"""Combinations that DeepSpeed cannot do right, or that have never run here: refused before training starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from ..param_groups import whole_shape
from .versions import faults, option


def refuse_unsupported(engine: Any, parameters: list[Any]) -> None:
    """Raise a ValueError for the first thing in the engine's config that ALTO must not be used with."""
    for problem in _problems(engine, parameters):
        raise ValueError(f"ALTO under DeepSpeed: {problem}")


def _problems(engine: Any, parameters: list[Any]) -> Iterator[str]:
    stage = int(engine.zero_optimization_stage()) if engine.zero_optimization() else 0
    if engine.fp16_enabled() and stage == 0:
        yield (
            "fp16 at ZeRO stage 0 does not scale the loss (DeepSpeed does that under ZeRO only), so the update would "
            'be divided by the loss scale; use "zero_optimization": {"stage": 1} or bf16'
        )
    plain_float32 = not (engine.fp16_enabled() or engine.bfloat16_enabled())
    if engine.pipeline_parallelism and stage == 0 and plain_float32 and engine.gradient_clipping() > 0:
        yield (
            "a float32 pipeline at ZeRO stage 0 clips by the gradient norm of the first pipeline stage alone; use "
            '"zero_optimization": {"stage": 1}, or "gradient_clipping": 0'
        )
    if stage < 3 and (option(engine, "sequence_parallel_size") or 1) > 1 and not _sums_over_sequences(engine):
        yield (
            'the JSON\'s "sequence_parallel_size" makes groups over which DeepSpeed does not add up gradients below '
            "stage 3, with any optimizer; use stage 3. Or remove it, call initialize_sequence_parallel(SIZE) of "
            "deepspeed.runtime.sequence_parallel.parallel_state_sp, and pass mpu=parallel_state_sp to initialize"
        )
    if option(engine, "zenflow"):
        yield "zenflow steps its own CPU Adam instead of the configured optimizer; remove zenflow from the config"
    if option(engine, "super_offload"):
        yield 'SuperOffload runs DeepSpeedCPUAdam in its own processes; set "super_offload": false'
    if (config := engine.zero_offload_param()) is not None and config.device == "nvme":
        yield 'offload_param to NVMe has not been tested; use "device": "cpu"'
    if option(engine, "fp16_master_weights_and_gradients"):
        yield (
            "float16 master weights lose small updates; remove fp16_master_weights_and_grads, or use bf16 with "
            '"bf16_master_weights_and_grads": true, which are rounded stochastically'
        )
    if option(engine, "torch_autocast_enabled") and str(engine.torch_autocast_dtype()) == "torch.float16":
        yield (
            "torch_autocast with float16 skips steps on each rank by itself, and ranks that disagree would hang in the "
            'norm\'s collective; use "dtype": "bfloat16", or "fp16": {"enabled": true}'
        )
    if option(engine, "is_deepcompile_enabled"):
        yield 'DeepCompile has not been tested; set "compile": {"deepcompile": false}'
    yield from faults(engine, stage)
    for p in (p for item in parameters for p in (item["params"] if isinstance(item, dict) else [item])):
        if p.requires_grad and stage == 3 and 0 in whole_shape(p):
            yield f"a parameter without elements (shape {whole_shape(p)}) breaks ZeRO stage 3; remove or freeze it"


def _sums_over_sequences(engine: Any) -> bool:
    """Whether gradients are added up over the ranks that hold parts of one sequence."""
    summed = dist.get_process_group_ranks(engine.seq_data_parallel_group)
    return set(dist.get_process_group_ranks(engine.seq_parallel_group)) <= set(summed)
