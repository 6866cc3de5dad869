"""The update in C, for tensors on the CPU: CPU training and DeepSpeed's ZeRO-Offload.

Python lists the spans, C does the rest, on ``torch.get_num_threads()`` threads and without the GIL. See
alto.c for what makes the result independent of the threads, and equal to that of :mod:`.chunked` to the
bit, sums aside. Pieces that C does not serve (float64, float16) go to :mod:`.chunked`.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from . import chunked, native_build
from .native_build import NativeUnavailable
from .pieces import NO_RATIO, Piece
from .rounding import EXP_AVG_BITS, GRAD_EMA_BITS, key_of

_STATES = (torch.float32, torch.bfloat16)
# A thread is worth its start from so many elements on.
_ELEMENTS_A_THREAD = 1 << 16


class SpanRecord(ctypes.Structure):
    """``Span`` of alto.c, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("grad", "param", "exp_avg", "exp_avg_sq", "grad_ema", "model_copy")),
        *((name, ctypes.c_int64) for name in ("length", "index", "slot", "first_block")),
        *((name, ctypes.c_double) for name in ("rho", "beta1", "beta2", "beta3")),
        *((name, ctypes.c_double) for name in ("eps", "scale", "weight_decay", "step_size")),
        *((name, ctypes.c_uint32) for name in ("grad_ema_key", "exp_avg_key")),
        *((f"{name}_is_bf16", ctypes.c_int32) for name in ("grad", "param", "exp_avg", "grad_ema")),
    )


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | NativeUnavailable:
    """The library, or why there is none: found out once a process."""
    try:
        loaded = native_build.library()
    except NativeUnavailable as error:
        return error
    except OSError as error:
        return NativeUnavailable(f"its library cannot be used: {error}")
    if loaded.alto_span_size() != ctypes.sizeof(SpanRecord):
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
            f"ALTO's C kernel is not available, and steps on the CPU will be about twice as slow: {found}. "
            'kernel="torch" says that this is intended.',
            stacklevel=2,
        )
        return False
    return True


def serves(piece: Piece) -> bool:
    """Whether C can work on these tensors where they are."""
    tensors = [piece.param, piece.grad, piece.exp_avg, piece.exp_avg_sq]
    tensors += [t for t in (piece.grad_ema, piece.model_copy) if t is not None]
    return (
        piece.exp_avg_sq.dtype == torch.float32
        and (piece.model_copy is None or piece.model_copy.dtype == torch.bfloat16)
        and all(_is_plain(t) for t in tensors)
    )


def _is_plain(t: torch.Tensor) -> bool:
    return (
        t.dtype in _STATES
        and t.device.type == "cpu"
        and type(t) in (torch.Tensor, torch.nn.Parameter)  # a subclass may have no memory, or another's
        and t.is_contiguous()
        and not t.is_neg()
    )


def phase_one(pieces: Sequence[Piece], sums: torch.Tensor) -> None:
    ours = [piece for piece in pieces if serves(piece)]
    # The sums are added up here, so that sums of any precision and place in memory will do.
    totals = torch.zeros(2, sums.shape[1], dtype=torch.float64)
    spans, blocks, threads = _spans(ours, None)
    failed = _call("alto_phase_one", spans, blocks, threads, totals[0], totals[1])
    if failed:
        raise MemoryError("no memory for the sums of ALTO's blocks")
    sums += totals.to(sums.dtype)
    if len(ours) < len(pieces):
        chunked.phase_one([piece for piece in pieces if not serves(piece)], sums)


def phase_two(pieces: Sequence[Piece], step_sizes: torch.Tensor) -> None:
    ours = [piece for piece in pieces if serves(piece)]
    wide = step_sizes.detach().to("cpu", torch.float64).contiguous()
    values = list((ctypes.c_double * wide.numel()).from_address(wide.data_ptr())) if wide.numel() else []
    _call("alto_phase_two", *_spans(ours, values))
    if len(ours) < len(pieces):
        chunked.phase_two([piece for piece in pieces if not serves(piece)], step_sizes)


def _spans(pieces: Sequence[Piece], step_sizes: Sequence[float] | None) -> tuple[ctypes.Array[SpanRecord], int, int]:
    """The records of all spans, the number of their blocks, and of the threads that these are worth."""
    block = _found().alto_block()
    records = (SpanRecord * sum(len(piece.spans) for piece in pieces))()
    at, blocks, elements = 0, 0, 0
    for piece in pieces:
        c = piece.coefficients
        scale, eps = c.scale_and_eps()
        tensors = (piece.grad, piece.param, piece.exp_avg, piece.exp_avg_sq, piece.grad_ema, piece.model_copy)
        places = [(0, 0) if t is None else (t.data_ptr(), t.element_size()) for t in tensors]
        numbers = (-c.alpha * (1 - c.beta1), c.beta1, c.beta2, c.beta3, eps, scale, c.weight_decay)
        is_bf16 = [t is not None and t.dtype == torch.bfloat16 for t in (*tensors[:3], piece.grad_ema)]
        keys = (key_of(piece, GRAD_EMA_BITS), key_of(piece, EXP_AVG_BITS))
        lr = float(c.lr) if step_sizes is not None else 0.0
        for start, stop, slot in piece.spans:
            step_size = lr if slot == NO_RATIO or step_sizes is None else step_sizes[slot]
            pointers = (address + start * size for address, size in places)
            records[at] = SpanRecord(*pointers, stop - start, start, slot, blocks, *numbers, step_size, *keys, *is_bf16)
            at += 1
            blocks += -(-(stop - start) // block)
            elements += stop - start
    return records, blocks, min(torch.get_num_threads(), 1 + elements // _ELEMENTS_A_THREAD)


def _call(name: str, spans: ctypes.Array[SpanRecord], blocks: int, threads: int, *totals: torch.Tensor) -> Any:
    long = ctypes.c_int64
    addresses = (ctypes.c_void_p(t.data_ptr()) for t in totals)
    return getattr(_found(), name)(spans, long(len(spans)), long(blocks), long(threads), *addresses)


def _found() -> ctypes.CDLL:
    found = _library()
    if isinstance(found, NativeUnavailable):
        raise found
    return found
