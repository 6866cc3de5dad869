"""Scalar instructions: one value for all lanes, in Python's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .decode import Instruction
from .operands import Unsupported, constant
from .wave import EXEC, NULL_RDNA, VCC, Wave

Jump = Callable[[Wave], "int | None"]

_32, _64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


def _signed(value: int, bits: int = 32) -> int:
    return value - (1 << bits) if value >> bits - 1 else value


class Operation(NamedTuple):
    """``function`` takes the sources and SCC. It gives the result and the next SCC, None where there is none."""

    words: tuple[int, ...]
    """Registers of the result, then of each source."""
    function: Callable[..., tuple[int | None, int | None]]


def _logic(words: int, function: Callable[[int, int], int]) -> Operation:
    def run(a: int, b: int, scc: int) -> tuple[int, int]:
        result = function(a, b)
        return result, int(result != 0)

    return Operation((words, words, words), run)


def _shift(words: int, function: Callable[[int, int], int]) -> Operation:
    def run(a: int, b: int, scc: int) -> tuple[int, int]:
        result = function(a, b & 32 * words - 1) & (1 << 32 * words) - 1
        return result, int(result != 0)

    return Operation((words, words, 1), run)


def _sum(a: int, b: int, scc: int) -> tuple[int, int]:
    return a + b & _32, a + b >> 32


def _signed_sum(a: int, b: int, scc: int) -> tuple[int, int]:
    total = _signed(a) + _signed(b)
    return total & _32, int(not -(1 << 31) <= total < 1 << 31)


def _signed_difference(a: int, b: int, scc: int) -> tuple[int, int]:
    total = _signed(a) - _signed(b)
    return total & _32, int(not -(1 << 31) <= total < 1 << 31)


def _bit_field(a: int, b: int, scc: int) -> tuple[int, int]:
    result = a >> (b & 31) & (1 << (b >> 16 & 127)) - 1
    return result, int(result != 0)


def _shifted_sum(amount: int) -> Operation:
    def run(a: int, b: int, scc: int) -> tuple[int, int]:
        total = (a << amount) + b
        return total & _32, int(total >> 32 != 0)

    return Operation((1, 1, 1), run)


SCALAR: dict[str, Operation] = {
    "S_MOV_B32": Operation((1, 1), lambda a, scc: (a, None)),
    "S_MOV_B64": Operation((2, 2), lambda a, scc: (a, None)),
    "S_ADD_U32": Operation((1, 1, 1), _sum),
    "S_ADDC_U32": Operation((1, 1, 1), lambda a, b, scc: (a + b + scc & _32, a + b + scc >> 32)),
    "S_ADD_I32": Operation((1, 1, 1), _signed_sum),
    "S_SUB_I32": Operation((1, 1, 1), _signed_difference),
    "S_MUL_I32": Operation((1, 1, 1), lambda a, b, scc: (a * b & _32, None)),
    "S_MUL_HI_U32": Operation((1, 1, 1), lambda a, b, scc: (a * b >> 32, None)),
    "S_MUL_HI_I32": Operation((1, 1, 1), lambda a, b, scc: (_signed(a) * _signed(b) >> 32 & _32, None)),
    "S_AND_B32": _logic(1, lambda a, b: a & b),
    "S_AND_B64": _logic(2, lambda a, b: a & b),
    "S_OR_B32": _logic(1, lambda a, b: a | b),
    "S_OR_B64": _logic(2, lambda a, b: a | b),
    "S_XOR_B32": _logic(1, lambda a, b: a ^ b),
    "S_XOR_B64": _logic(2, lambda a, b: a ^ b),
    "S_LSHL_B32": _shift(1, lambda a, b: a << b),
    "S_LSHL_B64": _shift(2, lambda a, b: a << b),
    "S_LSHR_B32": _shift(1, lambda a, b: a >> b),
    "S_ASHR_I32": _shift(1, lambda a, b: _signed(a) >> b),
    "S_ASHR_I64": _shift(2, lambda a, b: _signed(a, 64) >> b),
    "S_BFE_U32": Operation((1, 1, 1), _bit_field),
    "S_LSHL3_ADD_U32": _shifted_sum(3),
    "S_LSHL4_ADD_U32": _shifted_sum(4),
    "S_CSELECT_B32": Operation((1, 1, 1), lambda a, b, scc: (a if scc else b, None)),
    "S_CSELECT_B64": Operation((2, 2, 2), lambda a, b, scc: (a if scc else b, None)),
    "S_CMP_EQ_U64": Operation((0, 2, 2), lambda a, b, scc: (None, int(a == b))),
    "S_CMP_LG_U64": Operation((0, 2, 2), lambda a, b, scc: (None, int(a != b))),
    # The second operand is in the instruction, see below.
    "S_MOVK_I32": Operation((1, 1), lambda k, scc: (k, None)),
    "S_MULK_I32": Operation((1, 1, 1), lambda a, k, scc: (a * k & _32, None)),
}

# What the emulator need not do: it runs instructions one after the other, and memory answers at once.
WAITS = frozenset(
    ["S_NOP", "S_WAITCNT", "S_WAITCNT_VSCNT", "S_WAITCNT_DEPCTR", "S_DELAY_ALU", "S_CLAUSE", "BUFFER_GL0_INV"]
)


def scalar(instruction: Instruction) -> Callable[[Wave], None]:
    """What a SALU instruction that does not jump does to a wave."""
    if instruction.name.startswith("S_AND_SAVEEXEC"):
        return _save_exec(instruction)
    operation = SCALAR[instruction.name]
    readers = [_reader(instruction, n, words) for n, words in enumerate(operation.words[1:])]
    function, words, target = operation.function, operation.words[0], instruction.get("sdst")

    def run(wave: Wave) -> None:
        result, scc = function(*[read(wave) for read in readers], wave.scc)
        if result is not None:
            wave.set_scalar(target, result, words)
        if scc is not None:
            wave.scc = scc

    return run


def _reader(instruction: Instruction, operand: int, words: int) -> Callable[[Wave], int]:
    if instruction.encoding == "SOPK":
        number = _signed(instruction["simm16"], 16) & _32
        if operand or instruction.name == "S_MOVK_I32":
            return lambda wave: number
        code = instruction["sdst"]
    else:
        code = instruction[f"ssrc{operand}"]
    if code == 253:
        raise Unsupported("SCC as an operand")
    value = constant(code, f"u{32 * words}", instruction.get("literal"))
    if value is not None:
        return lambda wave: value
    if not instruction.cdna and code == NULL_RDNA:
        return lambda wave: 0
    return lambda wave: wave.scalar(code, words)


def _save_exec(instruction: Instruction) -> Callable[[Wave], None]:
    words = 2 if instruction.name.endswith("B64") else 1
    read, target = _reader(instruction, 0, words), instruction["sdst"]

    def run(wave: Wave) -> None:
        before = wave.scalar(EXEC, words)
        after = read(wave) & before
        wave.set_scalar(EXEC, after, words)
        wave.set_scalar(target, before, words)
        wave.scc = int(after != 0)

    return run


_CONDITIONS: dict[str, Callable[[Wave], bool]] = {
    "S_BRANCH": lambda wave: True,
    "S_CBRANCH_EXECZ": lambda wave: not wave.mask(EXEC),
    "S_CBRANCH_EXECNZ": lambda wave: bool(wave.mask(EXEC)),
    "S_CBRANCH_VCCZ": lambda wave: not wave.mask(VCC),
    "S_CBRANCH_VCCNZ": lambda wave: bool(wave.mask(VCC)),
}
JUMPS = frozenset(_CONDITIONS)


def jump(instruction: Instruction, place: int) -> Jump:
    """Where a wave goes on, None for the next instruction."""
    condition = _CONDITIONS[instruction.name]
    target = place + 4 + 4 * _signed(instruction["simm16"], 16)
    return lambda wave: target if condition(wave) else None
