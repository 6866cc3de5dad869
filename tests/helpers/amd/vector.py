"""Vector instructions: an operation of ``arithmetic``, with the operands and modifiers of its encoding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .arithmetic import ARITHMETIC, PACKED, Operation
from .decode import Instruction
from .lanes import dpp_source, selected
from .operands import FIRST_VGPR, Reader, Unsupported, Writer, implicit_mask, reader, with_sign, writer
from .wave import VCC, Wave

Run = Callable[[Wave], None]


def vector(instruction: Instruction) -> Run:
    """What a VALU instruction does to a wave."""
    if instruction.get("omod") or instruction.get("clmp"):
        raise Unsupported(f"modifiers of {instruction.label}: {instruction.fields}")
    if instruction.name in PACKED:
        return _packed(instruction)
    if instruction.get("opsel") or (instruction.cdna and instruction.name.startswith("V_CMPX")):
        raise Unsupported(f"{instruction.label}: {instruction.fields}")
    if instruction.encoding == "VOPD":
        return _dual(instruction)
    operation = ARITHMETIC[instruction.name]
    sources = _sources(instruction, operation)
    writers = _writers(instruction, operation)
    if "DPP16" in instruction.form:
        return _with_dpp(instruction, operation, sources, writers)
    return _plain(operation, sources, writers)


def _plain(operation: Operation, sources: list[Reader], writers: list[Writer]) -> Run:
    function = operation.function
    if len(writers) == 1:
        write = writers[0]
        if len(sources) == 2:
            one, two = sources
            return lambda wave: write(wave, function(one(wave), two(wave)), None)
        return lambda wave: write(wave, function(*[read(wave) for read in sources]), None)

    def run(wave: Wave) -> None:
        for write, result in zip(writers, function(*[read(wave) for read in sources]), strict=True):
            write(wave, result, None)

    return run


def _codes(instruction: Instruction, operation: Operation) -> list[int | None]:
    """The operands' codes in the unified space, None for VCC where the encoding leaves it out."""
    count = len(operation.sources)
    if instruction.encoding in ("VOP3", "VOP3SD"):
        codes: list[int | None] = [instruction[f"src{n}"] for n in range(3)]
        if instruction.name.startswith("V_FMAC"):
            codes[2] = instruction["vdst"] + FIRST_VGPR
        return [*codes, None][:count]
    codes = [instruction["src0"]]
    if "vsrc1" in instruction.fields:
        codes.append(instruction["vsrc1"] + FIRST_VGPR)
    if "SDWA" in instruction.form:
        codes[0] = instruction["vsrc0"] + (0 if instruction["s0"] else FIRST_VGPR)
        if instruction["s1"] and len(codes) > 1:
            codes[1] = instruction["vsrc1"]
    if "DPP16" in instruction.form:
        codes[0] = instruction["vsrc0"] + FIRST_VGPR
    if count == 3:  # the third of VOP2 is not written down
        codes.append(None if operation.sources[2] == "mask" else instruction["vdst"] + FIRST_VGPR)
    return codes


def _sources(instruction: Instruction, operation: Operation) -> list[Reader]:
    readers = []
    codes = _codes(instruction, operation)
    for n, (code, kind) in enumerate(zip(codes, operation.sources, strict=True)):
        if code is None:
            readers.append(implicit_mask)
            continue
        if "SDWA" in instruction.form and n < 2:
            read = selected(instruction, reader(instruction, code, "u32"), n, kind)
        else:
            read = reader(instruction, code, kind)
        negate = instruction.get("neg") >> n & 1 or instruction.get(f"src{n}_neg")
        absolute = instruction.get("abs") >> n & 1 or instruction.get(f"src{n}_abs")
        readers.append(with_sign(read, negate, absolute, kind))
    return readers


def _writers(instruction: Instruction, operation: Operation) -> list[Writer]:
    writers = []
    for kind in operation.results:
        if kind != "mask":
            register = instruction.get("vdst")
        elif "sdst" in instruction.fields:
            # A comparison with SDWA says whether it has a register of its own.
            register = instruction["sdst"] if instruction.fields.get("sd", 1) else VCC
        elif instruction.encoding == "VOP3":
            register = instruction["vdst"]
        else:
            register = VCC
        writers.append(writer(instruction, kind, register))
    if instruction.fields.get("dst_sel", 6) != 6:
        raise Unsupported(f"{instruction.label} that writes part of a register")
    return writers


def _with_dpp(instruction: Instruction, operation: Operation, sources: list[Reader], writers: list[Writer]) -> Run:
    moved = dpp_source(instruction)
    (write,) = writers
    if operation.results == ("mask",):
        raise Unsupported(f"{instruction.label}")

    def run(wave: Wave) -> None:
        first, lanes = moved(wave, sources[0](wave))
        write(wave, operation.function(first, *[read(wave) for read in sources[1:]]), lanes)

    return run


def _packed(instruction: Instruction) -> Run:
    """Each half of the result has a half of each operand, as the instruction says."""
    function = PACKED[instruction.name]
    write = writer(instruction, "u64", instruction["vdst"])
    halves: list[list[Reader]] = []
    for select, negate in (("opsel", "neg"), ("opsel_hi", "neg_hi")):
        chosen = []
        for n in range(2):
            code, upper = instruction[f"src{n}"], instruction[select] >> n & 1
            if 128 <= code < FIRST_VGPR:
                raise Unsupported(f"a constant in {instruction.label}")
            chosen.append(with_sign(reader(instruction, code + upper, "f32"), instruction[negate] >> n & 1, 0, "f32"))
        halves.append(chosen)
    (low_a, low_b), (high_a, high_b) = halves

    def run(wave: Wave) -> None:
        pair = np.empty((wave.lanes, 2), np.float32)
        pair[:, 0] = function(low_a(wave), low_b(wave))
        pair[:, 1] = function(high_a(wave), high_b(wave))
        write(wave, pair.reshape(-1), None)

    return run


def _dual(instruction: Instruction) -> Run:
    """Two operations at once: both read before either writes."""
    parts: list[tuple[Operation, list[Reader], Writer]] = []
    for name, side in zip(instruction.name.split(), "xy", strict=True):
        operation = ARITHMETIC[name.replace("V_DUAL_", "V_")]
        codes = [instruction[f"src{side}0"], instruction[f"vsrc{side}1"] + FIRST_VGPR][: len(operation.sources)]
        readers = [reader(instruction, code, kind) for code, kind in zip(codes, operation.sources, strict=False)]
        register = instruction[f"vdst{side}"]
        if operation.sources[-1] == "mask":
            readers.append(implicit_mask)
        elif len(operation.sources) == 3:
            readers.append(reader(instruction, register + FIRST_VGPR, operation.sources[2]))
        parts.append((operation, readers, writer(instruction, operation.results[0], register)))

    def run(wave: Wave) -> None:
        # A move's result is the register itself, which the other one may write.
        results = [np.copy(operation.function(*[read(wave) for read in readers])) for operation, readers, _ in parts]
        for (_, _, write), result in zip(parts, results, strict=True):
            write(wave, result, None)

    return run
