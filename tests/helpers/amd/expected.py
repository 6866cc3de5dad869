"""What an instruction should do to a wave, lane by lane, by AMD's pseudocode and table of operands.

Written apart from the emulator: no code of it finds operands, applies modifiers or computes here.
"""

from __future__ import annotations

import functools
import importlib
import re
from typing import Any, NamedTuple

import numpy as np

from . import pseudocode
from .decode import Instruction
from .pseudocode import Number
from .wave import EXEC, VCC, Wave


class After(NamedTuple):
    """The registers of a wave."""

    s: list[int]
    v: np.ndarray
    scc: int


@functools.cache
def _formats(architecture: str, encoding: str, name: str) -> dict[str, tuple[str, int]]:
    """For each operand, such as src0, its type and width by AMD's table."""
    table = importlib.import_module(f"tinygrad.runtime.autogen.amd.{architecture}.operands").OPERANDS
    if encoding == "VOPD":  # AMD's table has no halves of these, but the same operations by themselves
        encoding = "VOP1" if name == "V_MOV_B32" else "VOP2"
    for operation, operands in table.items():
        if type(operation).__name__ == f"{encoding}Op" and re.sub(r"_E(32|64)$", "", operation.name) == name:
            return {field: (kind.name.removeprefix("FMT_NUM_"), bits) for field, (kind, bits, _) in operands.items()}
    raise pseudocode.NotThere(f"operands of {architecture} {name} as {encoding}")


