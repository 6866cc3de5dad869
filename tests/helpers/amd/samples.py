"""An encoding or more of each instruction that the compiled kernels use, and waves to run them on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from .decode import Instruction, decode
from .memory import Memory
from .operands import FIRST_VGPR
from .scalar import WAITS
from .wave import EXEC, Wave

SAMPLES: dict[str, list[bytes]] = {
    label: [bytes.fromhex(code) for code in codes.split()]
    for label, _, codes in (
        line.partition(": ") for line in Path(__file__).with_name("samples.txt").read_text().splitlines()
    )
}
"""By :attr:`.decode.Instruction.labels`."""

# What a test of an instruction has to look at, by the beginning of the name; the first that fits.
_GROUPS = {
    **dict.fromkeys(WAITS, "wait"),
    **dict.fromkeys(("S_SENDMSG", "S_BARRIER", "S_ENDPGM"), "wait"),
    **dict.fromkeys(("S_BRANCH", "S_CBRANCH"), "jump"),
    "V_DIV_": "division",
    **dict.fromkeys(("V_RCP_", "V_SQRT_"), "rough"),
    **dict.fromkeys(("V_READ", "V_PERM"), "lanes"),
    **dict.fromkeys(("GLOBAL_LOAD", "GLOBAL_STORE"), "global"),
    "BUFFER_LOAD": "buffer",
    "DS_": "lds",
    "S_LOAD": "scalar load",
    "S_": "scalar",
    "V_": "vector",
}
GROUPS = frozenset(_GROUPS.values())


def group_of(label: str) -> str:
    name = label.split()[1]
    return next(group for beginning, group in _GROUPS.items() if name.startswith(beginning))


def in_group(group: str) -> list[str]:
    """The labels whose tests look at one thing."""
    return [label for label in SAMPLES if group_of(label) == group]


def samples(label: str) -> list[Instruction]:
    return [decode(code, label.split()[0]) for code in SAMPLES[label]]


def with_registers(instruction: Instruction) -> Instruction:
    """The same with registers where it has small integers: a constant shows little of what an operation does."""
    fields = dict(instruction.fields)
    for name in ("src0", "src1", "src2", "ssrc0", "ssrc1"):
        if 128 <= fields.get(name, 0) <= 208:
            fields[name] = int(name[-1]) * 4 + (8 if name.startswith("ss") else FIRST_VGPR + 8)
    return replace(instruction, fields=fields)


# Numbers at which something happens: zeros, denormals, one, the largest, infinities, NaN of both kinds; bit patterns.
CORNERS = np.array(
    [
        *(0x00000000, 0x80000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0xBF800000, 0x7F7FFFFF, 0x7F800000),
        *(0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF, 0x00003C00, 0x00008001, 0x40000000, 0x3FF00000),
    ],
    np.uint32,
)


def wave_for(instruction: Instruction, seed: int, memory: Memory | None = None, lds_size: int = 0) -> Wave:
    """A wave whose registers hold anything; with some seeds, all scalars 0. At even seeds some lanes are not active."""
    rng = np.random.default_rng(seed)
    lds = rng.integers(0, 256, lds_size, np.uint8)
    wave = Wave(64 if instruction.cdna else 32, 256, memory or Memory([]), lds)
    shape = wave.v.shape
    kinds = [
        rng.integers(0, 1 << 32, shape, np.uint64).astype(np.uint32),
        rng.standard_normal(shape).astype(np.float32).view(np.uint32),
        rng.integers(0, 64, shape).astype(np.uint32),
        CORNERS[rng.integers(0, len(CORNERS), shape)],
    ]
    wave.v[:] = np.choose(rng.integers(0, len(kinds), shape), kinds)
    for register in range(EXEC):
        wave.set_scalar(register, int(wave.v[register, 0]) if seed % 5 != 4 else 0, 1)
    wave.scc = int(rng.integers(2))
    if seed % 2 == 0:
        wave.set_mask(EXEC, int(rng.integers(1, 1 << wave.lanes, dtype=np.uint64)))
    return wave
