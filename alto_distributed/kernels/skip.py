"""A kernel that changes nothing where a flag on the device is set, for devices on which the host must not wait.

It serves any kernel of this folder: what a chunk holds is put aside, the kernel works on the chunk, and if the
flag is set the old values come back, bit for bit. The memory is that of one chunk's operands. (A
:class:`.protocol.SkippingKernel` has a better way: Triton's programs read the flag and end.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from .chunked import chunks
from .protocol import Kernel
from .shards import FlatShard, flattened


class SkipIf:
    """``kernel``, with every write undone on the device if ``skip`` is not 0."""

    def __init__(self, kernel: Kernel, skip: torch.Tensor) -> None:
        self._kernel = kernel
        self._skip = skip.reshape(()) != 0

    def phase_one(self, shards: Sequence[FlatShard], sums: torch.Tensor) -> None:
        for shard, here in _shards_of_a_chunk(shards):
            with self._kept([t[here] for t in (shard.exp_avg, shard.exp_avg_sq, shard.grad_ema) if t is not None]):
                self._kernel.phase_one([shard], sums)

    def phase_two(self, shards: Sequence[FlatShard], step_sizes: torch.Tensor, prepared: None = None) -> None:
        for shard, here in _shards_of_a_chunk(shards):
            with self._kept([shard.param[here]]):
                self._kernel.phase_two([shard], step_sizes)

    @contextmanager
    def _kept(self, targets: Sequence[torch.Tensor]) -> Iterator[None]:
        before = [target.clone() for target in targets]
        yield
        for target, old in zip(targets, before, strict=True):
            torch.where(self._skip, old, target, out=target)


def _shards_of_a_chunk(shards: Sequence[FlatShard]) -> Iterator[tuple[FlatShard, slice]]:
    for shard in flattened(shards):
        for span in chunks(shard):
            yield replace(shard, spans=(span,)), slice(span.start, span.stop)