def _source(instruction: Instruction, wave: Wave, lane: int, code: int, kind: str, bits: int) -> int:
    """The bits of an operand, by its code in AMD's table of them."""
    words = max(bits // 32, 1)
    if code >= 256:
        value = sum(int(wave.v[code - 256 + n, lane]) << 32 * n for n in range(words))
    elif code == 124 and not instruction.cdna:
        value = 0
    elif code < 128:
        value = sum(wave.s[code + n] << 32 * n for n in range(words))
    elif code <= 208:
        value = code - 128 if code <= 192 else 192 - code
    elif code == 255:
        value = instruction["literal"] << (32 if kind == "F64" else 0)
    else:
        number = {240: 0.5, 241: -0.5, 242: 1.0, 243: -1.0, 244: 2.0, 245: -2.0, 246: 4.0, 247: -4.0}[code]
        value = Number.of(f"f{bits}", number).bits
    return value & (1 << bits) - 1


def vector_expected(instruction: Instruction, wave: Wave) -> After:
    """After a VALU instruction."""
    after = After(list(wave.s), wave.v.copy(), wave.scc)
    dual = len(instruction.name.split()) == 2
    for name, side in zip(instruction.name.split(), "xy" if dual else " ", strict=True):
        name = name.replace("V_DUAL_", "V_")
        masks: dict[int, int] = {}
        for lane in np.flatnonzero(wave.active).tolist():
            _one_lane(instruction, name, side.strip(), wave, after, lane, masks)
        for register, bits in masks.items():
            for n in range(wave.lanes // 32):
                after.s[register + n] = bits >> 32 * n & 0xFFFFFFFF
    return after


def _one_lane(
    instruction: Instruction, name: str, side: str, wave: Wave, after: After, lane: int, masks: dict[int, int]
) -> None:
    formats = _formats(instruction.architecture, instruction.encoding, name)
    sources, enabled = [], True
    for n, field in enumerate(("src0", "src1", "src2")):
        key = field if field in formats else f"v{field}"
        if key not in formats:
            break
        kind, bits = formats[key]
        if side:
            code = instruction[f"src{side}0"] if n == 0 else instruction[f"vsrc{side}1"] + 256
        else:
            code = instruction[key] + (256 if key[0] == "v" else 0)
        from_lane = lane
        if n == 0 and "DPP16" in instruction.form:
            code = instruction["vsrc0"] + 256
            found = dpp_lane(instruction["dpp"], lane)
            if found is None or not wave.active[found]:
                enabled = bool(instruction["bc"])
                sources.append(Number("b64", 0))
                continue
            from_lane = found
        if n == 0 and "SDWA" in instruction.form:
            code = instruction["vsrc0"] + (0 if instruction["s0"] else 256)
        if "SDWA" in instruction.form:
            value = _source(instruction, wave, from_lane, code, kind, 32)
            selector = instruction[f"src{n}_sel"]
            value = value if selector == 6 else value >> (8 * selector, 16 * (selector - 4))[selector > 3]
            value &= {6: 0xFFFFFFFF, 4: 0xFFFF, 5: 0xFFFF}.get(selector, 0xFF)
        else:
            value = _source(instruction, wave, from_lane, code, kind, bits)
        sources.append(Number("b64", _signed(instruction, value, n, kind, bits)))
    if "DPP16" in instruction.form:
        enabled &= bool(instruction["row_mask"] >> lane // 16 & 1 and instruction["bank_mask"] >> lane // 4 % 4 & 1)
    _run_lane(instruction, name, side, wave, after, lane, masks, sources, formats, enabled)


def _signed(instruction: Instruction, value: int, n: int, kind: str, bits: int) -> int:
    """With the operand's modifiers."""
    if kind == "PK2_F32":
        low, high = instruction["opsel"] >> n & 1, instruction["opsel_hi"] >> n & 1
        halves = value & 0xFFFFFFFF, value >> 32
        signs = instruction["neg"] >> n & 1, instruction["neg_hi"] >> n & 1
        return halves[low] ^ signs[0] << 31 | (halves[high] ^ signs[1] << 31) << 32
    if instruction.get("abs") >> n & 1 or instruction.get(f"src{n}_abs"):
        value &= ~(1 << bits - 1)
    if instruction.get("neg") >> n & 1 or instruction.get(f"src{n}_neg"):
        value ^= 1 << bits - 1
    return value


def _run_lane(
    instruction: Instruction,
    name: str,
    side: str,
    wave: Wave,
    after: After,
    lane: int,
    masks: dict[int, int],
    sources: list[Number],
    formats: dict[str, tuple[str, int]],
    enabled: bool,
) -> None:
    register = instruction.get(f"vdst{side}")
    target_bits = formats.get("vdst", ("", 32))[1]
    words = 0 if "CMP" in name else max(target_bits // 32, 1)
    before = sum(int(wave.v[register + n, lane]) << 32 * n for n in range(words))
    # What the pseudocode calls VCC is the mask that an encoding names, if it names one.
    mask_in, mask_out = VCC, instruction.get("sdst") if "sdst" in instruction.fields else VCC
    if instruction.encoding in ("VOP3", "VOP3SD") and ("CNDMASK" in name or "_CI_" in name or "ADDC" in name):
        mask_in = instruction["src2"]
    if instruction.get("sd") == 0 and "sd" in instruction.fields:
        mask_out = VCC
    variables: dict[str, Any] = {f"S{n}": number for n, number in enumerate(sources)}
    variables["VCC"] = Number("b64", wave.mask(mask_in))
    variables["EXEC"] = Number("b64", wave.mask(EXEC))
    variables["D0"], variables["laneId"] = Number("b64", before), lane
    done = pseudocode.run(instruction.architecture, name, variables)
    if name.startswith("V_CMPX"):
        masks[EXEC] = masks.get(EXEC, 0) | (done["EXEC"].bits >> lane & 1) << lane
        return
    if name.startswith("V_CMP"):
        target = instruction["vdst"] if instruction.encoding == "VOP3" else mask_out
        masks[target] = masks.get(target, 0) | (done["D0"].bits >> lane & 1) << lane
        return
    if "_CO_" in name:
        bit = (done["VCC"].bits >> lane & 1) << lane
        if instruction.cdna or mask_out != 124:
            masks[mask_out] = masks.get(mask_out, 0) | bit
    if not enabled:
        return
    bits = done["D0"].bits
    if target_bits == 16 and not instruction.cdna:
        bits |= before & 0xFFFF0000
    for n in range(words):
        after.v[register + n, lane] = bits >> 32 * n & 0xFFFFFFFF


def dpp_lane(control: int, lane: int) -> int | None:
    """The lane that a lane reads, by the manual's table of DPP controls."""
    row, place = divmod(lane, 16)
    if control <= 0xFF:  # quad_perm
        return lane // 4 * 4 + (control >> 2 * (lane % 4)) % 4
    if 0x111 <= control <= 0x11F:  # row_shr
        return lane - (control - 0x110) if place >= control - 0x110 else None
    if control == 0x142:  # row_bcast:15
        return row * 16 - 1 if row else None
    if control == 0x143:  # row_bcast:31
        return 31 if lane > 31 else None
    raise pseudocode.NotThere(f"DPP control {control:#x}")


def scalar_expected(instruction: Instruction, wave: Wave) -> After:
    """After a SALU instruction that does not jump."""
    after = After(list(wave.s), wave.v.copy(), wave.scc)
    formats = _formats(instruction.architecture, instruction.encoding, instruction.name)
    target_bits = formats.get("sdst", ("", 32))[1]
    target = instruction.get("sdst")
    variables: dict[str, Any] = {
        "SCC": Number("u1", wave.scc),
        "EXEC": Number("b64", wave.mask(EXEC)),
        "D0": Number("b64", wave.scalar(target, target_bits // 32)),
    }
    for n in range(2):
        if f"ssrc{n}" in instruction.fields:
            kind, bits = formats[f"ssrc{n}"]
            variables[f"S{n}"] = Number("b64", _source(instruction, wave, 0, instruction[f"ssrc{n}"], kind, bits))
    if "simm16" in instruction.fields:
        variables["S0"] = variables["SIMM16"] = Number("b16", instruction["simm16"])
    done = pseudocode.run(instruction.architecture, instruction.name, variables)
    results = [(EXEC, wave.lanes, done["EXEC"].bits)] if "SAVEEXEC" in instruction.name else []
    if "sdst" in formats:
        results.append((target, target_bits, done["D0"].bits))
    for register, bits, value in results:
        for n in range(bits // 32):
            after.s[register + n] = value >> 32 * n & 0xFFFFFFFF
    return after._replace(scc=int(bool(done["SCC"])))
