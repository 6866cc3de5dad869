"""Checkpoint formats of the distributed optimizer that would lose or corrupt something: refused."""

from __future__ import annotations

import inspect
from types import CodeType
from typing import Any

import megatron.core
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

CORRUPTED = (
    f"this megatron-core ({megatron.core.__version__}) writes wrong values into fully_reshardable checkpoints of this "
    "model, Adam's too: it has several buckets, and padding between them. Megatron-LM repaired it on August 21, 2026 "
    "(pull request 5077). Save as dp_reshardable (leave out "
    "--dist-ckpt-optim-fully-reshardable), or make the buckets fit: one bucket (a larger bucket_size, "
    "--ddp-bucket-size), or sizes of parameters that are multiples of 128. An embedding that is tied over pipeline "
    "stages has a bucket of its own in any case"
)


def refuse_format(wrapper: Any, name: str | None, is_loading: bool) -> None:
    """Raise a ValueError if this optimizer cannot be saved in, or loaded from, a format.

    Args:
        wrapper: the distributed optimizer.
        name: Megatron's ``distrib_optim_sharding_type``; None if the caller named none.
        is_loading: described for loading, not for saving.
    """
    if name in (None, "fully_sharded_model_space"):
        raise ValueError(
            "Megatron's format fully_sharded_model_space, which is also what it takes if none is named, does not work "
            "any more (flattened ranges are gone); name another: "
            "sharded_state_dict(..., metadata={'distrib_optim_sharding_type': 'dp_reshardable'}), or "
            "'fully_reshardable' to change tensor or pipeline parallelism"
        )
    if name == "fsdp_dtensor":
        raise ValueError(
            "fsdp_dtensor is the format of Megatron-FSDP (--use-megatron-fsdp); without it use dp_reshardable or "
            "fully_reshardable"
        )
    if name == "fully_reshardable" and not is_loading and corrupts_fully_reshardable(wrapper):
        raise ValueError(CORRUPTED)
    if name == "dp_reshardable" and _some_rank_has_an_empty_bucket(wrapper):
        raise ValueError(
            "dp_reshardable needs a piece of every bucket on every data-parallel rank, and this model is too small for "
            "that; use fully_reshardable (--dist-ckpt-optim-fully-reshardable), or larger buckets"
        )


def corrupts_fully_reshardable(wrapper: Any) -> bool:
    """Whether a bucket begins elsewhere in the buffer than in the gathered tensor, and Megatron does not know."""
    if allows_for_padding(inspect.unwrap(DistributedOptimizer.sharded_param_state_fully_reshardable).__code__):
        return False
    for buffer in wrapper.buffers:
        unpadded = 0
        for bucket in buffer.buckets:
            if bucket.offset != unpadded:
                return True
            unpadded += bucket.numel_unpadded
    return False


def allows_for_padding(code: CodeType) -> bool:
    """Whether the method that cuts parameters out of the gathered tensor, which has no padding, has the repair.

    No version number tells: the repair came to main between two releases. What it counts with does.
    """
    return "cumulative_padding_stripped" in (*code.co_varnames, *code.co_cellvars)


def _some_rank_has_an_empty_bucket(wrapper: Any) -> bool:
    """The same answer on every rank, without asking: they all know how the buffers are cut."""
    ranks = wrapper.data_parallel_group.size()
    for buffer in wrapper.buffers:
        for bucket in buffer.buckets:
            share = bucket.grad_data.numel() // ranks
            served = 0  # ranks from 0 on that hold a piece
            for start, end, _ in sorted(buffer.param_index_map[param] for param in bucket.params):
                if (start - bucket.offset) // share > served:
                    return True
                served = max(served, (end - 1 - bucket.offset) // share + 1)
            if served < ranks:
                return True
    return False
