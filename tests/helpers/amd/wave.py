"""The state of one wave: its registers, and which of its lanes are active."""

from __future__ import annotations

import numpy as np

from .memory import Memory

VCC, NULL_RDNA, EXEC = 106, 124, 126
ALL_SGPRS = 128
# What registers and LDS hold before a kernel writes them: nothing that a kernel may rely on. As a float it is NaN.
GARBAGE = 0xFFDEADBE


def lanes_of(mask: int, lanes: int) -> np.ndarray:
    """A mask as one bool a lane."""
    return np.unpackbits(np.frombuffer(mask.to_bytes(lanes // 8, "little"), np.uint8), bitorder="little").view(bool)


class Wave:
    """Scalar registers are Python numbers below 2^32, vector registers rows of ``v``."""

    def __init__(self, lanes: int, vgprs: int, memory: Memory, lds: np.ndarray) -> None:
        self.lanes = lanes
        self.memory = memory
        self.lds = lds
        self.s = [GARBAGE] * ALL_SGPRS
        self.v = np.full((vgprs, lanes), GARBAGE, np.uint32)
        self.scc = 0
        self.active = np.ones(lanes, bool)
        self.all_active = True
        self.set_mask(EXEC, (1 << lanes) - 1)

    def mask(self, register: int) -> int:
        """One bit a lane, in as many registers as that takes."""
        if self.lanes == 32:
            return self.s[register]
        return self.s[register] | self.s[register + 1] << 32

    def set_mask(self, register: int, value: int) -> None:
        self.set_scalar(register, value, self.lanes // 32)

    def scalar(self, register: int, words: int) -> int:
        value = self.s[register]
        for n in range(1, words):
            value |= self.s[register + n] << 32 * n
        return value

    def set_scalar(self, register: int, value: int, words: int) -> None:
        for n in range(words):
            self.s[register + n] = value >> 32 * n & 0xFFFFFFFF
        if register + words > EXEC:
            mask = self.mask(EXEC)
            self.active = lanes_of(mask, self.lanes)
            self.all_active = mask == (1 << self.lanes) - 1
