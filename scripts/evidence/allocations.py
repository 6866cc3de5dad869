"""Bytes that torch's CPU allocator hands out, to the byte: every allocation and release of a piece of code."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_beyond(action: Callable[[], Any]) -> int:
    """The most bytes that torch held at once during ``action``, beyond what it held before.

    Temporary tensors within operators count as well. What ``action`` frees that was there before counts as less than
    nothing, so leave everything in place that should be counted by :func:`held`.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    results: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]  # the one place with their order
    changes = [
        (event.start_ns(), event.nbytes())
        for event in results.events()
        if event.name() == "[memory]" and event.device_type() == torch.profiler.DeviceType.CPU
    ]
    now = most = 0
    for _, change in sorted(changes, key=lambda moment_and_bytes: moment_and_bytes[0]):
        now += change
        most = max(most, now)
    return most


def held(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes under the tensors, shared memory once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors of an optimizer's state as large as a parameter; step counters are left out."""
    return [
        value
        for param, state in optimizer.state.items()
        for value in state.values()
        if torch.is_tensor(value) and value.numel() == param.numel() and value.ndim == param.ndim
    ]
