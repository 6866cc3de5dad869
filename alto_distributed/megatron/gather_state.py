"""The third state on its way to and from data-parallel rank 0, for megatron-core 0.16.1.

A gathered checkpoint has, for each buffer, one long tensor per state: the buffer's buckets end to end
without the padding that makes a bucket divide evenly over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    lengths: dict[tuple[Any, Any], int] = {}
    for index, dtype, bucket, _ in _buckets(wrapper):
        lengths[index, dtype] = lengths.get((index, dtype), 0) + bucket.numel_unpadded
    gathered = {
        place: torch.zeros(n if receives else 0, dtype=torch.float32, device="cpu") for place, n in lengths.items()
    }
    done = dict.fromkeys(lengths, 0)
    for index, dtype, bucket, ranges in () if empty else _buckets(wrapper):
        begin = done[index, dtype]
        done[index, dtype] += bucket.numel_unpadded
        target = gathered[index, dtype][begin : done[index, dtype]] if receives else None
        device = torch.device("cpu") if use_gloo else bucket.grad_data.device
        states = wrapper.optimizer.state
        shards = [(held["gbuf_local"], states[wrapper._alto_shards[p]][key]) for p, held in ranges.items()]
        _gather_bucket(shards, bucket.grad_data.numel() // group.size(), device, group, everywhere, target)
    if receives and collected is not None:
        for (index, dtype), whole in gathered.items():
            collected[index][dtype][key] = whole


#: Elements that are gathered at a time, over all ranks: a buffer of 64 MiB, whatever the size of a bucket.
_AT_A_TIME = 1 << 24


def _gather_bucket(
    shards: Sequence[tuple[Any, torch.Tensor]],
    share: int,
    device: torch.device,
    group: Any,
    everywhere: bool,
    target: torch.Tensor | None,
) -> None:
    """Fill ``target``, on the host, with a bucket of which each rank holds ``share`` elements, part by part.

    Args:
        shards: what this rank holds: places in its share, each with its tensor.
        share: elements of each rank, padding included.
        device: where ranks communicate.
        group: the data-parallel group.
        everywhere: all ranks receive, not only the first.
        target: the bucket without its padding; None on a rank that does not receive.
    """
    size = group.size()
    step = max(1, _AT_A_TIME // size)
    for low in range(0, share, step):
        high = min(low + step, share)
        mine = torch.zeros(high - low, dtype=torch.float32, device=device)
        for place, shard in shards:
            first, last = max(place.start, low), min(place.end, high)
            if first < last:
                mine[first - low : last - low] = shard[first - place.start : last - place.start]
        everyones = torch.empty(size * (high - low), dtype=torch.float32, device=device) if target is not None else None
        if everywhere:
            dist.all_gather_into_tensor(everyones, mine, group=group)
        else:
            pieces = None if everyones is None else list(everyones.chunk(size))
            dist.gather(mine, pieces, dst=dist.get_global_rank(group, 0), group=group)
        if target is not None and everyones is not None:
            for rank, piece in enumerate(everyones.cpu().chunk(size)):
                there = target[rank * share + low : rank * share + high]
                there.copy_(piece[: there.numel()])


def scatter(wrapper: Any, key: str, collected: dict[Any, Any] | None) -> None:
    """The inverse of :func:`gather`, from rank 0 over the wrapper's gloo group, as Megatron scatters the others."""
    group = wrapper.data_parallel_group_gloo
    start: dict[tuple[Any, Any], int] = {}
    for index, dtype, bucket, ranges in _buckets(wrapper):
        mine = torch.empty(bucket.grad_data.numel() // group.size(), dtype=torch.float32, device="cpu")
        sent = None
        if group.rank() == 0 and collected is not None:
            begin = start.get((index, dtype), 0)
            start[index, dtype] = begin + bucket.numel_unpadded
            whole = torch.zeros(bucket.grad_data.numel(), dtype=torch.float32, device="cpu")
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


def _buckets(wrapper: Any) -> Iterator[tuple[int, Any, Any, dict[Any, Any]]]:
    """(buffer's index, its dtypes, a bucket, what this rank holds of it), in the order that all ranks share."""
    for index, by_dtype in enumerate(wrapper.gbuf_ranges):
        for dtype, ranges_of_buckets in by_dtype.items():
            for bucket, ranges in zip(wrapper.buffers[index].buckets, ranges_of_buckets, strict=True):
                yield index, dtype, bucket, ranges["param_map"]
