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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import chunked
from ..shards import Coefficients, FlatShard, Memory, Span, batch_of
from . import build as native_build
from .build import NativeUnavailable

if TYPE_CHECKING:
    from typing import TypeGuard

_SERVED = frozenset((torch.float32, torch.bfloat16, None))
# From so many elements on (0.4 GB a step and more), one thread is a mistake of the launcher's.
_MANY = 10_000_000
# A thread is worth its start from so many elements on.
_ELEMENTS_A_THREAD = 1 << 16


# ``Span`` and ``Numbers`` of alto.c, field by field. What a step changes of a span comes first.
_POINTERS = "5Pq"
SPAN = struct.Struct(f"@{_POINTERS}4qI6i4x")
NUMBERS = struct.Struct("@8dq")
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
    return _serves(shard.memory)


def _serves(memory: Memory | None) -> TypeGuard[Memory]:
    return (
        memory is not None
        and memory.device.type == "cpu"
        and memory.dtypes[3] == torch.float32
        and _SERVED.issuperset(memory.dtypes)
    )


@dataclass(slots=True)
class Record:
    """Of a shard, what no step changes, and where the records of its spans are."""

    spans: tuple[Span, ...]
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype, torch.dtype | None]
    rounds_weights: bool
    written: list[tuple[int, int]] = field(default_factory=list)
    """Of each span: its place in the table, and its first element."""

    def is_of(self, shard: FlatShard, memory: Memory) -> bool:
        # Most spans and dtypes are the very objects of last time, so that comparing them takes no time.
        return (
            self.spans == shard.spans and self.dtypes == memory.dtypes and self.rounds_weights == shard.rounds_weights
        )


class Spans:
    """The records of all spans that have stepped so far. Those that are not in a step are not touched in it."""

    def __init__(self) -> None:
        self._known: dict[int, Record] = {}
        """By place."""
        self.spans = bytearray()
        self.blocks = self.elements = 0

    def update(self, shards: Iterable[FlatShard]) -> tuple[bytearray, list[FlatShard]]:
        """Bring the records up to date; gives the numbers that they refer to, and the shards that C does not serve."""
        known, ours, others, has_new = self._known, [], [], False
        for shard in shards:
            memory, record = shard.memory, known.get(shard.place)
            if memory is None or record is None or not record.is_of(shard, memory):
                if not _serves(memory):
                    others.append(shard)
                    continue
                record, has_new = Record(shard.spans, memory.dtypes, shard.rounds_weights), True
                known[shard.place] = record
            ours.append((shard, memory, record))
        if has_new:
            self._write()
        if len(ours) < len(known):
            for place in known.keys() - {shard.place for shard, _, _ in ours}:
                for at, _ in known[place].written:
                    _CHANGES.pack_into(self.spans, at, 0, 0, 0, 0, 0, 0)
        rows: dict[int, int] = {}
        numbers, spans = bytearray(), self.spans
        for shard, memory, record in ours:
            c = shard.coefficients
            row = rows.get(id(c))
            if row is None:
                row = rows[id(c)] = len(rows)
                numbers += _numbers(c, float(shard.gradient_factor))
            param, m, v, u = memory.addresses
            grad = shard.grad.data_ptr()
            for at, start in record.written:
                if start == 0:
                    _CHANGES.pack_into(spans, at, param, grad, m, v, u, row)
                else:
                    moved = (
                        address + start * dtype.itemsize if dtype is not None else 0
                        for address, dtype in zip((param, grad, m, v, u), record.dtypes, strict=True)
                    )
                    _CHANGES.pack_into(spans, at, *moved, row)
        return numbers, others

    def _write(self) -> None:
        """What no step changes, for all shards that are known."""
        block = _found().alto_block()
        self.spans = bytearray(SPAN.size * sum(len(record.spans) for record in self._known.values()))
        at = self.blocks = self.elements = 0
        for record in self._known.values():
            record.written = []
            param, grad, m, _, u = record.dtypes
            flags = [dtype == torch.bfloat16 for dtype in (param, grad, m, u)]
            for start, stop, slot, ratio, seed, offset in record.spans:
                length = stop - start
                fixed = length, offset, slot, self.blocks, seed & 0xFFFFFFFF, ratio, *flags, record.rounds_weights
                SPAN.pack_into(self.spans, at, *(0,) * 6, *fixed)
                record.written.append((at, start))
                at += SPAN.size
                self.elements += length
                self.blocks += -(-length // block)


def _numbers(c: Coefficients, gradient_factor: float) -> bytes:
    scale, eps = c.scale_and_eps()
    rho = -c.alpha * (1 - c.beta1)
    return NUMBERS.pack(rho, c.beta1, c.beta2, c.beta3, eps, scale, c.weight_decay, gradient_factor, c.step)


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
    table = batch.kept.setdefault("native", Spans())
    numbers, others = table.update(batch)
    threads = torch.get_num_threads()
    if threads == 1 and table.elements > _MANY:
        _warn_of_one_thread()
    threads = min(threads, 1 + table.elements // _ELEMENTS_A_THREAD)
    return Prepared(table.spans, numbers, table.blocks, threads, others)


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
