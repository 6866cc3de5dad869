"""What moves between lanes, and parts of registers: DPP, SDWA, lanes read into scalar registers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .decode import Instruction
from .operands import FIRST_VGPR, TYPES, Reader, Unsupported
from .wave import EXEC, Wave

_ROW = 16  # lanes


def dpp_lanes(control: int, lanes: int, cdna: bool) -> tuple[np.ndarray, np.ndarray]:
    """The lane that each lane reads, and whether there is one."""
    lane = np.arange(lanes)
    row, within = lane // _ROW * _ROW, lane % _ROW
    amount = control & 15
    if control < 0x100:  # within each four
        return lane // 4 * 4 + (control >> 2 * (lane % 4) & 3), np.ones(lanes, bool)
    if 0x111 <= control <= 0x11F:  # a lane further up in the row
        return np.maximum(lane - amount, row), within >= amount
    if control == 0x142 and cdna:  # the last lane of the row before
        return np.maximum(row - 1, 0), row > 0
    if control == 0x143 and cdna:  # the last lane of the first half
        return np.full(lanes, 31), lane >= 32
    raise Unsupported(f"the DPP control {control:#x}")


def dpp_source(instruction: Instruction) -> Callable[[Wave, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Moves the first operand between lanes; also gives the lanes that are written."""
    size = 64 if instruction.cdna else 32
    source, known = dpp_lanes(instruction["dpp"], size, instruction.cdna)
    lane = np.arange(size)
    enabled = (instruction["row_mask"] >> lane // _ROW & 1) & (instruction["bank_mask"] >> lane % _ROW // 4 & 1) != 0
    zero_instead = bool(instruction["bc"])
    if instruction.get("fi"):
        raise Unsupported("DPP that reads lanes that are not active")

    def moved(wave: Wave, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        there = known & wave.active[source]
        result = np.where(there, value[source], value.dtype.type(0))
        return result, wave.active & enabled & (there | zero_instead)

    return moved


def selected(instruction: Instruction, read: Reader, operand: int, kind: str) -> Reader:
    """A byte or a half of a register, as SDWA has it."""
    selector, extend = instruction[f"src{operand}_sel"], instruction[f"src{operand}_sext"]
    if extend:
        raise Unsupported("signed parts of registers")
    dtype = TYPES[kind]
    if selector == 6:
        first, mask = 0, 0xFFFFFFFF
    elif selector >= 4:
        first, mask = (selector - 4) * 16, 0xFFFF
    else:
        first, mask = selector * 8, 0xFF
    if kind[1:] == "16":
        return lambda wave: (read(wave) >> first & np.uint32(mask)).astype(np.uint16).view(dtype)
    return lambda wave: (read(wave) >> first & np.uint32(mask)).view(dtype)


def read_lane(instruction: Instruction) -> Callable[[Wave], None]:
    """V_READFIRSTLANE and V_READLANE: of one lane, whether active or not."""
    register, target = instruction["src0"] - FIRST_VGPR, instruction["vdst"]
    if register < 0:
        raise Unsupported(f"{instruction.label} of a scalar")
    if instruction.name == "V_READLANE_B32":
        code = instruction["src1"]
        if not 128 <= code <= 192:
            raise Unsupported(f"{instruction.label} of a lane in a register")

        def run(wave: Wave) -> None:
            wave.set_scalar(target, int(wave.v[register, (code - 128) % wave.lanes]), 1)

    else:

        def run(wave: Wave) -> None:
            mask = wave.mask(EXEC)
            first = (mask & -mask).bit_length() - 1 if mask else 0
            wave.set_scalar(target, int(wave.v[register, first]), 1)

    return run


def permute_other_row(instruction: Instruction) -> Callable[[Wave], None]:
    """V_PERMLANEX16: each lane reads one of the other row of its pair, which one is in two scalars."""
    register, target = instruction["src0"] - FIRST_VGPR, instruction["vdst"]
    selectors = [instruction[f"src{n}"] for n in (1, 2)]
    if register < 0 or any(code >= 128 and not 128 <= code <= 208 for code in selectors):
        raise Unsupported(f"{instruction.label} with the operands {instruction.fields}")
    # Where a lane is not active: 0 with bound control, else the lane keeps what it has. Both are bits of opsel.
    also_inactive, zero_instead = instruction["opsel"] & 1, instruction["opsel"] >> 1 & 1

    def scalar(wave: Wave, code: int) -> int:
        if code < 128:
            return wave.s[code]
        return (code - 128 if code <= 192 else 192 - code) & 0xFFFFFFFF

    def run(wave: Wave) -> None:
        choice = scalar(wave, selectors[0]) | scalar(wave, selectors[1]) << 32
        lane = np.arange(wave.lanes)
        within = np.array([choice >> 4 * n & 15 for n in range(_ROW)])[lane % _ROW]
        source = (lane // _ROW ^ 1) * _ROW + within
        there = wave.active[source] | bool(also_inactive)
        result = np.where(there, wave.v[register][source], np.uint32(0))
        np.copyto(wave.v[target], result, where=wave.active & (there | bool(zero_instead)))

    return run
