"""Where instructions find their operands and leave their results.

All of it is worked out once, when an instruction is decoded; what remains for the run is a function of the wave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .decode import Instruction
from .wave import EXEC, NULL_RDNA, VCC, Wave

Reader = Callable[[Wave], np.ndarray]
Writer = Callable[[Wave, Any, np.ndarray | None], None]

FIRST_VGPR, _LITERAL = 256, 255
_INTEGERS, _NEGATIVE, _FLOATS = 128, 192, 240
_FLOAT_VALUES = (0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0)
TYPES: dict[str, Any] = {
    "u32": np.uint32,
    "i32": np.int32,
    "f32": np.float32,
    "u64": np.uint64,
    "i64": np.int64,
    "f64": np.float64,
    "f16": np.float16,
    "b16": np.uint16,
}


class Unsupported(Exception):
    """The emulator has no such instruction, or not with these modifiers."""


def constant(code: int, kind: str, literal: int) -> int | None:
    """The bits that an operand's code stands for as a number of ``kind``; None where it names a register."""
    bits = int(kind[1:])
    if code == _LITERAL:
        if kind == "f64":
            return literal << 32
        if bits == 64 and literal >> 31:
            raise Unsupported(f"a literal {literal:#x} for {kind}")
        return literal & (1 << bits) - 1
    if _FLOATS <= code < _FLOATS + len(_FLOAT_VALUES):
        width = {16: np.float16, 32: np.float32, 64: np.float64}[bits]
        return int.from_bytes(width(_FLOAT_VALUES[code - _FLOATS]).tobytes(), "little")
    if _INTEGERS <= code <= _NEGATIVE + 16:
        value = code - _INTEGERS if code <= _NEGATIVE else _NEGATIVE - code
        return value & (1 << bits) - 1
    if code >= FIRST_VGPR or code < _INTEGERS:
        return None
    raise Unsupported(f"an operand {code}")


def reader(instruction: Instruction, code: int, kind: str) -> Reader:
    """The lanes of an operand. One element stands for all lanes where they are the same."""
    if kind == "mask":
        return _mask_reader(code)
    bits = constant(code, kind, instruction.get("literal"))
    dtype = TYPES[kind]
    if bits is not None:
        value = np.array([bits], f"u{np.dtype(dtype).itemsize}").view(dtype)
        return lambda wave: value
    if code >= FIRST_VGPR:
        register = code - FIRST_VGPR
        if kind[1:] == "16":
            if not instruction.cdna and register >= 128 and "VOP3" not in instruction.form:
                raise Unsupported("upper halves of registers")
            return lambda wave: wave.v[register].astype(np.uint16).view(dtype)
        if kind[1:] == "32":
            return lambda wave: wave.v[register].view(dtype)
        return lambda wave: np.ascontiguousarray(wave.v[register : register + 2].T).view(dtype)[:, 0]
    if not instruction.cdna and code == NULL_RDNA:
        return lambda wave: np.zeros(1, dtype)
    if kind[1:] == "64":
        return lambda wave: np.array([wave.s[code] | wave.s[code + 1] << 32], np.uint64).view(dtype)
    if kind[1:] == "16":
        return lambda wave: np.array([wave.s[code] & 0xFFFF], np.uint16).view(dtype)
    return lambda wave: np.array([wave.s[code]], np.uint32).view(dtype)


def _mask_reader(register: int) -> Reader:
    if register >= _INTEGERS:
        raise Unsupported(f"a mask in the operand {register}")

    def read(wave: Wave) -> np.ndarray:
        words = np.array(wave.s[register : register + wave.lanes // 32], np.uint32)
        return np.unpackbits(words.view(np.uint8), bitorder="little").view(bool)

    return read


def with_sign(read: Reader, negate: int, absolute: int, kind: str) -> Reader:
    """The modifiers of an operand: -x, |x|, -|x|."""
    if not negate and not absolute:
        return read
    if kind[0] != "f":
        raise Unsupported(f"a sign for {kind}")
    if not absolute:
        return lambda wave: np.negative(read(wave))
    if not negate:
        return lambda wave: np.abs(read(wave))
    return lambda wave: np.negative(np.abs(read(wave)))


def writer(instruction: Instruction, kind: str, register: int) -> Writer:
    """Writes the lanes that are active, or of these the ones given."""
    if kind == "mask":
        return _mask_writer(register, instruction)
    if kind == "exec":
        return lambda wave, value, lanes: _write_mask(wave, EXEC, value)
    if kind[1:] == "64":

        def write_pair(wave: Wave, value: np.ndarray, lanes: np.ndarray | None) -> None:
            halves = np.ascontiguousarray(value).view(np.uint32)
            lanes = wave.active if lanes is None else lanes
            np.copyto(wave.v[register], halves[0::2], where=lanes)
            np.copyto(wave.v[register + 1], halves[1::2], where=lanes)

        return write_pair
    if kind[1:] == "16":

        def write_half(wave: Wave, value: np.ndarray, lanes: np.ndarray | None) -> None:
            # CDNA3 clears the upper half, RDNA3 leaves it.
            upper = np.uint32(0 if instruction.cdna else 0xFFFF0000)
            word = (wave.v[register] & upper) | value.view(np.uint16)
            np.copyto(wave.v[register], word, where=wave.active if lanes is None else lanes)

        return write_half

    def write(wave: Wave, value: np.ndarray, lanes: np.ndarray | None) -> None:
        if lanes is None and wave.all_active:
            wave.v[register] = value.view(np.uint32)
        else:
            np.copyto(wave.v[register], value.view(np.uint32), where=wave.active if lanes is None else lanes)

    return write


def _mask_writer(register: int, instruction: Instruction) -> Writer:
    if not instruction.cdna and register == NULL_RDNA:
        return lambda wave, value, lanes: None
    return lambda wave, value, lanes: _write_mask(wave, register, value)


def _write_mask(wave: Wave, register: int, value: np.ndarray) -> None:
    """Lanes that are not active get 0."""
    bits = np.packbits(value & wave.active, bitorder="little").tobytes()
    wave.set_mask(register, int.from_bytes(bits, "little"))


#: Where an encoding does not name the register of a mask.
implicit_mask: Reader = _mask_reader(VCC)
