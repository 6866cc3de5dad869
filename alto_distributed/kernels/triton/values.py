"""What changes from step to step, where the Triton kernels read it: addresses of tensors, numbers of groups.

In the steady state no copy goes to the device. Addresses are sent when one has changed. A number of a group that has
changed, as the bias corrections do at each step, is the argument of an operation that fills its place. Under
``capturable`` the device works out the corrections, from counters that are there. What is sent goes in small copies,
which the host does not wait for.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import torch

from ..shards import Coefficients, Dtypes, FlatShard, Memory
from .columns import ALIGNMENT, COEFFICIENT_COLUMNS, CORRECTION2, CORRECTION3, SHARD_COLUMNS, STEP
from .upload import upload

_SHARD = struct.Struct(f"={SHARD_COLUMNS}q")
_NUMBERS = struct.Struct(f"={COEFFICIENT_COLUMNS}d")
#: More numbers that have changed go in one copy.
_FILLS = 12

Numbers = tuple[float, ...]
"""A row of the table of coefficients."""


class Values:
    """The tables of shards and of coefficients on the device, for a fixed number of shards.

    Args:
        shards: how many.
        device: of the shards.
        pinned: memory of the host for the copies that a graph records. Nothing else may ever be written to it.
    """

    def __init__(self, shards: int, device: torch.device, pinned: torch.Tensor | None = None) -> None:
        self._device = device
        self._words = torch.zeros(shards * (SHARD_COLUMNS + COEFFICIENT_COLUMNS), dtype=torch.int64, device=device)
        self._split = shards * SHARD_COLUMNS
        self._addresses: list[tuple[int, int, Memory, int]] = []
        self._numbers: list[Numbers] = []
        self._betas: torch.Tensor | None = None
        """What the corrections are powers of, where the device makes them."""
        self.pinned = pinned
        self.spare: torch.Tensor | None = None
        """For the next capture, in which no memory can be pinned."""
        self.shards = self._words[: self._split].view(shards, SHARD_COLUMNS)
        self.coefficients = self._words[self._split :].view(torch.float64).view(shards, COEFFICIENT_COLUMNS)
        """As many rows as there are shards; those that share their numbers share a row."""
        self.inverse_scale = self._one = torch.ones(1, dtype=torch.float32, device=device)

    def send(self, shards: Sequence[tuple[FlatShard, Memory, Dtypes]], rows: Mapping[int, int]) -> None:
        """Bring the tables up to date.

        Args:
            shards: of this step. The rows of all others become zeros.
            rows: the row of each shard, by its place.
        """
        addresses: list[tuple[int, int, Memory, int]] = []
        numbers: list[Numbers] = []
        known: dict[int, tuple[int, Numbers]] = {}
        counters: list[torch.Tensor] = []
        for shard, memory, _ in shards:
            c, counter = shard.coefficients, shard.counter
            row, own = known.get(id(c), (-1, ()))
            if row < 0:
                row, own = known[id(c)] = len(numbers), _numbers(c, counter is not None)
                numbers.append(own)
            elif counter is not None:  # a shard whose number of steps is on the device has a row of its own
                row = len(numbers)
                numbers.append(own)
            if counter is not None:
                counters.append(counter)
            addresses.append((rows[shard.place], row, memory, shard.grad.data_ptr()))
        if addresses != self._addresses:
            self._addresses = addresses
            self._copy(0, _table_of(addresses, self._split))
        if numbers != self._numbers:
            fills = self._fills(numbers) if self._betas is None and not counters else None
            if fills is None:
                self._copy(self._split, bytearray(b"".join(_NUMBERS.pack(*row) for row in numbers)))
                corrections = self.coefficients[: len(numbers), CORRECTION2 : CORRECTION3 + 1]
                self._betas = corrections.clone() if counters else None
            for some, column, number in fills or ():
                self.coefficients[some, column].fill_(number)
            self._numbers = numbers
        if counters:
            self._correct(torch.stack(counters).double())
            if self.spare is None and self.pinned is None:
                is_host = self._device.type == "cpu"
                self.spare = torch.empty_like(self._words, device="cpu", pin_memory=not is_host)
        scale = shards[0][0].inverse_scale
        self.inverse_scale = self._one if scale is None else scale

    def for_capture(self) -> Values | None:
        """Tables of their own for a step that is recorded, which takes the spare memory; None if there is none."""
        pinned, self.spare = self.spare, None
        return None if pinned is None else Values(len(self.shards), self._device, pinned)

    def _fills(self, numbers: Sequence[Numbers]) -> list[tuple[slice, int, float]] | None:
        """(rows, column, number) of what has changed; None if one copy is less work."""
        if len(numbers) != len(self._numbers):
            return None
        fills: list[tuple[slice, int, float]] = []
        for column, (new, old) in enumerate(
            zip(zip(*numbers, strict=True), zip(*self._numbers, strict=True), strict=True)
        ):
            if new == old:
                continue
            if len(set(new)) == 1:
                fills.append((slice(len(new)), column, new[0]))
            else:
                changed = (row for row, (one, other) in enumerate(zip(new, old, strict=True)) if one != other)
                fills += [(slice(row, row + 1), column, new[row]) for row in changed]
        return fills if len(fills) <= _FILLS else None

    def _copy(self, start: int, words: bytearray) -> None:
        sent = torch.frombuffer(words, dtype=torch.int64)
        here = slice(start, start + len(sent))
        if self.pinned is None:
            upload(sent, self._device, into=self._words[here])
        else:
            self._words[here].copy_(self.pinned[here].copy_(sent), non_blocking=True)

    def _correct(self, k: torch.Tensor) -> None:
        """Work out the corrections of steps ``k``, one a row."""
        if self._betas is None:
            raise ValueError("no coefficients were sent for steps that are counted on the device")
        rows = self.coefficients[: len(k)]
        left = 1 - self._betas ** k.view(-1, 1)
        rows[:, CORRECTION2] = left[:, 0].reciprocal()
        rows[:, CORRECTION3] = left[:, 1].rsqrt()
        rows[:, STEP] = k


def _table_of(addresses: Sequence[tuple[int, int, Memory, int]], words: int) -> bytearray:
    table = bytearray(8 * words)
    for at, row, memory, grad in addresses:
        param, m, v, average = memory.addresses
        aligned = not (param | grad | m | v | average) % ALIGNMENT
        _SHARD.pack_into(table, at * _SHARD.size, param, grad, m, v, average, aligned, row)
    return table


def _numbers(c: Coefficients, on_device: bool) -> Numbers:
    """A row of the table of coefficients; ``on_device`` if the device makes the corrections, from betas."""
    corrections = c.corrected if on_device else (1 / c.correction2, c.correction3**-0.5)
    return (
        c.alpha,
        1 - c.beta1,
        c.beta2,
        1 - c.beta2,
        c.beta3,
        1 - c.beta3,
        c.eps1,
        c.weight_decay,
        *corrections,
        c.step,
        c.sign,
    )
