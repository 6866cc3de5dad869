"""The update in C, for tensors on the CPU: CPU training and DeepSpeed's ZeRO-Offload.

Python lists the spans, C does the rest, on ``torch.get_num_threads()`` threads and without the GIL. See
alto.c for what makes the result independent of the threads, and equal to that of :mod:`.chunked` to the
bit, sums aside. Shards that C does not serve (float64, float16) go to :mod:`.chunked`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...spans import PLAIN
from .. import chunked
from ..rounding import EXP_AVG_BITS, GRAD_EMA_BITS, key_of
from ..shards import FlatShard
from . import build as native_build
from .build import NativeUnavailable

_STATES = (torch.float32, torch.bfloat16)
# From so many elements on (1.7 GB a step and more), one thread is a mistake of the launcher's.
_MANY = 100_000_000
# A thread is worth its start from so many elements on.
_ELEMENTS_A_THREAD = 1 << 16


# ``Span`` of alto.c, field by field: six pointers, four int64, eight doubles, two keys, four flags.
SPAN = struct.Struct("@6P4q8d2I4i")


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | NativeUnavailable:
    """The library, or why there is none: found out once a process."""
    try:
        loaded = native_build.library()
    except NativeUnavailable as error:
        return error
    except OSError as error:
        return NativeUnavailable(f"its library cannot be used: {error}")
    if loaded.alto_span_size() != SPAN.size:
        return NativeUnavailable("the C compiler lays out structures in an unknown way")
    loaded.alto_phase_one.restype = ctypes.c_int
    loaded.alto_phase_two.restype = None
    return loaded


def require() -> None:
    """Raise NativeUnavailable unless the kernel can be used."""
    found = _library()
    if isinstance(found, NativeUnavailable):
        raise NativeUnavailable(
            f'kernel="native" cannot be had: {found}. Or use kernel="torch", which gives the same result more slowly'
        )


@functools.lru_cache(maxsize=1)
def available() -> bool:
    """Whether the kernel can be used; if not, warns, the first time."""
    found = _library()
    if isinstance(found, NativeUnavailable):
        warnings.warn(
            f"ALTO's C kernel is not available, and steps on the CPU will be two or three times as slow: {found}. "
            'kernel="torch" says that this is intended.',
            stacklevel=2,
        )
        return False
    return True


def serves(shard: FlatShard) -> bool:
    """Whether C can work on these tensors where they are."""
    return (
        shard.exp_avg_sq.dtype == torch.float32
        and (shard.model_copy is None or shard.model_copy.dtype == torch.bfloat16)
        and all(map(_is_plain, _tensors(shard)))
    )


def _tensors(shard: FlatShard) -> tuple[torch.Tensor | None, ...]:
    """In the order of alto.c."""
    return shard.grad, shard.param, shard.exp_avg, shard.exp_avg_sq, shard.grad_ema, shard.model_copy


def _is_plain(t: torch.Tensor | None) -> bool:
    return t is None or (type(t) in PLAIN and t.dtype in _STATES and t.is_cpu and t.is_contiguous() and not t.is_neg())


class Prepared(NamedTuple):
    """What C is to do, and what it leaves to torch. It costs some microseconds a shard, so phase two reuses it."""

    spans: bytearray
    blocks: int
    threads: int
    others: list[FlatShard]


def phase_one(shards: Sequence[FlatShard], sums: torch.Tensor) -> Prepared:
    prepared = _prepare(shards)
    # The sums are added up here, so that sums of any precision and place in memory will do.
    totals = torch.zeros(2, sums.shape[1], dtype=torch.float64, device="cpu")
    if _call("alto_phase_one", prepared.spans, prepared.blocks, prepared.threads, totals[0], totals[1]):
        raise MemoryError("no memory for the sums of ALTO's blocks")
    sums += totals.to(sums.dtype)
    chunked.phase_one(prepared.others, sums)
    return prepared


def phase_two(shards: Sequence[FlatShard], step_sizes: torch.Tensor, prepared: Prepared | None = None) -> None:
    if prepared is None:
        prepared = _prepare(shards)
    wide = step_sizes.detach().to("cpu", torch.float64).contiguous()
    _call("alto_phase_two", prepared.spans, prepared.blocks, prepared.threads, wide)
    chunked.phase_two(prepared.others, step_sizes)


def _prepare(shards: Sequence[FlatShard]) -> Prepared:
    ours: list[FlatShard] = []
    others: list[FlatShard] = []
    for shard in shards:
        (ours if serves(shard) else others).append(shard)
    return Prepared(*_spans(ours), others)


def _spans(shards: Sequence[FlatShard]) -> tuple[bytearray, int, int]:
    """The records of all spans, the number of their blocks, and of the threads that these are worth."""
    block = _found().alto_block()
    spans = bytearray(SPAN.size * sum(len(shard.spans) for shard in shards))
    at, blocks, elements = 0, 0, 0
    numbers_of: dict[int, tuple[float, ...]] = {}
    for shard in shards:
        c = shard.coefficients  # the same for all shards of a group
        if id(c) not in numbers_of:
            scale, eps = c.scale_and_eps()
            rho, lr = -c.alpha * (1 - c.beta1), float(c.lr)
            numbers_of[id(c)] = (rho, c.beta1, c.beta2, c.beta3, eps, scale, c.weight_decay, lr)
        tensors = _tensors(shard)
        places = [(0, 0) if t is None else (t.data_ptr(), t.itemsize) for t in tensors]
        grad, param, exp_avg, _, grad_ema, _ = (size == 2 for _, size in places)
        keys = key_of(shard, GRAD_EMA_BITS) if grad_ema else 0, key_of(shard, EXP_AVG_BITS) if exp_avg else 0
        rest = (*numbers_of[id(c)], *keys, grad, param, exp_avg, grad_ema)
        for start, stop, slot in shard.spans:
            pointers = [address + start * size for address, size in places] if start else [a for a, _ in places]
            SPAN.pack_into(spans, at, *pointers, stop - start, start, slot, blocks, *rest)
            at += SPAN.size
            blocks += -(-(stop - start) // block)
            elements += stop - start
    threads = torch.get_num_threads()
    if threads == 1 and elements > _MANY:
        _warn_of_one_thread()
    return spans, blocks, min(threads, 1 + elements // _ELEMENTS_A_THREAD)


@functools.lru_cache(maxsize=1)
def _warn_of_one_thread() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores > 1:
        warnings.warn(
            f"ALTO steps more than {_MANY:,} elements on one thread, and this process may use {cores} cores: torchrun "
            "sets OMP_NUM_THREADS=1 unless it is set. Set it to the number of cores a rank (cores / ranks)",
            stacklevel=2,
        )


def _call(name: str, spans: bytearray, blocks: int, threads: int, *numbers: torch.Tensor) -> Any:
    long = ctypes.c_int64
    place = (ctypes.c_char * len(spans)).from_buffer(spans)
    addresses = (ctypes.c_void_p(t.data_ptr()) for t in numbers)
    return getattr(_found(), name)(place, long(len(spans) // SPAN.size), long(blocks), long(threads), *addresses)


def _found() -> ctypes.CDLL:
    found = _library()
    if isinstance(found, NativeUnavailable):
        raise found
    return found
