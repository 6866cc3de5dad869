"""The stages, precisions and options in which ZeRO equals the unsharded run, and how far it is from it.

Cells in float32: each rank sees its share of the batch, and weights are those of one process but for rounding. Cells
in bf16 and fp16: all ranks see the same batch, so that averaging is exact whatever the order of summation, and master
weights are bitwise those of a reference that rounds at the same points.
"""

import functools

import torch
import torch.distributed as dist
from torch import nn

from alto_distributed import ALTO
from alto_distributed.deepspeed.build import split_bare_parameters

from .zero import (
    BF16,
    BITWISE,
    FP16,
    SCALE,
    STEPS,
    assert_straddles,
    batches,
    config,
    largest_gap,
    loss_of,
    masters,
    network,
    reference,
    running,
    train,
    trainable,
    weights,
)

SMALL = {"reduce_bucket_size": 20, "allgather_bucket_size": 20}
FLOAT32_CELLS = {
    "stage 0": (None, {}),
    "stage 1": ({"stage": 1}, {}),
    "stage 2": ({"stage": 2}, {}),
    "stage 3": ({"stage": 3}, {}),
    "stage 1, no overlap": ({"stage": 1, "overlap_comm": False}, {}),
    "stage 2, overlap_comm": ({"stage": 2, "overlap_comm": True}, {}),
    "stage 3, overlap_comm": ({"stage": 3, "overlap_comm": True}, {}),
    "stage 1, contiguous_gradients off": ({"stage": 1, "contiguous_gradients": False}, {}),
    "stage 2, contiguous_gradients off": ({"stage": 2, "contiguous_gradients": False}, {}),
    "stage 3, contiguous_gradients off": ({"stage": 3, "contiguous_gradients": False}, {}),
    "stage 1, round_robin": ({"stage": 1, "round_robin_gradients": True}, {}),
    "stage 2, round_robin": ({"stage": 2, "round_robin_gradients": True}, {}),
    "stage 2, reduce_scatter off": ({"stage": 2, "reduce_scatter": False}, {}),
    "stage 1, small buckets": ({"stage": 1, **SMALL}, {}),
    "stage 2, small buckets": ({"stage": 2, **SMALL}, {}),
    "stage 3, small sub-groups": ({"stage": 3, "sub_group_size": 40, "reduce_bucket_size": 40}, {}),
    "stage 3, no persistent parameters": ({"stage": 3, "stage3_param_persistence_threshold": 0}, {}),
    "stage 1, optimizer offload": ({"stage": 1, "offload_optimizer": {"device": "cpu"}}, {}),
    "stage 2, optimizer offload": ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, {}),
    "stage 3, optimizer offload": ({"stage": 3, "offload_optimizer": {"device": "cpu"}}, {}),
    "stage 3, both offloaded": (
        {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, {},
    ),
    "stage 0, no clipping": (None, {"clip": 0.0}),
    "stage 1, no clipping": ({"stage": 1}, {"clip": 0.0}),
    "stage 3, no clipping": ({"stage": 3}, {"clip": 0.0}),
    "stage 2, hard clipping": ({"stage": 2}, {"clip": 0.01}),
    "stage 3, hard clipping": ({"stage": 3}, {"clip": 0.01}),
    "stage 0, accumulation": (None, {"accumulation": 4}),
    "stage 1, accumulation": ({"stage": 1}, {"accumulation": 4}),
    "stage 2, accumulation": ({"stage": 2}, {"accumulation": 4}),
    "stage 3, accumulation": ({"stage": 3}, {"accumulation": 4}),
}  # fmt: skip


def float32_gap(zero, cell):
    with running(network(), config(zero, **cell)) as engine:
        if dist.get_world_size() > 1 and zero:
            assert_straddles(engine)
        train(engine, accumulation=cell.get("accumulation", 1))
        return largest_gap(weights(engine), reference(**cell))


def rounded_reference(dtype, **options):
    """Master weights in float32 (they start rounded), forward and backward on their rounded copy, gradients
    summed as the engine does.

    Stage 3 puts a function of its own in the place of F.linear, which rounds otherwise.
    """
    return _rounded_reference(nn.functional.linear, dtype, **options)


