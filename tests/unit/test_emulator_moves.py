"""Instructions that move something, by themselves: between lanes, to and from memory, or the wave to another place.

The emulator of tests/helpers/amd; instructions that compute are in test_emulator_instructions.py.
"""

import importlib.util
import sys

import numpy as np
import pytest
import torch

from tests.helpers.amd.launch import executable
from tests.helpers.amd.memory import Fault, Memory
from tests.helpers.amd.operands import FIRST_VGPR
from tests.helpers.amd.samples import in_group, samples, wave_for
from tests.helpers.amd.wave import EXEC, VCC

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="tinygrad needs Python 3.11"),
    pytest.mark.skipif(importlib.util.find_spec("tinygrad") is None, reason="tinygrad is not installed"),
]

WORDS = {"DWORD": 1, "DWORDX2": 2, "DWORDX4": 4, "DWORDX8": 8, "DWORDX16": 16}
WORDS.update({"B32": 1, "B64": 2, "B128": 4, "B256": 8, "B512": 16})


def words_of(label):
    """Registers that an instruction moves, by the end of its name; half a one for two bytes."""
    return WORDS.get(label.rpartition("_")[2], 0.5)


def state(wave):
    return list(wave.s), wave.v.copy(), wave.scc, wave.lds.copy()


def unchanged(wave, before):
    return all(np.array_equal(one, other) for one, other in zip(state(wave), before, strict=True))


# -- lanes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", in_group("lanes"))
@pytest.mark.parametrize("seed", range(4))
def test_between_lanes(label, seed):
    for instruction in samples(label):
        wave = wave_for(instruction, seed)
        if seed == 2:
            wave.set_mask(EXEC, 0)
        scalars, before, *_ = state(wave)
        vectors = before.copy()
        source, target = before[instruction["src0"] - FIRST_VGPR], instruction["vdst"]
        active = np.flatnonzero(wave.active).tolist()
        executable(instruction, 0)(wave)
        if "READFIRSTLANE" in label:
            scalars[target] = int(source[active[0] if active else 0])
        elif "READLANE" in label:
            scalars[target] = int(source[instruction["src1"] - 128])
        elif "PERMLANEX16" in label:
            assert (instruction["src1"], instruction["src2"]) == (193, 193)  # -1: lane 15 of the other row
            for lane in active:
                vectors[target, lane] = source[31 if lane < 16 else 15]
        else:
            for lane in active:
                vectors[target, lane] = permuted(instruction, wave, before, lane)
        assert wave.s == scalars
        assert np.array_equal(wave.v, vectors)


def permuted(instruction, wave, before, lane):
    """V_PERM_B32 by hand."""
    high, low, selectors = (operand(instruction, wave, before, lane, n) for n in range(3))
    data = low.to_bytes(4, "little") + high.to_bytes(4, "little")
    result = []
    for selector in selectors.to_bytes(4, "little"):
        if selector < 8:
            result.append(data[selector])
        elif selector < 12:
            result.append(0xFF if data[(selector - 8) * 2 + 1] & 0x80 else 0)
        else:
            result.append(0 if selector == 12 else 0xFF)
    return int.from_bytes(bytes(result), "little")


def operand(instruction, wave, before, lane, n):
    code = instruction[f"src{n}"]
    if code == 255:
        return instruction["literal"]
    return int(before[code - FIRST_VGPR, lane]) if code >= FIRST_VGPR else wave.s[code]


# -- memory -----------------------------------------------------------------------------------------------

SIZE = 4096


@pytest.fixture
def region():
    """Bytes, and the memory that they are."""
    tensor = torch.from_numpy(np.random.default_rng(5).integers(0, 256, SIZE, np.uint8))
    tensor = tensor.clone()  # where torch puts it: at a multiple of 64
    return tensor, Memory([tensor])


def signed(number, bits):
    return number - (1 << bits) if number >> bits - 1 else number


@pytest.mark.parametrize("label", in_group("global"))
@pytest.mark.parametrize("seed", range(2))
def test_global_memory(region, label, seed):
    tensor, memory = region
    for instruction in samples(label):
        wave = wave_for(instruction, seed, memory)
        words, offset = words_of(label), signed(instruction["offset"], 13)
        size, count = int(4 * words), max(int(words), 1)
        # Each lane's own place, in an order of its own, away from the ends by what the offset may be.
        places = 1024 + 32 * np.random.default_rng(seed).permutation(wave.lanes)
        addresses = (tensor.data_ptr() + places - offset).astype(np.uint64)
        if instruction["saddr"] != (0x7F if instruction.cdna else 124):
            wave.set_scalar(instruction["saddr"], tensor.data_ptr(), 2)
            wave.v[instruction["addr"]] = places - offset
        else:
            wave.v[instruction["addr"]] = addresses.astype(np.uint32)
            wave.v[instruction["addr"] + 1] = (addresses >> np.uint64(32)).astype(np.uint32)
        content, (scalars, vectors, *_) = tensor.numpy().copy(), state(wave)
        executable(instruction, 0)(wave)
        for lane in np.flatnonzero(wave.active).tolist():
            at = slice(int(places[lane]), int(places[lane]) + size)
            if "LOAD" in label:
                found = content[at].tobytes().ljust(4, b"\0")
                vectors[instruction["vdst"] :][:count, lane] = np.frombuffer(found, "<u4")
            else:
                data = vectors[instruction["data"] :][:count, lane].tobytes()
                content[at] = np.frombuffer(data[2:4] if "D16_HI" in label else data[:size], np.uint8)
        assert np.array_equal(tensor.numpy(), content)
        assert np.array_equal(wave.v, vectors)
        assert wave.s == scalars


