"""Stochastic rounding to bfloat16, with bits that are a function of position and step.

A moving average with decay 0.99 hardly moves in bfloat16 under rounding to nearest: its steps are smaller
than half a unit in the last place. Rounded up or down by chance, in proportion to the distance, it is
right in the mean.

The chance comes from a generator without a state of its own: the bits of an element follow from the seed of its
parameter, the number of the step, which state it is, and the element's index in the parameter. So a resumed run goes
on to the bit, replicas stay equal, a run over other ranks has the same values, and so has every kernel (C and Triton
too). All arithmetic is on unsigned 32-bit integers::

    mix(x)               x ^= x>>16; x *= 0x7feb352d; x ^= x>>15; x *= 0x846ca68b; x ^= x>>16
    key(seed, k, which)  mix(mix(seed + 0x9e3779b9*k) + which)
    bits(key, i)         mix((i & 0xffffffff) ^ mix(key + (i >> 32)))

A float32 is rounded by adding the lower 16 of these bits to its own and keeping the upper half.

Weights in bfloat16 are rounded to nearest, unless they are masters: then an update below half a unit in the last place
would be lost, and they are rounded by chance too. A weight that does not move keeps its bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from .shards import FlatShard, Span

GRAD_EMA_BITS = 0
EXP_AVG_BITS = 1
WEIGHT_BITS = 2

_MASK = 0xFFFFFFFF
# The generator works in int64, so its temporaries are several times as large as what is rounded.
_AT_A_TIME = 1 << 16


def mix(x: int) -> int:
    x &= _MASK
    x ^= x >> 16
    x = (x * 0x7FEB352D) & _MASK
    x ^= x >> 15
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def key_of(seed: int, k: int, which: int) -> int:
    """The key of one state of a parameter at step k."""
    return mix(mix(seed + 0x9E3779B9 * k) + which)


def random_bits(key: int, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """bits(key, i) of the elements [start, stop), as int64."""
    i = torch.arange(start, stop, dtype=torch.int64, device=device)
    return _mix((i & _MASK) ^ _mix((i >> 32).add_(key).bitwise_and_(_MASK)))


def store_weights(shard: FlatShard, span: Span, value: torch.Tensor) -> None:
    """Put new weights into their place: to nearest, or at random where the shard asks for it."""
    target = shard.param[span.start : span.stop]
    if shard.rounds_weights:
        store(target, value, span, shard.coefficients.step, WEIGHT_BITS)
    else:
        target.copy_(value)


def store(target: torch.Tensor, value: torch.Tensor, span: Span, k: int, which: int) -> None:
    """Put ``value`` into ``target``, the elements of ``span`` in one of its tensors, at step k; round if need be."""
    if target.dtype == value.dtype:
        target.copy_(value)
        return
    key = key_of(span.seed, k, which)
    for low in range(0, value.numel(), _AT_A_TIME):
        x = value[low : low + _AT_A_TIME]
        noise = random_bits(key, span.offset + low, span.offset + low + x.numel(), x.device).bitwise_and_(0xFFFF)
        rounded = (x.view(torch.int32) + noise.to(torch.int32)).bitwise_right_shift_(16).to(torch.int16)
        # Infinity and NaN have no neighbors to choose from.
        target[low : low + _AT_A_TIME] = torch.where(x.isfinite(), rounded.view(torch.bfloat16), x.to(torch.bfloat16))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """:func:`mix` of values below 2^32; a product may wrap around 2^64, which leaves its lower half right."""
    x = x ^ (x >> 16)
    x.mul_(0x7FEB352D).bitwise_and_(_MASK)
    x.bitwise_xor_(x >> 15)
    x.mul_(0x846CA68B).bitwise_and_(_MASK)
    return x.bitwise_xor_(x >> 16)


class Rounding:
    """The same for parts of many tensors at once, in a fixed number of operations, all on the device.

    Keys are made once a step for all parts; elements are rounded one list of parts at a time.

    Args:
        lists: of parts: a shard and a span of it; the indices of none straddle a multiple of 2^32. All are at the same
            step, or know theirs on the device.
        kept: where what hangs on the parts alone is kept from step to step.
    """

    def __init__(self, lists: Sequence[Sequence[tuple[FlatShard, Span]]], kept: dict[Any, Any]) -> None:
        self._parts = list(itertools.chain.from_iterable(lists))
        ends = list(itertools.accumulate(map(len, lists)))
        self._slices = [slice(end - len(some), end) for some, end in zip(lists, ends, strict=True)]
        self._kept = kept
        self._keys: dict[int, torch.Tensor] = {}
        self._index: tuple[int, torch.Tensor] | None = None

    def store(self, number: int, targets: Sequence[torch.Tensor], values: torch.Tensor, which: int) -> None:
        """Round ``values``, the parts of a list one after the other in float32, and put them into ``targets``.

        ``values`` become what was stored.
        """
        lengths = [span.stop - span.start for _, span in self._parts[self._slices[number]]]
        inner = self._inner(which, values.device)[self._slices[number]]
        # As random_bits, in int32: sums and products wrap, and a shift is followed by a mask.
        x = self._indices(number, lengths, values.device) ^ _expanded(inner, lengths)
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
            x.bitwise_xor_((x >> shift).bitwise_and_(_MASK >> shift)).mul_(factor)
        noise = x.bitwise_xor_(x >> 16).bitwise_and_(0xFFFF)
        rounded = noise.add_(values.view(torch.int32)).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)
        rounded = torch.where(values.isfinite(), rounded, values.to(torch.bfloat16))
        torch._foreach_copy_(list(targets), list(torch.split(rounded, lengths)))
        values.copy_(rounded)

    def _indices(self, number: int, lengths: Sequence[int], device: torch.device) -> torch.Tensor:
        """The lower halves of the indices of all elements of a list. Those of the last one asked for are kept."""
        if self._index is None or self._index[0] != number:
            index = torch.arange(sum(lengths), dtype=torch.int32, device=device)
            index += _expanded(self._constants(device)[2][self._slices[number]].to(torch.int32), lengths)
            self._index = number, index
        return self._index[1]

    def _inner(self, which: int, device: torch.device) -> torch.Tensor:
        """mix(key + (i >> 32)) of each part."""
        if which not in self._keys:
            seeds, upper, _ = self._constants(device)
            key = _mix(_mix((seeds + 0x9E3779B9 * self._step()).bitwise_and_(_MASK)).add_(which).bitwise_and_(_MASK))
            self._keys[which] = _mix(key.add_(upper).bitwise_and_(_MASK)).to(torch.int32)
        return self._keys[which]

    def _step(self) -> int | torch.Tensor:
        """k, or one a part where it is on the device."""
        counters = [shard.counter for shard, _ in self._parts if shard.counter is not None]
        return torch.stack(counters).long() if counters else self._parts[0][0].coefficients.step

    def _constants(self, device: torch.device) -> Sequence[torch.Tensor]:
        """Of each part: its seed, the upper half of its indices, and what makes a place in its list an index."""
        key = "rounding", tuple((shard.place, span) for shard, span in self._parts)
        if key not in self._kept:
            rows = []
            for some in self._slices:
                place = 0
                for _, span in self._parts[some]:
                    rows.append((span.seed & _MASK, span.offset >> 32, _wrapped(span.offset - place)))
                    place += span.stop - span.start
            self._kept[key] = torch.tensor(rows, dtype=torch.int64, device="cpu").T.contiguous().to(device)
        found: Sequence[torch.Tensor] = self._kept[key]
        return found


def _wrapped(number: int) -> int:
    """Modulo 2^32, as an int32."""
    number &= _MASK
    return number - 2**32 if number >= 2**31 else number


def _expanded(numbers: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    return torch.cat([number.expand(length) for number, length in zip(numbers.unbind(), lengths, strict=True)])
