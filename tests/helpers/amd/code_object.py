"""A code object: the file that holds a compiled kernel, as far as a launch needs it."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

_METADATA_NOTE = 32  # NT_AMDGPU_METADATA
# Bits of the kernel descriptor that ask for registers before the first instruction, in the registers' order.
_USER_SGPRS = {
    0: ("private segment buffer", 4),
    1: ("dispatch packet", 2),
    2: ("queue", 2),
    3: ("arguments", 2),
    4: ("dispatch id", 2),
    5: ("flat scratch", 2),
    6: ("private segment size", 1),
}
_PRELOAD_PROLOGUE = 256  # bytes of code that load the arguments where the firmware does not


class Argument(NamedTuple):
    """Where a launch puts one argument."""

    offset: int
    size: int
    kind: str


@dataclass(frozen=True)
class CodeObject:
    """One kernel."""

    name: str
    target: str
    code: bytes
    """From the first instruction to the end of the function."""
    arguments: tuple[Argument, ...]
    arguments_size: int
    lds_size: int
    vgprs: int
    wave_size: int
    user_sgprs: int
    """Registers that hold the address of the arguments and preloaded arguments."""
    preloaded: tuple[int, int]
    """First word of the arguments that is preloaded, and how many are."""
    group_ids: tuple[bool, bool, bool]
    """Which indices of the workgroup come in registers."""

    @property
    def entry(self) -> int:
        """Where a wave begins: with preloaded arguments, behind the code that would load them."""
        return _PRELOAD_PROLOGUE if self.preloaded[1] else 0


def parse(binary: bytes, name: str) -> CodeObject:
    """The kernel called ``name`` in a code object."""
    sections = _sections(binary)
    symbols = _symbols(binary, sections)
    address, size = symbols[name]
    text = sections[".text"]
    begin = address - text["address"] + text["offset"]
    at = symbols[f"{name}.kd"][0] - sections[".rodata"]["address"] + sections[".rodata"]["offset"]
    lds_size, scratch, arguments_size = struct.unpack_from("<III", binary, at)
    rsrc1, rsrc2 = struct.unpack_from("<II", binary, at + 48)
    properties, preload = struct.unpack_from("<HH", binary, at + 56)
    if scratch:
        raise ValueError(f"{name} keeps {scratch} bytes a lane in memory; the emulator has no such memory")
    wanted = [user for bit, user in _USER_SGPRS.items() if properties >> bit & 1]
    if wanted != [("arguments", 2)]:
        raise ValueError(f"{name} asks for {wanted}; the emulator gives the address of the arguments alone")
    if rsrc1 >> 12 & 0xFF != 0xF0:
        raise ValueError(f"{name} does not round to nearest, or flushes denormals: float mode {rsrc1 >> 12 & 0xFF:#x}")
    if rsrc2 >> 10 & 1:
        raise ValueError(f"{name} asks for the workgroup's info, which the emulator does not give")
    metadata = _metadata(binary, sections)
    kernel = next(kernel for kernel in metadata["amdhsa.kernels"] if kernel[".name"] == name)
    return CodeObject(
        name=name,
        target=metadata["amdhsa.target"].rpartition("-")[2],
        code=binary[begin : begin + size],
        arguments=tuple(Argument(a[".offset"], a[".size"], a[".value_kind"]) for a in kernel[".args"]),
        arguments_size=arguments_size,
        lds_size=lds_size,
        vgprs=kernel[".vgpr_count"] + kernel.get(".agpr_count", 0),
        wave_size=kernel[".wavefront_size"],
        user_sgprs=rsrc2 >> 1 & 0x1F,
        preloaded=(preload >> 7, preload & 0x7F),
        group_ids=(bool(rsrc2 >> 7 & 1), bool(rsrc2 >> 8 & 1), bool(rsrc2 >> 9 & 1)),
    )


def _sections(binary: bytes) -> dict[str, dict[str, int]]:
    if binary[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    table = struct.unpack_from("<Q", binary, 40)[0]
    entry_size, count, names_index = struct.unpack_from("<HHH", binary, 58)
    headers = []
    for n in range(count):
        fields = struct.unpack_from("<IIQQQQIIQQ", binary, table + n * entry_size)
        headers.append(dict(zip(("name", "type", "flags", "address", "offset", "size", "link"), fields, strict=False)))
    names = headers[names_index]["offset"]
    return {_string(binary, names + header["name"]): header for header in headers}


def _symbols(binary: bytes, sections: dict[str, dict[str, int]]) -> dict[str, tuple[int, int]]:
    """Address and size of each."""
    table, strings = sections[".dynsym"], sections[".dynstr"]
    found = {}
    for at in range(table["offset"], table["offset"] + table["size"], 24):
        name, _, _, _, value, size = struct.unpack_from("<IBBHQQ", binary, at)
        found[_string(binary, strings["offset"] + name)] = value, size
    return found


def _metadata(binary: bytes, sections: dict[str, dict[str, int]]) -> dict[str, Any]:
    import msgpack

    section = sections[".note"]
    at, end = section["offset"], section["offset"] + section["size"]
    while at < end:
        name_size, size, kind = struct.unpack_from("<III", binary, at)
        content = at + 12 + -(-name_size // 4) * 4
        if kind == _METADATA_NOTE:
            found: dict[str, Any] = msgpack.unpackb(binary[content : content + size])
            return found
        at = content + -(-size // 4) * 4
    raise ValueError("the code object has no metadata")


def _string(binary: bytes, at: int) -> str:
    return binary[at : binary.index(b"\0", at)].decode()
