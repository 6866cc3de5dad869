"""Instructions that read and write memory: scalar, global, through a buffer's descriptor, and the workgroup's own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .decode import Instruction
from .memory import Fault
from .operands import Unsupported, constant
from .wave import NULL_RDNA, Wave

Run = Callable[[Wave], None]


class Access(NamedTuple):
    """``places`` words of ``size`` bytes (2 or 4), one after the other, of as many registers."""

    is_load: bool
    size: int
    places: int = 1
    upper: bool = False
    """Of a register's two halves, the upper one is stored."""


_BITS = {"DWORD": 32, "DWORDX2": 64, "DWORDX4": 128, "DWORDX8": 256, "DWORDX16": 512, "USHORT": 16, "SHORT": 16}


def access_of(name: str) -> Access:
    """What a name such as GLOBAL_LOAD_DWORDX4 or DS_STORE_B64 says."""
    words = re.fullmatch(
        r"(?:S|GLOBAL|BUFFER|DS)_(LOAD|STORE|READ|WRITE)_(?:(D16_HI)_)?([A-Z]*\d*)(?:_(D16_HI))?", name
    )
    if words is None or not (words[3] in _BITS or re.fullmatch(r"[BU]\d+", words[3])):
        raise Unsupported(name)
    bits = _BITS.get(words[3]) or int(words[3][1:])
    upper = bool(words[2] or words[4])
    if bits < 16 or (bits == 16 and upper and words[1] in ("LOAD", "READ")):
        raise Unsupported(name)
    return Access(words[1] in ("LOAD", "READ"), min(bits // 8, 4), max(bits // 32, 1), upper)


def scalar_load(instruction: Instruction) -> Run:
    """S_LOAD: words at an address in scalar registers."""
    access = access_of(instruction.name)
    base, target = instruction["sbase"] * 2, instruction["sdata"]
    offset = instruction["offset"] - (1 << 21 if instruction["offset"] >> 20 else 0)
    if instruction.cdna:
        if not instruction["imm"] or instruction["soffset_en"]:
            raise Unsupported(f"{instruction.label} with an offset in a register")
    elif instruction["soffset"] != NULL_RDNA:
        raise Unsupported(f"{instruction.label} with an offset in a register")
    steps = np.arange(access.places, dtype=np.uint64) * np.uint64(4)

    def run(wave: Wave) -> None:
        address = np.uint64((wave.scalar(base, 2) + offset) % 2**64)
        for n, word in enumerate(wave.memory.load(address + steps, 4).tolist()):
            wave.set_scalar(target + n, word, 1)

    return run


def global_access(instruction: Instruction) -> Run:
    """GLOBAL_LOAD and GLOBAL_STORE: an address a lane, or one for all and an offset a lane."""
    access = access_of(instruction.name)
    if instruction.get("acc") or instruction.get("sve"):
        raise Unsupported(f"{instruction.label} with {instruction.fields}")
    register, base = instruction["addr"], instruction["saddr"]
    offset = instruction["offset"] - (1 << 13 if instruction["offset"] >> 12 else 0)
    has_base = base != (0x7F if instruction.cdna else NULL_RDNA)

    def addresses(wave: Wave) -> np.ndarray:
        if has_base:
            return wave.v[register][wave.active] + np.uint64((wave.scalar(base, 2) + offset) % 2**64)
        pairs = np.ascontiguousarray(wave.v[register : register + 2].T[wave.active]).view(np.uint64)
        return pairs[:, 0] + np.uint64(offset % 2**64)

    data = instruction["vdst"] if access.is_load else instruction["data"]
    return _transfer(access, data, addresses)


def _transfer(access: Access, register: int, addresses: Callable[[Wave], np.ndarray]) -> Run:
    """Between a register of each active lane and its address."""

    def run(wave: Wave) -> None:
        if not wave.active.any():
            return
        places = addresses(wave)
        # A store's words all lie inside or none does: whether an access is allowed is known before anything is written.
        if access.places > 1:
            wave.memory.load(places + np.uint64(4 * access.places - 4), 4)
        for n in range(access.places):
            at = places + np.uint64(4 * n)
            if access.is_load:
                wave.v[register + n][wave.active] = wave.memory.load(at, access.size)
            else:
                values = wave.v[register + n][wave.active] >> np.uint32(16 if access.upper else 0)
                wave.memory.store(at, access.size, values.astype(f"u{access.size}"))

    return run


def buffer_access(instruction: Instruction) -> Run:
    """BUFFER_LOAD: an offset a lane from a descriptor's base; 0 where it lies outside."""
    access = access_of(instruction.name)
    unknown = ("idxen", "lds", "tfe", "acc")
    if not access.is_load or not instruction["offen"] or any(instruction.get(field) for field in unknown):
        raise Unsupported(f"{instruction.label} with {instruction.fields}")
    data, register, descriptor = instruction["vdata"], instruction["vaddr"], instruction["srsrc"] * 4
    more = constant(instruction["soffset"], "u32", 0)
    if more is None:
        raise Unsupported(f"{instruction.label} with an offset in a scalar register")
    size = access.size * access.places

    def run(wave: Wave) -> None:
        base, records = wave.scalar(descriptor, 2), wave.s[descriptor + 2]
        if base >> 48 & 0x3FFF:
            raise Unsupported("a buffer with a stride")
        offsets = wave.v[register].astype(np.uint64) + np.uint64(instruction["offset"])
        inside = offsets + np.uint64(size + more) <= records
        reached = wave.active & inside
        for n in range(access.places):
            words = np.zeros(wave.lanes, np.uint32)
            if reached.any():
                start = np.uint64((base & (1 << 48) - 1) + more + 4 * n)
                words[reached] = wave.memory.load(offsets[reached] + start, access.size)
            np.copyto(wave.v[data + n], words, where=wave.active)

    return run


_PAIRS = {  # name: whether it loads, and what an offset counts
    "DS_READ2_B32": (True, 4),
    "DS_LOAD_2ADDR_B32": (True, 4),
    "DS_WRITE2_B32": (False, 4),
    "DS_STORE_2ADDR_B32": (False, 4),
    "DS_WRITE2ST64_B32": (False, 256),
    "DS_STORE_2ADDR_STRIDE64_B32": (False, 256),
}


def lds_access(instruction: Instruction) -> Run:
    """DS instructions: the memory that the waves of a workgroup share."""
    if instruction["gds"]:
        raise Unsupported("global data share")
    register, target = instruction["addr"], instruction["vdst"]
    if instruction.name in _PAIRS:
        is_load, unit = _PAIRS[instruction.name]
        size = 4
        offsets = [instruction["offset0"] * unit, instruction["offset1"] * unit]
        sources = [(instruction["data0"], 0), (instruction["data1"], 0)]
    else:
        access = access_of(instruction.name)
        is_load, size = access.is_load, access.size
        offset = instruction["offset0"] | instruction["offset1"] << 8
        offsets = [offset + 4 * n for n in range(access.places)]
        sources = [(instruction["data0"] + n, 16 * access.upper) for n in range(access.places)]

    def run(wave: Wave) -> None:
        words = wave.lds.view(f"u{size}")
        results = []
        for offset, (source, shift) in zip(offsets, sources, strict=True):
            places = wave.v[register][wave.active].astype(np.int64) + offset
            if (places % size).any():
                raise Fault(f"an access of {size} bytes to LDS that is not aligned")
            if len(places) and places.max() + size > len(wave.lds):
                raise Fault(f"LDS has {len(wave.lds)} bytes; an access ends at {places.max() + size}")
            if is_load:
                results.append(words[places // size])
            else:
                words[places // size] = (wave.v[source][wave.active] >> np.uint32(shift)).astype(words.dtype)
        for n, result in enumerate(results):  # after all reads: the result may be where the address was
            wave.v[target + n][wave.active] = result

    return run
