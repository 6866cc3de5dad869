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
from ..shards import FlatShard, Span, batch_of
from . import build as native_build
from .build import NativeUnavailable

_STATES = (torch.float32, torch.bfloat16)
# From so many elements on (1.7 GB a step and more), one thread is a mistake of the launcher's.
_MANY = 100_000_000
# A thread is worth its start from so many elements on.
_ELEMENTS_A_THREAD = 1 << 16


# ``Span`` and ``Numbers`` of alto.c, field by field. What a step changes of a span comes first.
_POINTERS = "5Pq"
SPAN = struct.Struct(f"@{_POINTERS}4qI5i")
NUMBERS = struct.Struct("@7dq")
_CHANGES = struct.Struct(f"@{_POINTERS}")


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | NativeUnavailable:
    """The library, or why there is none: found out once a process."""
    try:
        loaded = native_build.library()
    except NativeUnavailable as error:
        return error
    except OSError as error:
        return NativeUnavailable(f"its library cannot be used: {error}")
    if (loaded.alto_span_size(), loaded.alto_numbers_size()) != (SPAN.size, NUMBERS.size):
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
    if shard.exp_avg_sq.dtype != torch.float32:
        return False
    for t in (shard.grad, shard.param, shard.exp_avg, shard.exp_avg_sq, shard.grad_ema):
        if t is not None and not (
            type(t) in PLAIN and t.dtype in _STATES and t.is_cpu and t.is_contiguous() and not t.is_neg()
        ):
            return False
    return True


