"""Batches of token windows, from the number of the step alone.

A split is one long stream of tokens, cut into windows of sequence + 1. Neighbors share a token, the last target of one
being the first input of the next, so every token but the first is predicted once in an epoch; what is left over at the
end is shorter than a window and is not used.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from . import files
from .permutation import Permutation

#: Validation sets are multiples of it, so that any number of ranks that divides it can share them evenly.
VALIDATION_UNIT = 64


class Samples:
    """The windows of one split. Nothing here changes as it is used: there is no state to save.

    Args:
        directory: what ``prepare`` wrote.
        split: "train", "valid" or "test".
        sequence: tokens that go into the model; a window has one more.
        vocabulary: rows of the model's embedding.
        seed: of the order in which :meth:`batch` takes windows.

    Raises:
        ValueError: the data are not there, not whole, shorter than one window, or of a larger vocabulary.
    """

    def __init__(self, directory: str | Path, split: str, sequence: int, vocabulary: int, seed: int = 0) -> None:
        if sequence < 1:
            raise ValueError(f"sequence={sequence} must be at least 1")
        needed = int(files.read_manifest(directory)["tokenizer"]["vocabulary"])
        if vocabulary < needed:
            raise ValueError(
                f"{directory} has token ids up to {needed - 1}, and model.vocabulary={vocabulary}: set it to {needed} "
                f"or more ({-(-needed // 128) * 128} is a multiple of 128)"
            )
        self._tokens = files.open_tokens(directory, split)
        self._name = f"{directory}/{split}.bin"
        self._vocabulary = needed
        self.sequence = sequence
        self.seed = seed
        self.windows = (len(self._tokens) - 1) // sequence
        if self.windows < 1:
            raise ValueError(
                f"model.sequence={sequence} needs {sequence + 1} tokens, and {self._name} has {len(self._tokens)}: "
                f"prepare more text or a larger share for {split!r}, or use shorter sequences"
            )

    def batch(
        self, step: int, global_batch: int, micro_batch: int, data_parallel_rank: int = 0, data_parallel_size: int = 1
    ) -> list[torch.Tensor]:
        """A rank's micro-batches of a step, where all steps have as many samples: see :meth:`batch_from`."""
        return self.batch_from(step * global_batch, global_batch, micro_batch, data_parallel_rank, data_parallel_size)

    def batch_from(
        self, first: int, global_batch: int, micro_batch: int, data_parallel_rank: int = 0, data_parallel_size: int = 1
    ) -> list[torch.Tensor]:
        """A rank's micro-batches of a step, int64 of [micro_batch, sequence + 1] each.

        The step's samples are numbers ``first`` and following of an endless series: every window once, in an order
        drawn from the seed and the epoch, then every window again in another order. Rank r has the r-th of
        ``data_parallel_size`` equal runs of them. So all ranks' micro-batches, one after the other, are the same global
        batch in the same order, whatever their number and size.

        Raises:
            ValueError: the global batch does not divide by micro_batch x data_parallel_size.
        """
        _check_rank(data_parallel_rank, data_parallel_size)
        if first < 0 or micro_batch < 1 or global_batch < 1 or global_batch % (micro_batch * data_parallel_size):
            raise ValueError(
                f"sample {first}: global_batch={global_batch} must be a multiple of micro_batch x data-parallel ranks ="
                f" {micro_batch} x {data_parallel_size}, and none of them less than 1"
            )
        share = global_batch // data_parallel_size
        return self._read(self.order(first + data_parallel_rank * share, share), micro_batch)

    def order(self, first: int, count: int) -> NDArray[np.int64]:
        """Which windows are numbers ``first`` to ``first + count - 1`` of the endless series."""
        chosen = []
        while count:
            epoch, position = divmod(first, self.windows)
            here = min(count, self.windows - position)
            positions = np.arange(position, position + here, dtype=np.int64)
            chosen.append(Permutation(self.windows, self.seed, epoch)(positions))
            first, count = first + here, count - here
        return np.concatenate([*chosen, np.zeros(0, np.int64)])

    def validation(
        self, samples: int, micro_batch: int, data_parallel_rank: int = 0, data_parallel_size: int = 1
    ) -> list[torch.Tensor]:
        """A rank's part of a fixed set of windows, spaced evenly over the split. All ranks have as many micro-batches.

        The set has ``samples`` windows, or all for 0, or as many as there are if those are fewer; then rounded down to
        a multiple of 64, or below 64 to a power of two. That depends on no number of ranks, and all micro-batches are
        of one size, so the mean of their losses is the same at any world size. The size is the largest up to
        ``micro_batch`` that divides a rank's share.

        Raises:
            ValueError: the ranks cannot share the set evenly.
        """
        _check_rank(data_parallel_rank, data_parallel_size)
        if samples < 0 or micro_batch < 1:
            raise ValueError(f"samples={samples} must be at least 0 and micro_batch={micro_batch} at least 1")
        total = self.validation_samples(samples)
        share, rest = divmod(total, data_parallel_size)
        if rest:
            raise ValueError(
                f"{total} validation samples (evaluation.samples={samples}, {self.windows} in {self._name}) cannot be "
                f"shared evenly by {data_parallel_size} data-parallel ranks; set evaluation.samples to a multiple of "
                f"{int(np.lcm(VALIDATION_UNIT, data_parallel_size))}, with enough text for it"
            )
        size = max(n for n in range(1, min(micro_batch, share) + 1) if share % n == 0)
        numbers = np.arange(data_parallel_rank * share, (data_parallel_rank + 1) * share, dtype=np.int64)
        return self._read(numbers * self.windows // total, size)

    def validation_samples(self, samples: int) -> int:
        """How many windows :meth:`validation` takes, over all ranks."""
        total = min(samples or self.windows, self.windows)
        return total // VALIDATION_UNIT * VALIDATION_UNIT or 1 << (total.bit_length() - 1)

    def _read(self, windows: NDArray[np.int64], micro_batch: int) -> list[torch.Tensor]:
        batch = np.empty((len(windows), self.sequence + 1), dtype=np.int64)
        for row, window in zip(batch, windows.tolist(), strict=True):
            row[:] = self._tokens[window * self.sequence : (window + 1) * self.sequence + 1]
        if batch.max() >= self._vocabulary or batch.min() < 0:
            raise ValueError(
                f"{self._name} is damaged: it has token {batch.max()}, and its tokenizer ends at "
                f"{self._vocabulary - 1}; prepare the data again with --force"
            )
        return list(torch.split(torch.from_numpy(batch), micro_batch))


def _check_rank(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"data_parallel_rank={rank} must lie between 0 and data_parallel_size - 1 = {size - 1}")


__all__ = ["VALIDATION_UNIT", "Samples"]
