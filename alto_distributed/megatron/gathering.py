"""The third state on its way to and from data-parallel rank 0, for megatron-core 0.16.1.

A gathered checkpoint has, for each buffer, one long tensor per state: the buffer's buckets end to end
without the padding that makes a bucket divide evenly over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


def gather(
    wrapper: Any, key: str, collected: dict[Any, Any] | None, use_gloo: bool, empty: bool, everywhere: bool
) -> None:
    """Add a state of all ranks' shards to what Megatron collected of the others.

    Args:
        wrapper: the distributed optimizer.
        key: name of the state.
        collected: buffer -> dtype -> state -> tensor; None on ranks that do not receive.
        use_gloo: communicate on the host over the wrapper's gloo group, else where the buffers are.
        empty: only the shape is wanted, for loading into.
        everywhere: every rank receives, not only the first.
    """
    group = wrapper.data_parallel_group_gloo if use_gloo else wrapper.data_parallel_group
    receives = everywhere or group.rank() == 0
    gathered: dict[tuple[Any, Any], list[torch.Tensor]] = {}
    for index, dtype, bucket, ranges in _buckets(wrapper):
        pieces = gathered.setdefault((index, dtype), [])
        if empty:
            pieces.append(torch.zeros(bucket.numel_unpadded))
            continue
        device = torch.device("cpu") if use_gloo else bucket.grad_data.device
        mine = torch.zeros(bucket.grad_data.numel() // group.size(), device=device)
        for model_param, held in ranges.items():
            here = held["gbuf_local"]
            mine[here.start : here.end] = wrapper.optimizer.state[wrapper._alto_shards[model_param]][key]
        received = [torch.empty_like(mine) for _ in range(group.size())] if receives else None
        if everywhere:
            dist.all_gather(received, mine, group=group)
        else:
            dist.gather(mine, received, dst=dist.get_global_rank(group, 0), group=group)
        if received is not None:
            pieces.append(torch.cat(received)[: bucket.numel_unpadded].cpu())
    if receives and collected is not None:
        for (index, dtype), pieces in gathered.items():
            collected[index][dtype][key] = torch.cat(pieces)


def scatter(wrapper: Any, key: str, collected: dict[Any, Any] | None) -> None:
    """The inverse of :func:`gather`, from rank 0 over the wrapper's gloo group, as Megatron scatters the others."""
    group = wrapper.data_parallel_group_gloo
    start: dict[tuple[Any, Any], int] = {}
    for index, dtype, bucket, ranges in _buckets(wrapper):
        mine = torch.empty(bucket.grad_data.numel() // group.size())
        sent = None
        if group.rank() == 0 and collected is not None:
            begin = start.get((index, dtype), 0)
            start[index, dtype] = begin + bucket.numel_unpadded
            whole = torch.zeros(bucket.grad_data.numel())
            whole[: bucket.numel_unpadded] = collected[index][dtype][key][begin : start[index, dtype]]
            sent = list(whole.chunk(group.size()))
        dist.scatter(mine, sent, src=dist.get_global_rank(group, 0), group=group)
        for model_param, held in ranges.items():
            here = held["gbuf_local"]
            wrapper.optimizer.state[wrapper._alto_shards[model_param]][key].copy_(mine[here.start : here.end])


def require_gloo(wrapper: Any) -> Any:
    """The group over which Megatron gathers on the host and scatters; it may have been built without."""
    if wrapper.data_parallel_group_gloo is None:
        raise ValueError(
            "gathered checkpoints travel over gloo, and this optimizer has no gloo group: build it with "
            "use_gloo_process_groups=True (leave out --disable-gloo-process-groups), or use dp_reshardable checkpoints"
        )
    return wrapper.data_parallel_group_gloo


def agree(wrapper: Any, problem: str | None) -> None:
    """Raise rank 0's problem on every data-parallel rank: the others would wait for it in a collective."""
    group = require_gloo(wrapper)
    said = [problem]
    dist.broadcast_object_list(said, src=dist.get_global_rank(group, 0), group=group)
    if said[0] is not None:
        raise ValueError(said[0])


def _buckets(wrapper: Any) -> Iterator[tuple[int, Any, Any, dict[Any, Any]]]:
    """(buffer's index, its dtypes, a bucket, what this rank holds of it), in the order that all ranks share."""
    for index, by_dtype in enumerate(wrapper.gbuf_ranges):
        for dtype, ranges_of_buckets in by_dtype.items():
            for bucket, ranges in zip(wrapper.buffers[index].buckets, ranges_of_buckets, strict=True):
                yield index, dtype, bucket, ranges["param_map"]