class Spans:
    """The records of all spans that have stepped so far. Those that are not in a step are not touched in it."""

    def __init__(self) -> None:
        self._known: dict[int, _Shape] = {}
        """By place."""
        self._records: dict[int, list[tuple[int, int]]] = {}
        """By place, of each span: where its record is, and its first element."""
        self.spans = bytearray()
        self.blocks = 0

    def update(self, shards: Sequence[FlatShard]) -> bytearray:
        """Bring the records up to date; gives the numbers that they refer to."""
        shapes = [_shape_of(shard) for shard in shards]
        if any(self._known.get(shard.place) != shape for shard, shape in zip(shards, shapes, strict=True)):
            self._known.update((shard.place, shape) for shard, shape in zip(shards, shapes, strict=True))
            self._write()
        if len(shards) < len(self._known):
            for place in self._known.keys() - {shard.place for shard in shards}:
                for at, _ in self._records[place]:
                    _CHANGES.pack_into(self.spans, at, 0, 0, 0, 0, 0, 0)
        rows: dict[int, int] = {}
        numbers = bytearray()
        for shard in shards:
            c = shard.coefficients
            row = rows.get(id(c))
            if row is None:
                row = rows[id(c)] = len(rows)
                scale, eps = c.scale_and_eps()
                rho = -c.alpha * (1 - c.beta1)
                numbers += NUMBERS.pack(rho, c.beta1, c.beta2, c.beta3, eps, scale, c.weight_decay, c.step)
            grad, param, m, v, u = shard.grad, shard.param, shard.exp_avg, shard.exp_avg_sq, shard.grad_ema
            places = grad.data_ptr(), param.data_ptr(), m.data_ptr(), v.data_ptr(), 0 if u is None else u.data_ptr()
            for at, start in self._records[shard.place]:
                if start == 0:
                    _CHANGES.pack_into(self.spans, at, *places, row)
                else:
                    moved = (
                        address + start * t.itemsize if t is not None else 0
                        for address, t in zip(places, (grad, param, m, v, u), strict=True)
                    )
                    _CHANGES.pack_into(self.spans, at, *moved, row)
        return numbers

    def _write(self) -> None:
        """What no step changes, for all shards that are known."""
        block = _found().alto_block()
        self.spans = bytearray(SPAN.size * sum(len(shape.spans) for shape in self._known.values()))
        at = self.blocks = 0
        self._records = {}
        for place, shape in self._known.items():
            self._records[place] = records = []
            halves = (shape.grad, shape.param, shape.exp_avg, shape.grad_ema)
            flags = [dtype == torch.bfloat16 for dtype in halves]
            for start, stop, slot, ratio in shape.spans:
                length = stop - start
                SPAN.pack_into(self.spans, at, *(0,) * 6, length, start, slot, self.blocks, shape.seed, ratio, *flags)
                records.append((at, start))
                at += SPAN.size
                self.blocks += -(-length // block)


class _Shape(NamedTuple):
    """Of a shard, what no step changes."""

    spans: tuple[Span, ...]
    seed: int
    param: torch.dtype
    grad: torch.dtype
    exp_avg: torch.dtype
    grad_ema: torch.dtype | None


def _shape_of(shard: FlatShard) -> _Shape:
    u = shard.grad_ema
    dtypes = shard.param.dtype, shard.grad.dtype, shard.exp_avg.dtype, None if u is None else u.dtype
    return _Shape(shard.spans, shard.seed & 0xFFFFFFFF, *dtypes)


class Prepared(NamedTuple):
    """What C is to do, and what it leaves to torch. It costs some microseconds a shard, so phase two reuses it."""

    spans: bytearray
    numbers: bytearray
    blocks: int
    threads: int
    others: list[FlatShard]


def phase_one(shards: Sequence[FlatShard], sums: torch.Tensor) -> Prepared:
    prepared = _prepare(shards)
    # The sums are added up here, so that sums of any precision and place in memory will do.
    totals = torch.zeros(sums.shape, dtype=torch.float64, device="cpu")
    if _call("alto_phase_one", prepared, totals, ctypes.c_int64(sums.shape[1])):
        raise MemoryError("no memory for the sums of ALTO's blocks")
    sums += totals.to(sums.dtype)
    chunked.phase_one(prepared.others, sums)
    return prepared


def phase_two(shards: Sequence[FlatShard], step_sizes: torch.Tensor, prepared: Prepared | None = None) -> None:
    if prepared is None:
        prepared = _prepare(shards)
    wide = step_sizes.detach().to("cpu", torch.float64).contiguous()
    _call("alto_phase_two", prepared, wide)
    chunked.phase_two(prepared.others, step_sizes)


def _prepare(shards: Sequence[FlatShard]) -> Prepared:
    batch = batch_of(shards)
    ours = [shard for shard in batch if serves(shard)]
    others = [] if len(ours) == len(batch) else [shard for shard in batch if not serves(shard)]
    table = batch.kept.setdefault("native", Spans())
    numbers = table.update(ours)
    elements = sum(shard.param.numel() for shard in ours)
    threads = torch.get_num_threads()
    if threads == 1 and elements > _MANY:
        _warn_of_one_thread()
    return Prepared(table.spans, numbers, table.blocks, min(threads, 1 + elements // _ELEMENTS_A_THREAD), others)


@functools.lru_cache(maxsize=1)
def _warn_of_one_thread() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores > 1:
        warnings.warn(
            f"ALTO steps more than {_MANY:,} elements on one thread, and this process may use {cores} cores: torchrun "
            "sets OMP_NUM_THREADS=1 unless it is set. Set it to the number of cores a rank (cores / ranks)",
            stacklevel=2,
        )


def _call(name: str, prepared: Prepared, numbers: torch.Tensor, *rest: Any) -> Any:
    long = ctypes.c_int64
    spans, rows = ((ctypes.c_char * len(table)).from_buffer(table) for table in (prepared.spans, prepared.numbers))
    count = len(prepared.spans) // SPAN.size
    address = ctypes.c_void_p(numbers.data_ptr())
    return getattr(_found(), name)(
        spans, rows, long(count), long(prepared.blocks), long(prepared.threads), address, *rest
    )


def _found() -> ctypes.CDLL:
    found = _library()
    if isinstance(found, NativeUnavailable):
        raise found
    return found
