"""ZeRO-Infinity: master weights and states of stage 3 on NVMe, a sub-group at a time in memory.

DeepSpeed swaps whichever states there are, of sub-groups above a size (1 MiB). A swapped tensor keeps its identity and
loses its memory, so its layout is known before its elements are. States are allocated at the first step, in memory, and
written after it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..optimizer import ALTO

#: O_DIRECT reads into memory at multiples of this.
_ALIGNED_BYTES = 512

NOT_RESTORED = "optimizer states are on NVMe, where DeepSpeed does not load them, with any optimizer"


def swaps_states(wrapper: Any) -> bool:
    """Whether the optimizer is offloaded to NVMe: only stage 3 does that, with sub-groups that are large enough."""
    return bool(getattr(wrapper, "swap_optimizer", False))


def swapped_sub_groups(wrapper: Any) -> Sequence[int]:
    """The sub-groups whose optimizer tensors are on NVMe."""
    if not swaps_states(wrapper):
        return ()
    return [i for i in range(len(wrapper.fp16_groups)) if wrapper._swappable_optimizer_subgroup(i)]


def bringing_in(wrapper: Any) -> Callable[[torch.Tensor], contextlib.AbstractContextManager[None]]:
    """What holds a swapped tensor in memory, to be read, and does nothing for any other."""
    places = {id(wrapper.fp32_partitioned_groups_flat[i]): i for i in swapped_sub_groups(wrapper)}

    @contextlib.contextmanager
    def resident(tensor: torch.Tensor) -> Iterator[None]:
        i = places.get(id(tensor))
        if i is None:
            yield
            return
        wrapper._optimizer_states_and_gradient_swap_in(i)
        try:
            yield
        finally:
            wrapper._release_swap_buffers(i)

    return resident


def check_swapping(engine: Any) -> None:
    """Raise if DeepSpeed would fail or read garbage once it swaps; say what it does not save."""
    wrapper, optimizer = engine.optimizer, engine.basic_optimizer
    if not swaps_states(wrapper):
        return
    swapped = swapped_sub_groups(wrapper)
    if not isinstance(optimizer, ALTO):
        raise ValueError(f'{type(optimizer).__name__} cannot be offloaded to NVMe; use "device": "cpu"')
    if optimizer._rounds:
        raise ValueError("offload to NVMe swaps states in float32 alone; remove grad_ema_dtype and exp_avg_dtype")
    if swapped:
        _check_buffers(engine, swapped)
    _check_alignment(wrapper, swapped)
    warnings.warn(
        f"this run cannot be resumed, only started again from saved weights (engine.save_16bit_model): {NOT_RESTORED}. "
        'Use "device": "cpu" to resume runs',
        stacklevel=2,
    )


def _check_buffers(engine: Any, swapped: Sequence[int]) -> None:
    """A sub-group needs a buffer for its weights, each state and its gradient; pipelining keeps neighbors in memory."""
    wrapper, config = engine.optimizer, engine.zero_offload_optimizer()
    groups = [engine.basic_optimizer.param_groups[wrapper.sub_group_to_group_id[i]] for i in swapped]
    tensors = 2 + max(len(ALTO.state_keys) - (group["alpha"] == 0) for group in groups)  # LAMB has no grad_ema
    at_a_time = min(len(swapped), 1 + config.pipeline_read + config.pipeline_write)
    if config.buffer_count < tensors * at_a_time:
        raise ValueError(
            f'"buffer_count": {config.buffer_count} of offload_optimizer is too small: weights, gradient and '
            f"{tensors - 2} states of {at_a_time} sub-groups at a time are {tensors * at_a_time} buffers; write "
            f'"buffer_count": {tensors * at_a_time}'
        )


def _check_alignment(wrapper: Any, swapped: Sequence[int]) -> None:
    """A gradient is read back to its place in the sub-group. O_DIRECT fails there, silently, unless it is aligned."""
    for i in swapped:
        start, size = 0, wrapper.fp32_partitioned_groups_flat[i].element_size()
        for p in wrapper.fp16_groups[i]:
            numel = p.partition_numel()
            if start * size % _ALIGNED_BYTES and wrapper.optimizer_swapper.is_swappable_tensor(numel=numel):
                raise ValueError(
                    f"DeepSpeed would read the gradient of {wrapper.param_names[p]!r} wrongly from NVMe: it begins at "
                    f"byte {start * size} of its sub-group, which is no multiple of {_ALIGNED_BYTES}. Put parameters "
                    'of odd sizes into a parameter group of their own, or use "device": "cpu"'
                )
            start += numel
