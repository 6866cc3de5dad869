"""What each vector instruction computes, over all lanes at once.

An entry has the kinds of its results, those of its sources, and a function of arrays. A kind is a type, or ``mask``:
one bit a lane. ``exec`` as a result is the mask of the lanes that go on. Names are AMD's, without the encoding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from . import floats


class Operation(NamedTuple):
    results: tuple[str, ...]
    sources: tuple[str, ...]
    function: Callable[..., Any]


def _operation(kinds: str, function: Callable[..., Any]) -> Operation:
    """``kinds`` is such as "u32 mask < u32 u32"."""
    results, sources = kinds.split("<")
    return Operation(tuple(results.split()), tuple(sources.split()), function)


def _add_carry(a: np.ndarray, b: np.ndarray, carry: Any = 0) -> tuple[np.ndarray, np.ndarray]:
    total = a.astype(np.uint64) + b + np.asarray(carry, np.uint64)
    return total.astype(np.uint32), total >> np.uint64(32) != 0


def _bit_field(x: np.ndarray, first: np.ndarray, width: np.ndarray) -> np.ndarray:
    return (x >> (first & 31)) & ((np.uint32(1) << (width & 31)) - np.uint32(1))


def _signed_bit_field(x: np.ndarray, first: np.ndarray, width: np.ndarray) -> np.ndarray:
    top = np.int64(1) << (width & 31).astype(np.int64)
    field = (x >> (first & 31).astype(np.int32)) & (top - 1)
    return np.where(2 * field >= top, field - top, field).astype(np.int32)


def _reversed_bits(x: np.ndarray) -> np.ndarray:
    bits = np.unpackbits(np.ascontiguousarray(x).view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    return np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(np.uint32)[:, 0]


def _permuted_bytes(high: np.ndarray, low: np.ndarray, selectors: np.ndarray) -> np.ndarray:
    high, low, selectors = np.broadcast_arrays(high, low, selectors)
    words = (high.astype(np.uint64) << np.uint64(32)) | low
    result = np.zeros(len(words), np.uint64)
    for place in range(4):
        selector = (selectors >> np.uint32(8 * place)).astype(np.uint64) & np.uint64(0xFF)
        byte = words >> (np.minimum(selector, 7) * np.uint64(8)) & np.uint64(0xFF)
        # 8 to 11 repeat the sign of bytes 1, 3, 5, 7; 12 is zeros, all above is ones.
        signed = np.clip(selector, 8, 11).astype(np.uint64) * np.uint64(16) - np.uint64(113)
        sign = (words >> signed & np.uint64(1)) * np.uint64(0xFF)
        byte = np.select([selector < 8, selector < 12, selector == 12], [byte, sign, np.uint64(0)], np.uint64(0xFF))
        result |= byte << np.uint64(8 * place)
    return result.astype(np.uint32)


def _to_u32(x: np.ndarray) -> np.ndarray:
    """Toward zero; what does not fit becomes the nearest that does, a NaN 0."""
    return np.nan_to_num(np.clip(np.trunc(x), 0, 2.0**32 - 1), nan=0).astype(np.uint32)


_COMPARISONS: dict[str, Callable[..., Any]] = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
    "NEQ": np.not_equal,  # true of a NaN, for which the others are false
    "O": lambda a, b: ~np.isnan(a) & ~np.isnan(b),
}


def _comparisons() -> dict[str, Operation]:
    found = {}
    for kind in ("f16", "f32", "f64", "i32", "u32", "i64", "u64"):
        for name, function in _COMPARISONS.items():
            if kind[0] == "f" if name in ("O", "NEQ") else kind[0] != "f" or name != "NE":
                found[f"V_CMP_{name}_{kind.upper()}"] = _operation(f"mask < {kind} {kind}", function)
                found[f"V_CMPX_{name}_{kind.upper()}"] = _operation(f"exec < {kind} {kind}", function)
    return found


ARITHMETIC: dict[str, Operation] = {
    **_comparisons(),
    "V_CMP_CLASS_F32": _operation("mask < f32 u32", floats.is_class_f32),
    # moves and choices
    "V_MOV_B32": _operation("u32 < u32", lambda a: a),
    "V_MOV_B64": _operation("u64 < u64", lambda a: a),
    "V_CNDMASK_B32": _operation("u32 < u32 u32 mask", lambda a, b, mask: np.where(mask, b, a)),
    "V_PERM_B32": _operation("u32 < u32 u32 u32", _permuted_bytes),
    "V_PACK_B32_F16": _operation("u32 < b16 b16", lambda a, b: a.astype(np.uint32) | b.astype(np.uint32) << 16),
    # integers
    "V_ADD_U32": _operation("u32 < u32 u32", np.add),
    "V_SUB_U32": _operation("u32 < u32 u32", np.subtract),
    "V_ADD3_U32": _operation("u32 < u32 u32 u32", lambda a, b, c: a + b + c),
    "V_ADD_CO_U32": _operation("u32 mask < u32 u32", _add_carry),
    "V_ADDC_CO_U32": _operation("u32 mask < u32 u32 mask", _add_carry),
    "V_MUL_LO_U32": _operation("u32 < u32 u32", np.multiply),
    "V_XAD_U32": _operation("u32 < u32 u32 u32", lambda a, b, c: (a ^ b) + c),
    "V_LSHL_ADD_U32": _operation("u32 < u32 u32 u32", lambda a, b, c: (a << (b & 31)) + c),
    "V_LSHL_ADD_U64": _operation("u64 < u64 u32 u64", lambda a, b, c: (a << (b & 7).astype(np.uint64)) + c),
    # bits
    "V_AND_B32": _operation("u32 < u32 u32", np.bitwise_and),
    "V_OR_B32": _operation("u32 < u32 u32", np.bitwise_or),
    "V_XOR_B32": _operation("u32 < u32 u32", np.bitwise_xor),
    "V_OR3_B32": _operation("u32 < u32 u32 u32", lambda a, b, c: a | b | c),
    "V_AND_OR_B32": _operation("u32 < u32 u32 u32", lambda a, b, c: (a & b) | c),
    "V_LSHL_OR_B32": _operation("u32 < u32 u32 u32", lambda a, b, c: (a << (b & 31)) | c),
    "V_BFI_B32": _operation("u32 < u32 u32 u32", lambda a, b, c: (a & b) | (~a & c)),
    "V_BFE_U32": _operation("u32 < u32 u32 u32", _bit_field),
    "V_BFE_I32": _operation("i32 < i32 u32 u32", _signed_bit_field),
    "V_BFREV_B32": _operation("u32 < u32", _reversed_bits),
    "V_LSHLREV_B32": _operation("u32 < u32 u32", lambda a, b: b << (a & 31)),
    "V_LSHRREV_B32": _operation("u32 < u32 u32", lambda a, b: b >> (a & 31)),
    "V_LSHLREV_B64": _operation("u64 < u32 u64", lambda a, b: b << (a & 63).astype(np.uint64)),
    # float32
    "V_ADD_F32": _operation("f32 < f32 f32", np.add),
    "V_SUB_F32": _operation("f32 < f32 f32", np.subtract),
    "V_MUL_F32": _operation("f32 < f32 f32", np.multiply),
    "V_FMA_F32": _operation("f32 < f32 f32 f32", floats.fma_f32),
    "V_FMAC_F32": _operation("f32 < f32 f32 f32", floats.fma_f32),
    "V_RCP_F32": _operation("f32 < f32", floats.rough_reciprocal),
    "V_SQRT_F32": _operation("f32 < f32", floats.rough_root),
    "V_DIV_SCALE_F32": _operation("f32 mask < f32 f32 f32", floats.div_scale_f32),
    "V_DIV_FMAS_F32": _operation("f32 < f32 f32 f32 mask", floats.div_fmas_f32),
    "V_DIV_FIXUP_F32": _operation("f32 < f32 f32 f32", floats.div_fixup_f32),
    # float64
    "V_ADD_F64": _operation("f64 < f64 f64", np.add),
    "V_MUL_F64": _operation("f64 < f64 f64", np.multiply),
    "V_FMA_F64": _operation("f64 < f64 f64 f64", floats.fma_f64),
    "V_FMAC_F64": _operation("f64 < f64 f64 f64", floats.fma_f64),
    "V_TRUNC_F64": _operation("f64 < f64", np.trunc),
    "V_FLOOR_F64": _operation("f64 < f64", np.floor),
    "V_LDEXP_F64": _operation("f64 < f64 i32", np.ldexp),
    # conversions
    "V_CVT_F32_F16": _operation("f32 < f16", lambda a: a.astype(np.float32)),
    "V_CVT_F16_F32": _operation("f16 < f32", lambda a: a.astype(np.float16)),
    "V_CVT_F32_F64": _operation("f32 < f64", lambda a: a.astype(np.float32)),
    "V_CVT_F64_F32": _operation("f64 < f32", lambda a: a.astype(np.float64)),
    "V_CVT_F64_I32": _operation("f64 < i32", lambda a: a.astype(np.float64)),
    "V_CVT_U32_F64": _operation("u32 < f64", _to_u32),
}

# Two float32 numbers in a pair of registers, each of them as this operation says.
PACKED = {"V_PK_ADD_F32": np.add, "V_PK_MUL_F32": np.multiply}

# RDNA3 has other names for what CDNA3 has too.
ARITHMETIC["V_ADD_NC_U32"] = ARITHMETIC["V_ADD_U32"]
ARITHMETIC["V_SUB_NC_U32"] = ARITHMETIC["V_SUB_U32"]
ARITHMETIC["V_ADD_CO_CI_U32"] = ARITHMETIC["V_ADDC_CO_U32"]