@functools.cache
def _rounded_reference(
    linear, dtype, *, accumulation=1, accumulate_in=None, communicate_in=None, scale=1.0, steps=STEPS
):
    del linear  # for the cache: the model uses it
    master, model = network().to(dtype).float(), network().to(dtype)
    optimizer = ALTO(split_bare_parameters(list(master.parameters())), **BITWISE)
    pairs = list(zip(trainable(master).values(), trainable(model).values(), strict=True))
    for step in batches(steps, accumulation):
        summed = {}
        for x, y in step:
            model.zero_grad()
            (loss_of(model(x), y) / accumulation * scale).backward()
            for _, p in pairs:
                g = (torch.zeros_like(p) if p.grad is None else p.grad).to(accumulate_in or dtype)
                summed[p] = summed[p] + g if p in summed else g
        for m, p in pairs:
            m.grad = summed[p].to(communicate_in or dtype).float() / scale
        optimizer.step()
        with torch.no_grad():
            for m, p in pairs:
                p.copy_(m)
    return master, optimizer


FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
# Stages 2 and 3 reduce every micro-batch by itself, and round no sum; BF16_Optimizer rounds it before it sends it.
UNROUNDED = {"accumulate_in": torch.float32, "communicate_in": torch.float32, "accumulation": 4}
LOW_CELLS = {
    "bf16, stage 0": (None, BF16, {}),
    "bf16, stage 1": ({"stage": 1}, BF16, {}),
    "bf16, stage 2": ({"stage": 2}, BF16, {}),
    "bf16, stage 3": ({"stage": 3}, BF16, {}),
    "bf16, BF16_Optimizer": ({"stage": 1}, {**BF16, **FP32_SUMS}, {"accumulate_in": torch.float32}),
    "bf16, BF16_Optimizer, accumulation": (
        {"stage": 1}, {**BF16, **FP32_SUMS}, {"accumulate_in": torch.float32, "accumulation": 4},
    ),
    "bf16, stage 2, float32 sums": ({"stage": 2}, {**BF16, **FP32_SUMS}, UNROUNDED),
    "bf16, stage 3, float32 sums": ({"stage": 3}, {**BF16, **FP32_SUMS}, UNROUNDED),
    "fp16, stage 2, float32 sums": ({"stage": 2}, {**FP16, **FP32_SUMS}, UNROUNDED),
    "bf16, stage 2, offload": ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, BF16, {}),
    "bf16, stage 3, offload": ({"stage": 3, "offload_optimizer": {"device": "cpu"}}, BF16, {}),
    "bf16, stage 0, accumulation": (None, BF16, {"accumulation": 4}),
    "bf16, stage 1, accumulation": ({"stage": 1}, BF16, {"accumulation": 4}),
    "bf16, stage 2, accumulation": ({"stage": 2}, BF16, {"accumulation": 4}),
    "bf16, stage 3, accumulation": ({"stage": 3}, BF16, {"accumulation": 4}),
    "fp16, stage 1": ({"stage": 1}, FP16, {}),
    "fp16, stage 2": ({"stage": 2}, FP16, {}),
    "fp16, stage 3": ({"stage": 3}, FP16, {}),
    "fp16, stage 1, accumulation": ({"stage": 1}, FP16, {"accumulation": 4}),
    "fp16, stage 2, accumulation": ({"stage": 2}, FP16, {"accumulation": 4}),
    "fp16, stage 3, accumulation": ({"stage": 3}, FP16, {"accumulation": 4}),
    "fp16, stage 2, offload": ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, FP16, {}),
}  # fmt: skip


def low_config(zero, precision, cell):
    """All ranks see the whole batch, so that averaging is exact."""
    ds_config = config(zero, clip=0.0, accumulation=cell.get("accumulation", 1), params=BITWISE, **precision)
    return {**ds_config, "train_micro_batch_size_per_gpu": 8}


def low_precision_gap(zero, precision, cell):
    """Largest difference of the master weights to the reference that rounds at the same points; 0 if bitwise right."""
    with running(network(), low_config(zero, precision, cell)) as engine:
        train(engine, accumulation=cell.get("accumulation", 1), sliced=False)
        got = masters(engine)
    dtype, scale = (torch.float16, float(SCALE)) if "fp16" in precision else (torch.bfloat16, 1.0)
    expected, _ = rounded_reference(dtype, scale=scale, **cell)
    return torch.stack([(got[name] - p.detach()).abs().max() for name, p in trainable(expected).items()]).max().item()
