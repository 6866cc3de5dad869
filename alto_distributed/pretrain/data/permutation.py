"""Pseudo-random orders that take no memory: any element of them can be computed from a few numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.uint64]

_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def mix(numbers: NDArray[Any], *keys: int) -> Numbers:
    """64 pseudo-random bits for each number, the same wherever and whenever they are computed.

    The finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014), once for
    each key and once more.
    """
    mixed = numbers.astype(np.uint64)
    for key in (*keys, 0):
        # In Python's integers, for numpy warns when a scalar wraps; arrays wrap silently.
        mixed = mixed ^ np.uint64((key * _GOLDEN + _GOLDEN) & _MASK)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
    return mixed


class Permutation:
    """A shuffle of ``0 .. size - 1`` that is never written down.

    A Feistel network over pairs (left, right) of digits in base ceil(sqrt(size)): each round adds a hash of one digit
    to the other, which can be undone, so the whole is one to one. Results at or above ``size`` go through it again
    until they fall below; as there are at most 2 sqrt(size) of them, that is rare.

    Args:
        size: how many numbers to permute, up to 2**62.
        keys: whole numbers; other keys, another order.
    """

    def __init__(self, size: int, *keys: int) -> None:
        if not 1 <= size <= 2**62:
            raise ValueError(f"size={size} of a permutation must lie between 1 and 2**62")
        self.size = size
        self._keys = keys
        self._base = np.uint64(math.isqrt(size - 1) + 1)

    def __call__(self, positions: NDArray[Any]) -> NDArray[np.int64]:
        """What stands at ``positions``, each between 0 and ``size - 1``."""
        if positions.size and not (positions.min() >= 0 and positions.max() < self.size):
            raise ValueError(f"positions must lie between 0 and {self.size - 1}")
        found = self._once(positions.astype(np.uint64))
        while (outside := found >= self.size).any():
            found[outside] = self._once(found[outside])
        return found.astype(np.int64)

    def _once(self, numbers: Numbers) -> Numbers:
        left, right = numbers // self._base, numbers % self._base
        for round_number in range(_ROUNDS):
            left, right = right, (left + mix(right, *self._keys, round_number) % self._base) % self._base
        result: Numbers = left * self._base + right
        return result
