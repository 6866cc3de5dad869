"""Floating point that numpy does not have: fused products and sums, the steps of a division, rough functions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

_SIGN, _EXPONENT, _QUIET = np.uint32(0x80000000), np.uint32(0x7F800000), np.uint32(0x00400000)


def fma_f32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c in float32, rounded once."""
    return _fma_to_odd(a, b, c).astype(np.float32)


def _fma_to_odd(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c of float32 numbers in float64, rounded to odd, which makes rounding it again to float32 harmless."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)  # 48 bits: exact
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)  # what the sum has lost, exactly
    bits = total.view(np.int64)
    # Where something was lost and the last bit is 0, the odd neighbor on that side is the result.
    wrong = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    return np.where(wrong, bits + np.where((error > 0) == (total > 0), 1, -1), bits).view(np.float64)


def fma_f64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The same in float64. Slow, but programs do it once."""
    numbers = (n.tolist() for n in np.broadcast_arrays(a, b, c))
    return np.array([_one_fma(*some) for some in zip(*numbers, strict=True)], np.float64)


def _one_fma(a: float, b: float, c: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if not exact:
        return a * b + c  # for the sign of the zero
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def _exponent(x: np.ndarray) -> np.ndarray:
    """As memory has it: 127 is that of 1."""
    return ((x.view(np.uint32) & _EXPONENT) >> 23).astype(np.int64)


def _is_denormal(x: np.ndarray) -> np.ndarray:
    return (_exponent(x) == 0) & (x != 0)


def div_scale_f32(value: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``value``, one of the denominator ``low`` and the numerator ``high``, scaled so that no step of the division
    overflows or loses bits; and whether the last step has to scale the quotient back.

    Where both 1/low and high/low are denormal, AMD's text has the denominator grow. That would be infinity. It has to
    shrink for the quotient to grow.
    """
    value, low, high = np.broadcast_arrays(value, low, high)
    is_low, is_high = value == low, value == high
    quotient = high.astype(np.float64) / low.astype(np.float64)
    tiny_quotient = (np.abs(quotient) < 2.0**-126) & (high != 0)
    tiny_inverse = np.abs(low) > np.float32(2.0**126)
    cases = [
        (high == 0) | (low == 0),
        _exponent(high) - _exponent(low) >= 96,
        _is_denormal(low),
        tiny_inverse & tiny_quotient,
        tiny_inverse,
        tiny_quotient,
        _exponent(high) <= 23,
    ]
    shifts = [0, np.where(is_low, 64, 0), 64, np.where(is_low, -64, 0), -64, np.where(is_high, 64, 0), 64]
    scaled = np.ldexp(value, np.select(cases, shifts, 0).astype(np.int32))
    scaled = np.where(cases[0], np.float32(np.nan), scaled)
    return scaled, np.select(cases, [False, True, False, True, False, True, False], False)


def div_fmas_f32(a: np.ndarray, b: np.ndarray, c: np.ndarray, scaled: np.ndarray) -> np.ndarray:
    """a b + c, scaled back where :func:`div_scale_f32` said so, rounded once.

    ``c`` is nearly the quotient. A large one was scaled down, a small one up, both by 2^64. AMD's text has 2^32,
    with which such divisions would come out wrong.
    """
    exact = _fma_to_odd(*np.broadcast_arrays(a, b, c))
    back = np.where(_exponent(np.broadcast_to(c, exact.shape)) > 127, 2.0**64, 2.0**-64)
    return np.where(scaled, exact * back, exact).astype(np.float32)


def div_fixup_f32(quotient: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The quotient, or what IEEE says of infinities, zeros and NaN.

    A quotient too large for float32 arrives here as NaN: the step before subtracts infinities. AMD's text is silent
    on it. The result can only be infinity.
    """
    quotient, low, high = np.broadcast_arrays(quotient, low, high)
    sign = (low.view(np.uint32) ^ high.view(np.uint32)) & _SIGN
    quiet = [(x.view(np.uint32) | _QUIET) for x in (high, low)]
    nothing, no_bound = np.zeros_like(sign), np.full_like(sign, _EXPONENT)
    cases = [
        (np.isnan(high), quiet[0]),
        (np.isnan(low), quiet[1]),
        ((low == 0) & (high == 0) | np.isinf(low) & np.isinf(high), np.full_like(sign, 0xFFC00000)),
        ((low == 0) | np.isinf(high), sign | no_bound),
        (np.isinf(low) | (high == 0), sign | nothing),
        (_exponent(high) - _exponent(low) < -150, sign | nothing),
        (np.isnan(quotient), sign | no_bound),
    ]
    ordinary = np.abs(quotient).view(np.uint32) | sign
    return np.select([case for case, _ in cases], [value for _, value in cases], ordinary).view(np.float32)


def _roughly(exact: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Up to one unit in the last place from the truth, as AMD allows: which way follows from the operand's bits."""
    off = ((x.view(np.uint32) * np.uint32(2654435761)) >> 30).astype(np.int64) % 3 - 1
    moved = (exact.view(np.uint32).astype(np.int64) + off).astype(np.uint32).view(np.float32)
    # Zeros, infinities and powers of two stay; so do results that would stop being ordinary numbers.
    kept = (x.view(np.uint32) & np.uint32(0x7FFFFF)) == 0
    return np.where(kept | ~np.isfinite(exact) | (_exponent(moved) == 0) | (_exponent(moved) == 255), exact, moved)


def _flushed(x: np.ndarray) -> np.ndarray:
    """Denormals as zeros, which the rough functions may do."""
    return np.where(_is_denormal(x), np.copysign(np.float32(0), x), x)


def rough_reciprocal(x: np.ndarray) -> np.ndarray:
    return _flushed(_roughly(np.float32(1) / _flushed(x), x))


def rough_root(x: np.ndarray) -> np.ndarray:
    return _roughly(np.sqrt(_flushed(x)), x)


def is_class_f32(x: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Whether a number is in one of the ten classes whose bits are set."""
    bits = x.view(np.uint32)
    negative, exponent = (bits & _SIGN) != 0, _exponent(x)
    cases = [
        (np.isnan(x) & (bits & _QUIET == 0), 0),
        (np.isnan(x), 1),
        (exponent == 255, np.where(negative, 2, 9)),
        (exponent > 0, np.where(negative, 3, 8)),
        (x != 0, np.where(negative, 4, 7)),
    ]
    bit = np.select([case for case, _ in cases], [value for _, value in cases], np.where(negative, 5, 6))
    return (classes >> bit.astype(np.uint32)) & 1 != 0
