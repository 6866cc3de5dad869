"""A launch: workgroups one after the other, the waves of each from barrier to barrier."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from .access import buffer_access, global_access, lds_access, scalar_load
from .code_object import CodeObject
from .decode import ARCHITECTURES, Instruction, decode
from .lanes import permute_other_row, read_lane
from .memory import Memory
from .operands import Unsupported
from .scalar import JUMPS, SCALAR, WAITS, jump, scalar
from .vector import vector
from .wave import GARBAGE, Wave

Step = Callable[[Wave], Any]

_BARRIER, _END = -1, -2  # instead of the place of the next instruction
_FREE_REGISTERS = 3  # the message with which a wave hands its registers back before it ends


def executable(instruction: Instruction, place: int) -> Step:
    """What an instruction does to a wave; the function gives the place of the next one where that is another."""
    name, encoding = instruction.name, instruction.encoding
    if name in WAITS or (name == "S_SENDMSG" and instruction["simm16"] == _FREE_REGISTERS):
        return lambda wave: None
    if name == "S_ENDPGM":
        return lambda wave: _END
    if name == "S_BARRIER":
        return lambda wave: _BARRIER
    if name in JUMPS:
        return jump(instruction, place)
    if name in ("V_READFIRSTLANE_B32", "V_READLANE_B32"):
        return read_lane(instruction)
    if name == "V_PERMLANEX16_B32":
        return permute_other_row(instruction)
    makers: dict[str, Callable[[Instruction], Step]] = {
        "SMEM": scalar_load,
        "GLOBAL": global_access,
        "MUBUF": buffer_access,
        "DS": lds_access,
    }
    if encoding in makers:
        return makers[encoding](instruction)
    try:
        if encoding.startswith("VOP"):
            return vector(instruction)
        if name in SCALAR or name.startswith("S_AND_SAVEEXEC"):
            return scalar(instruction)
    except KeyError as error:
        raise Unsupported(f"{instruction.label} ({instruction.form}): {error}") from None
    raise Unsupported(f"{instruction.label} ({instruction.form})")


class Program:
    """The instructions of a code object, each made ready when a wave first comes to it."""

    def __init__(self, code: CodeObject) -> None:
        self._code = code.code
        self._architecture = ARCHITECTURES[code.target]
        self._steps: dict[int, tuple[Step, int]] = {}

    def run(self, wave: Wave, place: int) -> tuple[int, int, int]:
        """To the next barrier or the end: which, where the wave goes on, and how many instructions that were."""
        steps, count = self._steps, 0
        while True:
            found = steps.get(place)
            if found is None:
                instruction = decode(self._code[place:], self._architecture)
                found = steps[place] = executable(instruction, place), place + len(instruction.code)
            step, following = found
            try:
                there = step(wave)
            except Exception as error:
                error.add_note(f"at {place:#x}: {decode(self._code[place:], self._architecture)}")
                raise
            count += 1
            if there is None:
                place = following
            elif there < 0:
                return there, following, count
            else:
                place = there


_program = functools.lru_cache(maxsize=None)(Program)


def launch(
    code: CodeObject,
    grid: tuple[int, int, int],
    waves: int,
    memory: Memory,
    arguments: int,
    *,
    lds_size: int,
    order: random.Random | None = None,
) -> int:
    """Run a kernel to its end; how many instructions that were.

    Args:
        code: the kernel.
        grid: workgroups in each dimension.
        waves: in each workgroup.
        memory: what it can reach.
        arguments: the address of its arguments.
        lds_size: bytes that the waves of a workgroup share.
        order: shuffles the workgroups, and the waves of each; without it they run as they are numbered.
    """
    groups = list(itertools.product(*map(range, grid)))
    if order:
        order.shuffle(groups)
    executed = 0
    with np.errstate(all="ignore"):
        for place in groups:
            lds = np.full(-(-lds_size // 8) * 2, GARBAGE, np.uint32).view(np.uint8)
            group = [_wave(code, n, place, memory, lds, arguments) for n in range(waves)]
            if order:
                order.shuffle(group)
            executed += _run_group(_program(code), group, code.entry)
    return executed


def _run_group(program: Program, waves: list[Wave], entry: int) -> int:
    executed = 0
    going = [(wave, entry) for wave in waves]
    while going:
        waiting = []
        for wave, place in going:
            reason, place, count = program.run(wave, place)
            executed += count
            if reason == _BARRIER:
                waiting.append((wave, place))
        if waiting and len(waiting) < len(going):
            raise RuntimeError("some waves of a workgroup wait at a barrier, and others have ended")
        going = waiting
    return executed


def _wave(
    code: CodeObject, number: int, group: tuple[int, ...], memory: Memory, lds: np.ndarray, arguments: int
) -> Wave:
    """As the hardware hands it over."""
    wave = Wave(code.wave_size, max(code.vgprs, 1), memory, lds)
    wave.set_scalar(0, arguments, 2)
    first, count = code.preloaded
    if count:
        words = memory.load(np.uint64(arguments) + np.arange(first, first + count, dtype=np.uint64) * np.uint64(4), 4)
        for n, word in enumerate(words.tolist()):
            wave.set_scalar(2 + n, word, 1)
    register = code.user_sgprs
    for index, wanted in zip(group, code.group_ids, strict=True):
        if wanted:
            wave.set_scalar(register, index, 1)
            register += 1
    wave.v[0] = np.arange(code.wave_size, dtype=np.uint32) + number * code.wave_size  # x; y and z are 0
    return wave