@pytest.mark.parametrize("label", in_group("buffer"))
@pytest.mark.parametrize("seed", range(2))
def test_buffer(region, label, seed):
    """What lies outside of the buffer is 0."""
    tensor, memory = region
    for instruction in samples(label):
        wave = wave_for(instruction, seed, memory)
        base, records, words = tensor.data_ptr() + 64, 1000, words_of(label)
        descriptor = base | records << 64
        wave.set_scalar(instruction["srsrc"] * 4, descriptor, 4)
        offsets = np.array([8 * (n % 8) if n % 3 else (996, 1000, 0x80000000)[n // 3 % 3] for n in range(wave.lanes)])
        wave.v[instruction["vaddr"]] = offsets
        vectors = wave.v.copy()
        executable(instruction, 0)(wave)
        for lane in np.flatnonzero(wave.active).tolist():
            at = int(offsets[lane]) + instruction["offset"]
            inside = at + 4 * words <= records
            found = tensor.numpy()[64 + at :][: 4 * words].view(np.uint32) if inside else 0
            vectors[instruction["vdata"] :][:words, lane] = found
        assert np.array_equal(wave.v, vectors)


@pytest.mark.parametrize("label", in_group("scalar load"))
def test_scalar_load(region, label):
    tensor, memory = region
    for instruction in samples(label):
        wave = wave_for(instruction, 0, memory)
        offset, words = signed(instruction["offset"], 21), words_of(label)
        wave.set_scalar(instruction["sbase"] * 2, tensor.data_ptr() + 512 - offset, 2)
        scalars = list(wave.s)
        executable(instruction, 0)(wave)
        target = instruction["sdata"]
        scalars[target : target + words] = tensor.numpy()[512 : 512 + 4 * words].view(np.uint32).tolist()
        assert wave.s == scalars


@pytest.mark.parametrize("label", in_group("lds"))
@pytest.mark.parametrize("seed", range(2))
def test_lds(label, seed):
    for instruction in samples(label):
        wave = wave_for(instruction, seed, lds_size=1 << 17)
        two = "2" in label.split("_")[1] or "2ADDR" in label
        if two:
            unit = 256 if "ST64" in label or "STRIDE64" in label else 4
            offsets = [instruction["offset0"] * unit, instruction["offset1"] * unit]
        else:
            offsets = [instruction["offset0"] + 256 * instruction["offset1"]]
        words = words_of(label)
        size, count = int(4 * words), max(int(words), 1)
        places = 32768 + 16 * np.random.default_rng(seed).permutation(wave.lanes)
        wave.v[instruction["addr"]] = places
        _, vectors, _, content = state(wave)
        executable(instruction, 0)(wave)
        for lane in np.flatnonzero(wave.active).tolist():
            for n, offset in enumerate(offsets):
                at = slice(int(places[lane]) + offset, int(places[lane]) + offset + size)
                if "LOAD" in label or "READ" in label:
                    first = instruction["vdst"] + n * count
                    vectors[first : first + count, lane] = np.frombuffer(content[at].tobytes(), "<u4")
                else:
                    first = instruction[f"data{n}"]
                    content[at] = np.frombuffer(vectors[first : first + count, lane].tobytes()[:size], np.uint8)
        assert np.array_equal(wave.lds, content)
        assert np.array_equal(wave.v, vectors)


def test_what_lies_beside_a_tensor_cannot_be_reached(region):
    tensor, memory = region
    first, end = np.uint64(tensor.data_ptr()), np.uint64(tensor.data_ptr() + SIZE)
    memory.load(np.array([first, end - np.uint64(4)]), 4)
    for address in (first - np.uint64(4), end, end - np.uint64(2)):
        with pytest.raises(Fault):
            memory.load(np.array([first, address]), 4)
        with pytest.raises(Fault):
            memory.store(np.array([first, address]), 4, np.zeros(2, np.uint32))
    with pytest.raises(Fault, match="aligned"):
        memory.load(np.array([first + np.uint64(2)]), 4)


def test_the_lanes_of_one_access_reach_several_tensors(region):
    tensor, _ = region
    other = torch.arange(16, dtype=torch.int32)
    memory = Memory([tensor, other])
    addresses = np.array([tensor.data_ptr(), other.data_ptr() + 12, other.data_ptr() + 60], np.uint64)
    assert memory.load(addresses, 4).tolist() == [int(tensor.view(torch.int32)[0]) % 2**32, 3, 15]
    memory.store(addresses, 4, np.array([7, 8, 9], np.uint32))
    assert [int(tensor.view(torch.int32)[0]), int(other[3]), int(other[15])] == [7, 8, 9]


# -- the wave itself --------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", in_group("jump"))
def test_jump(label):
    register = {"E": EXEC, "V": VCC}.get(label.split("_")[-1][0])
    for instruction in samples(label):
        for mask in (0, 1 << 31, 5):
            wave = wave_for(instruction, 1)
            if register is not None:
                wave.set_mask(register, mask)
            before = state(wave)
            jumps = "S_BRANCH" in label or (mask != 0) == label.endswith("NZ")
            there = 4096 + 4 + 4 * signed(instruction["simm16"], 16)
            assert executable(instruction, 4096)(wave) == (there if jumps else None)
            assert unchanged(wave, before)


@pytest.mark.parametrize("label", in_group("wait"))
def test_what_changes_no_register(label):
    """Waits for what is done already; or the wave stops, at a barrier or for good."""
    reason = {"S_BARRIER": -1, "S_ENDPGM": -2}.get(label.split()[1])
    for instruction in samples(label):
        wave = wave_for(instruction, 0)
        before = state(wave)
        assert executable(instruction, 0)(wave) == reason
        assert unchanged(wave, before)
