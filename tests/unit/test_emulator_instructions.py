"""Each instruction that the compiled kernels use, by itself: the emulator of tests/helpers/amd against AMD's manual.

The manual's pseudocode is run lane by lane. Where it says nothing, or is wrong, the expectation is written here.
"""

import importlib.util
import sys

import numpy as np
import pytest

from tests.helpers.amd import expected
from tests.helpers.amd.decode import decode
from tests.helpers.amd.launch import executable
from tests.helpers.amd.samples import SAMPLES
from tests.helpers.amd.scalar import WAITS
from tests.helpers.amd.wave import EXEC, Wave

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="tinygrad needs Python 3.11"),
    pytest.mark.skipif(importlib.util.find_spec("tinygrad") is None, reason="tinygrad is not installed"),
]

BY_HAND = ("V_DIV_", "V_RCP_", "V_SQRT_", "V_PERM_", "V_PERMLANE", "V_READ", "DS_", "GLOBAL_", "BUFFER_", "S_LOAD_")
CONTROL = ("S_BRANCH", "S_CBRANCH", "S_BARRIER", "S_ENDPGM", "S_SENDMSG", *WAITS)


def by_manual(kind):
    return [
        label
        for label in SAMPLES
        if label.split()[1].startswith(kind) and not label.split()[1].startswith((*BY_HAND, *CONTROL))
    ]


def samples(label):
    architecture = label.split()[0]
    return [decode(code, architecture) for code in SAMPLES[label]]


# Numbers at which something happens: zeros, denormals, one, the largest, infinities, NaN of both kinds; bit patterns.
CORNERS = np.array(
    [
        *(0x00000000, 0x80000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0xBF800000, 0x7F7FFFFF, 0x7F800000),
        *(0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF, 0x00003C00, 0x00008001, 0x40000000, 0x3FF00000),
    ],
    np.uint32,
)


def wave_for(instruction, seed, memory=None, lds_size=0):
    """A wave whose registers hold anything. Of its lanes some are not active, if the seed is even."""
    rng = np.random.default_rng(seed)
    wave = Wave(64 if instruction.cdna else 32, 256, memory, np.zeros(lds_size, np.uint8))
    shape = wave.v.shape
    kinds = [
        rng.integers(0, 1 << 32, shape, np.uint64).astype(np.uint32),
        rng.standard_normal(shape).astype(np.float32).view(np.uint32),
        rng.integers(0, 64, shape).astype(np.uint32),
        CORNERS[rng.integers(0, len(CORNERS), shape)],
    ]
    wave.v[:] = np.choose(rng.integers(0, len(kinds), shape), kinds)
    for register in range(EXEC):
        wave.set_scalar(register, int(wave.v[register, 0]), 1)
    wave.scc = int(rng.integers(2))
    if seed % 2 == 0:
        wave.set_mask(EXEC, int(rng.integers(1, 1 << wave.lanes, dtype=np.uint64)))
    return wave


def compare(instruction, wave, want):
    assert wave.s == want.s, f"{instruction}: scalar registers"
    assert wave.scc == want.scc, f"{instruction}: SCC"
    for register, lane in np.argwhere(wave.v != want.v).tolist():
        if not both_nan(instruction, wave, want, register, lane):
            got, true = wave.v[register, lane], want.v[register, lane]
            pytest.fail(f"{instruction}: v{register} of lane {lane} is {got:#x}, not {true:#x}")


def both_nan(instruction, wave, want, register, lane):
    """Which of the NaN comes out of arithmetic is left open."""
    result = instruction.name.partition("CVT_")[2][:3] or instruction.name
    if "F64" in result:
        register = instruction["vdst"]
        pairs = [np.ascontiguousarray(w.v[register : register + 2, lane]).view(np.float64) for w in (wave, want)]
        return bool(np.isnan(pairs).all())
    bits = np.array([wave.v[register, lane], want.v[register, lane]], np.uint32)
    if "F16" in result:
        return bool(np.isnan(bits.astype(np.uint16).view(np.float16)).all()) and bits[0] >> 16 == bits[1] >> 16
    return "F32" in result and bool(np.isnan(bits.view(np.float32)).all())


@pytest.mark.parametrize("label", by_manual("V_"))
def test_vector_instruction(label):
    for instruction in samples(label):
        run = executable(instruction, 0)
        for seed in range(2):
            wave = wave_for(instruction, seed)
            want = expected.vector_expected(instruction, wave)
            with np.errstate(all="ignore"):
                assert run(wave) is None
            compare(instruction, wave, want)


@pytest.mark.parametrize("label", by_manual("S_"))
def test_scalar_instruction(label):
    for instruction in samples(label):
        run = executable(instruction, 0)
        for seed in range(20):
            wave = wave_for(instruction, seed)
            want = expected.scalar_expected(instruction, wave)
            assert run(wave) is None
            compare(instruction, wave, want)
