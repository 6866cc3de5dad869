# mypy: ignore-errors
# ruff: noqa: SIM300
# (see kernel.py)
"""Elements on their way between memory and a Triton kernel: addresses, precisions, rounding.

bfloat16 is read and written as its bits, here and not by Triton's conversions: those of its interpreter,
in which the tests run this file, truncate where a GPU rounds.

No ``from __future__ import annotations`` here: Triton reads the annotations.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ..rounding import EXP_AVG_BITS, GRAD_EMA_BITS
from . import columns

_ALIGNMENT = tl.constexpr(columns.ALIGNMENT)

# Which rounding a state's random bits are for.
FOR_GRAD_EMA = tl.constexpr(GRAD_EMA_BITS)
FOR_EXP_AVG = tl.constexpr(EXP_AVG_BITS)

_ELEMENT_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, None: None}


def element_type(dtype: torch.dtype | None) -> Any:
    """Triton's name of a dtype that a launch is compiled for; None for a tensor that is not there."""
    return _ELEMENT_TYPES[dtype]


@triton.jit
def _pointers(address, tile, DTYPE: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr):
    if WIDE:
        # The address is a multiple already. The arithmetic makes the promise below true of this very value, however
        # the compiler moves it about, also where a misaligned shard takes the other path.
        address = address // _ALIGNMENT * _ALIGNMENT
    if DTYPE == tl.bfloat16:
        base = address.to(tl.pointer_type(tl.uint16), bitcast=True)
    else:
        base = address.to(tl.pointer_type(DTYPE), bitcast=True)
    if WIDE:
        base = tl.multiple_of(base, _ALIGNMENT)
    return base + (tile * TILE + tl.arange(0, TILE))


@triton.jit
def load(address, tile, inside, DTYPE: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr):
    """The elements of a tile as float32; 0 outside of the chunk."""
    pointers = _pointers(address, tile, DTYPE, TILE, WIDE)
    if WIDE:
        raw = tl.load(pointers)
    else:
        raw = tl.load(pointers, mask=inside, other=0)
    if DTYPE == tl.bfloat16:
        return from_bits(raw)
    else:
        return raw.to(tl.float32)


@triton.jit
def from_bits(bits):
    """bfloat16, as memory has it, as float32."""
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def store(address, tile, inside, value, DTYPE: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr):
    """``value``, already in the form in which memory has it."""
    pointers = _pointers(address, tile, DTYPE, TILE, WIDE)
    if WIDE:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=inside)


@triton.jit
def to_nearest(x, DTYPE: tl.constexpr):
    """float32 in the form in which memory has ``DTYPE``: for bfloat16 its bits, ties to even."""
    if DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = _plus(bits, 0x7FFF + ((bits >> 16) & 1)) >> 16
        # A NaN keeps its sign and leading bits and stays one.
        return tl.where(x == x, nearest, (bits >> 16) | 0x40).to(tl.uint16)
    else:
        return x.to(DTYPE)


@triton.jit
def _mix(x):
    """A permutation of 32-bit numbers in which each bit of the input moves half of the output's."""
    x ^= x >> 16
    x = _times(x, 0x7FEB352D)
    x ^= x >> 15
    x = _times(x, 0x846CA68B)
    x ^= x >> 16
    return x


@triton.jit
def _times(x, factor):
    """Modulo 2^32. In 32 bits Triton would take it for an overflow, in its debug mode."""
    return (x.to(tl.uint64) * factor).to(tl.uint32)


@triton.jit
def _plus(x, y):
    """Modulo 2^32, see :func:`_times`."""
    return (x.to(tl.uint64) + y).to(tl.uint32)


@triton.jit
def rounding_key(seed, step, WHICH: tl.constexpr):
    """The key of one state of one parameter at one step."""
    mixed = _mix(_plus(_times(step.to(tl.uint32), 0x9E3779B9), seed.to(tl.uint64)))
    return _mix(_plus(mixed, WHICH))


@triton.jit
def to_either_side(x, key, first, TILE: tl.constexpr):
    """float32 as the bits of a bfloat16 above or below, at random, in proportion to the distance of the other.

    ``first`` is the index of the first element. Those of padding before a parameter are below 0, and of no importance.
    """
    lower = _plus(first.to(tl.uint32), tl.arange(0, TILE).to(tl.uint64))
    # A tile straddles at most one multiple of 2^32, so the upper half of its indices is one of two numbers.
    upper = (first >> 32).to(tl.uint32)
    here, beyond = _mix(_plus(key, upper.to(tl.uint64))), _mix(_plus(key, upper.to(tl.uint64) + 1))
    noise = _mix(lower ^ tl.where(lower >= first.to(tl.uint32), here, beyond)) & 0xFFFF
    bits = x.to(tl.uint32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    rounded = (_plus(bits, noise) >> 16).to(tl.uint16)
    return tl.where(finite, rounded, to_nearest(x, tl.bfloat16))
