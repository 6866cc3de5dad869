"""Whether a kernel is right on the very device on which it is to run, found out there.

Both phases run on small tensors of the dtypes in use: odd lengths, misaligned beginnings, padding, slots that several
tensors share, scaled gradients, a gradient of zeros, and a step that is skipped. States must have the bits of the
reference on the same device, sums and weights may differ by rounding, and a second run must give the same bits.

Each number that a kernel takes changes the result by more than rounding: a fifth of the elements is as small as eps1,
indices straddle 2^32, and tensors take turns in their hyperparameters. (eps2, eps3, the limits of the ratio and the
learning rates are in the step sizes, which no kernel makes.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from ..hyperparameters import Hyperparameters
from . import reference
from .protocol import Kernel
from .shards import NONZERO, SUMS, Coefficients, Dtypes, FlatShard, Span

_SLOTS = 4
_HYPERS = (
    Hyperparameters(maximize=True, weight_decay=0.3, eps=(1e-5, 1e-6, 1e-10)),
    Hyperparameters(
        alpha=0.5, betas=(0.2, 0.8, 0.95), weight_decay=0.05, eps=(3e-5, 1e-6, 1e-10), bias_correction=False
    ),
)
_SMALL = 1e-5
_STATES = ("grad_ema", "exp_avg", "exp_avg_sq")
_TENSORS = ("param", "grad", *_STATES)
# Lengths around what programs take at a time, with a beginning off every alignment; each with spans that leave gaps.
_LENGTHS_AND_OFFSETS = ((9001, 0), (4097, 1), (515, 3), (1, 0), (31, 2))
# One rounding of the result; the arithmetic before it is the same operation by operation, up to a square root.
_ONE_PLACE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def complaint(
    kernel: Kernel, skipping: Callable[[torch.Tensor], Kernel], device: torch.device, dtypes: Iterable[Dtypes]
) -> str:
    """What a kernel does wrong on a device, in words; "" if nothing was found. Waits for the device.

    Args:
        kernel: to be checked.
        skipping: makes it one that changes nothing if a flag on the device is not 0.
        device: on which it is to run.
        dtypes: of the tensors that it is to serve.
    """
    try:
        for some in sorted(dtypes, key=str):
            wrong = _wrong_with(kernel, skipping, device, some)
            if wrong:
                return f"with {some.in_words()}: {wrong}"
    except Exception as error:  # a compiler's or a driver's: whatever it is, the kernel cannot be used
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""


def _wrong_with(
    kernel: Kernel, skipping: Callable[[torch.Tensor], Kernel], device: torch.device, dtypes: Dtypes
) -> str:
    shards = _shards(device, dtypes)
    step_sizes = torch.tensor([0.02, 0.5, 1e-3, 0.0], dtype=torch.float64, device="cpu").to(device)
    got, expected, again, skipped = (_copied(shards) for _ in range(4))
    sums, true_sums, sums_again = (
        _two_steps(k, s, step_sizes) for k, s in ((kernel, got), (reference, expected), (kernel, again))
    )
    for place, (shard, truth) in enumerate(zip(got, expected, strict=True)):
        for name in _STATES:
            if not _same(getattr(shard, name), getattr(truth, name)):
                return f"{name} of a tensor of {_LENGTHS_AND_OFFSETS[place][0]} elements is not the reference's"
        if not torch.equal(*(t.isnan() for t in (shard.param, truth.param))):
            return "weights outside of spans were written, or some inside were not"
        bound = _ONE_PLACE[shard.param.dtype]
        if not torch.allclose(shard.param.nan_to_num(), truth.param.nan_to_num(), rtol=bound, atol=1e-6):
            return "weights are not the reference's"
    if not torch.allclose(sums[:NONZERO], true_sums[:NONZERO], rtol=1e-5):
        return "sums of squares are not the reference's"
    if not torch.equal(sums[NONZERO] > 0, true_sums[NONZERO] > 0):
        return "gradients of zeros are not told from others"
    if not _all_same(got, again) or not torch.equal(sums, sums_again):
        return "a second run gives other bits"
    _two_steps(skipping(torch.ones(1, dtype=torch.float32, device=device)), skipped, step_sizes)
    return "" if _all_same(skipped, shards) else "a skipped step changes something"


def _two_steps(kernel: Kernel, shards: Sequence[FlatShard], step_sizes: torch.Tensor) -> torch.Tensor:
    sums = torch.zeros(SUMS, _SLOTS, dtype=torch.float64, device=step_sizes.device)
    for k in (1, 2):
        shards = [
            replace(shard, coefficients=Coefficients.at_step(_HYPERS[n % len(_HYPERS)], k))
            for n, shard in enumerate(shards)
        ]
        kernel.phase_two(shards, step_sizes, kernel.phase_one(shards, sums))
    return sums


def _shards(device: torch.device, dtypes: Dtypes) -> list[FlatShard]:
    """Made on the host, so that they are the same on every device. NaN lies outside of the spans."""
    generator = torch.Generator("cpu").manual_seed(1234)
    shards = []
    for n, (length, offset) in enumerate(_LENGTHS_AND_OFFSETS):
        middle = length // 2
        slots = [n % 3, 3] if n % 3 != 1 else [2, 0]
        gap = 3 if length > 50 else 0
        spans = [Span(0, middle, slots[0], True, n + 7, 1000 * n)] if middle else []
        spans.append(Span(middle + gap, length, slots[1], True, n + 100, 2**32 - length // 4))
        inside = torch.zeros(length, dtype=torch.bool, device="cpu")
        for span in spans:
            inside[span.start : span.stop] = True

        def tensor(
            dtype: torch.dtype | None, power: int = 1, offset: int = offset, inside: torch.Tensor = inside
        ) -> torch.Tensor | None:
            if dtype is None:
                return None
            values = torch.randn(len(inside), generator=generator, dtype=torch.float32, device="cpu")
            values[::5] *= _SMALL**power
            values = torch.where(inside, values.abs() if power == 2 else values, torch.nan)
            storage = torch.zeros(len(inside) + offset, dtype=dtype, device=device)
            storage[offset:] = values.to(device, dtype)
            return storage[offset:]

        tensors = [tensor(dtypes.param, 0), tensor(dtypes.grad), tensor(dtypes.exp_avg), tensor(torch.float32, 2)]
        param, grad, m, v = (t for t in tensors if t is not None)
        shard = FlatShard(
            param,
            grad,
            m,
            v,
            tensor(dtypes.grad_ema),
            tuple(spans),
            Coefficients.at_step(_HYPERS[0], 1),
            inverse_scale=torch.full((), 0.25, dtype=torch.float32, device=device),
        )
        for span in spans:
            if span.slot == 3:
                shard.grad[span.start : span.stop] = 0.0  # in this slot, of all tensors
        shards.append(shard)
    return shards


def _copied(shards: Sequence[FlatShard]) -> list[FlatShard]:
    """With the same alignment."""

    def copy(t: torch.Tensor | None) -> torch.Tensor | None:
        if t is None:
            return None
        offset = t.storage_offset()
        storage = torch.zeros(len(t) + offset, dtype=t.dtype, device=t.device)
        storage[offset:] = t
        return storage[offset:]

    copies = list(shards)
    for i, shard in enumerate(shards):
        copies[i] = replace(shard)
        for name in _TENSORS:
            setattr(copies[i], name, copy(getattr(shard, name)))
    return copies


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """To the bit."""
    if one is None or other is None:
        return one is other
    whole = {4: torch.int32, 2: torch.int16}[one.element_size()]
    return torch.equal(one.clone().view(whole), other.clone().view(whole))


def _all_same(some: Sequence[FlatShard], others: Sequence[FlatShard]) -> bool:
    return all(
        _same(getattr(one, name), getattr(other, name))
        for one, other in zip(some, others, strict=True)
        for name in _TENSORS
    )
