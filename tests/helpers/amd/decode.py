"""Machine code as instructions. tinygrad knows the encodings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

ARCHITECTURES = {"gfx942": "cdna", "gfx1100": "rdna3"}
_LONGEST = 16  # bytes


@dataclass(frozen=True)
class Instruction:
    """One instruction, its fields as plain numbers."""

    architecture: str
    name: str
    """AMD's, without the encoding; of two in one, both, with a space between them."""
    form: str
    """tinygrad's name of the encoding, such as VOP2_LIT."""
    fields: dict[str, int]
    code: bytes

    def __getitem__(self, field: str) -> int:
        return self.fields[field]

    def get(self, field: str) -> int:
        """0 where the encoding has no such field."""
        return self.fields.get(field, 0)

    @property
    def encoding(self) -> str:
        """Such as VOP2, without what comes behind."""
        return self.form.partition("_")[0]

    @property
    def cdna(self) -> bool:
        return self.architecture == "cdna"

    @property
    def labels(self) -> list[str]:
        """What its tests are known by: its name, or both of two in one, and how it finds its operands."""
        special = re.search(r"DPP16|SDWA", self.form)
        return [f"{self.architecture} {name}" + (f" {special[0]}" if special else "") for name in self.name.split()]

    @property
    def label(self) -> str:
        """For messages."""
        return ", ".join(self.labels)


def decode(code: bytes, architecture: str) -> Instruction:
    """The instruction at the beginning of ``code``."""
    found = _decoded(code[:_LONGEST].ljust(_LONGEST, b"\0"), architecture)
    fields = {name: found._raw >> field.lo & field.mask for name, field in found._fields}
    form = type(found).__name__
    if form.startswith("VOPD"):
        names = [found.opx.name, found.opy.name]
        fields["vdsty"] = fields["vdsty"] << 1 | (fields["vdstx"] & 1 ^ 1)  # one of both is even, the other odd
    else:
        names = [found.op.name]
    name = " ".join(re.sub(r"_E(32|64)$", "", name) for name in names)
    return Instruction(architecture, name, form, fields, code[: found.size()])


def _decoded(code: bytes, architecture: str) -> Any:
    # Here, so that tests can be collected where tinygrad is not.
    from tinygrad.renderer.amd import decode_inst
    from tinygrad.runtime.autogen.amd.rdna3.ins import MUBUF

    try:
        return decode_inst(code, architecture)
    except ValueError:
        # tinygrad has this encoding and leaves it out of what it looks for.
        if architecture == "rdna3" and code[3] >> 2 == 0b111000:
            return MUBUF.from_bytes(code)
        raise


def instructions(code: bytes, architecture: str) -> Iterator[tuple[int, Instruction]]:
    """All of a kernel's, with their places."""
    place = 0
    while place < len(code):
        found = decode(code[place : place + _LONGEST], architecture)
        yield place, found
        place += len(found.code)
