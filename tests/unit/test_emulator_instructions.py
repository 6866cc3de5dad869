"""Each instruction that the compiled kernels use, by itself: the emulator of tests/helpers/amd against AMD's manual.

The manual's pseudocode is run lane by lane. Where it says nothing, or is wrong, the expectation is written here.
Instructions that move something are in test_emulator_moves.py.
"""

import dataclasses
import importlib.util
import math
import sys

import numpy as np
import pytest

from tests.helpers.amd import expected, floats, pseudocode
from tests.helpers.amd.lanes import dpp_lanes
from tests.helpers.amd.launch import executable
from tests.helpers.amd.operands import FIRST_VGPR
from tests.helpers.amd.samples import GROUPS, in_group, samples, wave_for, with_registers
from tests.helpers.amd.wave import NULL_RDNA, VCC
from tests.helpers.launcher import REPO

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="tinygrad needs Python 3.11"),
    pytest.mark.skipif(importlib.util.find_spec("tinygrad") is None, reason="tinygrad is not installed"),
]

NAN, INF, TINY, LARGEST = math.nan, math.inf, 2.0**-149, float(np.finfo(np.float32).max)


@pytest.mark.parametrize("group", sorted(GROUPS))
def test_every_group_has_a_test(group):
    texts = [path.read_text() for path in (REPO / "tests/unit").glob("test_emulator_*.py")]
    assert sum(text.count(f'in_group("{group}")') for text in texts) == 1


# -- by the manual ----------------------------------------------------------------------------------------


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


def both_ways(label):
    """The samples, and with registers instead of constants."""
    found = samples(label)
    return found + [other for other in map(with_registers, found) if other not in found]


@pytest.mark.parametrize("label", in_group("vector"))
def test_vector_instruction(label):
    for instruction in both_ways(label):
        run = executable(instruction, 0)
        for seed in range(2):
            wave = wave_for(instruction, seed)
            want = expected.vector_expected(instruction, wave)
            with np.errstate(all="ignore"):
                assert run(wave) is None
            compare(instruction, wave, want)


@pytest.mark.parametrize("label", in_group("scalar"))
def test_scalar_instruction(label):
    for instruction in both_ways(label):
        run = executable(instruction, 0)
        for seed in range(20):
            wave = wave_for(instruction, seed)
            want = expected.scalar_expected(instruction, wave)
            assert run(wave) is None
            compare(instruction, wave, want)


def test_the_second_of_two_operations_does_not_see_the_result_of_the_first():
    for instruction in samples("rdna3 V_DUAL_MOV_B32"):
        fields = {**instruction.fields, "srcy0": instruction["vdstx"] + FIRST_VGPR}
        overlapping = dataclasses.replace(instruction, fields=fields)
        wave = wave_for(instruction, 1)
        want = expected.vector_expected(overlapping, wave)
        executable(overlapping, 0)(wave)
        compare(overlapping, wave, want)


@pytest.mark.parametrize("label", ["cdna V_FMA_F32", "rdna3 V_FMA_F32", "cdna V_ADD_F64"])
def test_signs_of_operands(label):
    instruction = samples(label)[0]
    for signs in range(0, 64, 5):
        changed = dataclasses.replace(instruction, fields={**instruction.fields, "neg": signs & 7, "abs": signs >> 3})
        wave = wave_for(instruction, 1)
        want = expected.vector_expected(changed, wave)
        with np.errstate(all="ignore"):
            executable(changed, 0)(wave)
        compare(changed, wave, want)


def test_a_fused_sum_is_rounded_once():
    """Just below and above the middle between two numbers, by less than float64 can tell."""
    up, down = np.float32(1 + 2.0**-23), np.float32(1 - 2.0**-23)
    for c in np.random.default_rng(0).standard_normal(50).astype(np.float32):
        for half in (np.spacing(c) / 2, -np.spacing(c) / 2):
            for a, b in ((up * half, down), (up * half, up), (-down * half, down)):
                want = pseudocode.run("cdna", "V_FMA_F32", number("f32", S0=a, S1=b, S2=c, D0=0))["D0"]
                got = floats.fma_f32(*np.float32([[a], [b], [c]]))
                assert got.view(np.uint32)[0] == want.bits, (a, b, c)
    assert np.signbit(floats.fma_f64(np.array([-1.0]), np.array([0.0]), np.array([-0.0])))[0]


def number(kind, **values):
    return {name: pseudocode.Number.of(kind, value) for name, value in values.items()}


@pytest.mark.parametrize(("lanes", "cdna"), [(64, True), (32, False)])
def test_lanes_of_dpp(lanes, cdna):
    for control in (0x00, 0x1B, 0x4E, 0xB1, 0xFF, *range(0x111, 0x120), *((0x142, 0x143) if cdna else ())):
        source, known = dpp_lanes(control, lanes, cdna)
        for lane in range(lanes):
            assert (source[lane] if known[lane] else None) == expected.dpp_lane(control, lane), (control, lane)


# -- quotients and roots ----------------------------------------------------------------------------------

# The denominator and the numerator; how many powers of two each is scaled by; whether the quotient is scaled back.
SCALES = [
    ((1.0, 3.0), (0, 0), False),
    ((1.0, 2.0**96), (64, 0), True),  # a quotient near the largest number
    ((1.0, 2.0**95), (0, 0), False),
    ((2.0**-130, 2.0**-126), (64, 64), False),  # the denominator is denormal
    ((2.0**127, 1.0), (-64, 0), True),  # so are 1 / denominator and the quotient
    ((2.0**127, 2.0**20), (-64, -64), False),  # of these, 1 / denominator alone
    ((2.0**50, 2.0**-80), (0, 64), True),  # of these, the quotient alone
    ((0.5, 2.0**-110), (64, 64), False),  # a tiny numerator
]
# Quotient so far, denominator, numerator; the result.
FIXUPS = [
    ((-2.5, -2.0, 5.0), -2.5),
    ((2.5, -2.0, 5.0), -2.5),  # the sign is that of the operands
    ((2.5, NAN, 5.0), NAN),
    ((2.5, 2.0, NAN), NAN),
    ((1.0, 0.0, -0.0), NAN),
    ((1.0, INF, -INF), NAN),
    ((1.0, -0.0, 5.0), -INF),
    ((1.0, 3.0, -INF), -INF),
    ((1.0, -INF, 5.0), -0.0),
    ((1.0, 2.0, -0.0), -0.0),
    ((1.0, 2.0**100, -(2.0**-60)), -0.0),  # too small for a denormal
    ((NAN, -(2.0**-100), 2.0**100), -INF),  # too large
]
# Of an exact a b + c that is scaled back; the last one must not be rounded twice.
FMAS = [
    ((2.0, 3.0, 4.0), False, 10.0),
    ((0.0, 1.0, 2.0**40), True, 2.0**104),
    ((0.0, 1.0, 2.0**-70), True, 2.0**-134),
    ((2.0**-86, 1.0, 3 * 2.0**-86), True, 2.0**-148),
    ((2.0**-86, 2.0**-20, 2.0**-86), True, TINY),
]


def outcome(instruction, operands, flag=None):
    """What an instruction makes of float32 operands: its result in lane 3, and its mask's bit, if it has one."""
    wave = wave_for(instruction, 1)
    if flag is not None:
        wave.set_mask(VCC, int(flag) << 3)
    for n, value in enumerate(operands):
        wave.v[instruction[f"src{n}"] - FIRST_VGPR] = np.float32([value]).view(np.uint32)
    with np.errstate(all="ignore"):
        executable(instruction, 0)(wave)
    result = wave.v[instruction["vdst"]].view(np.float32)[3]
    if "sdst" not in instruction.fields or (instruction["sdst"] == NULL_RDNA and not instruction.cdna):
        return result, None
    return result, wave.mask(instruction["sdst"]) >> 3 & 1


def same(got, want):
    return bool(np.isnan(got) and np.isnan(want)) or (got == want and np.signbit(got) == np.signbit(want))


@pytest.mark.parametrize("label", in_group("division"))
def test_step_of_a_division(label):
    for instruction in samples(label):
        if "SCALE" in label:
            for (low, high), powers, flag in SCALES:
                is_low = instruction["src0"] == instruction["src1"]
                value, power = (low, powers[0]) if is_low else (high, powers[1])
                got, mask = outcome(instruction, (value, low, high))
                assert same(got, np.ldexp(value, power)), (low, high, is_low)
                assert mask in (flag, None), (low, high)
        elif "FIXUP" in label:
            for operands, want in FIXUPS:
                assert same(outcome(instruction, operands)[0], want), operands
        else:
            for operands, flag, want in FMAS:
                assert same(outcome(instruction, operands, flag)[0], want), operands


@pytest.mark.parametrize("label", in_group("rough"))
def test_rough_function(label):
    exact = np.sqrt if "SQRT" in label else lambda x: 1 / x
    corners = {"SQRT": [(0, 0), (-0.0, -0.0), (4, 2), (INF, INF), (-1, NAN), (NAN, NAN)]}.get(
        label.split()[1][2:6], [(0, INF), (-0.0, -INF), (4, 0.25), (INF, 0), (-INF, -0.0), (NAN, NAN), (TINY, INF)]
    )
    for instruction in samples(label):
        for value, want in corners:
            assert same(outcome(instruction, (value,))[0], want), value
        off = []
        for n in range(200):
            value = np.float32(1 + n / 128)
            got, true = outcome(instruction, (value,))[0], exact(np.float64(value))
            off.append(abs(got - true) / np.spacing(np.float32(true)))
        assert max(off) <= 1.5
        assert max(off) > 0.6  # nothing may rely on more than AMD promises


def wide(count, rng):
    """Numbers of all magnitudes."""
    return (rng.standard_normal(count) * np.exp2(rng.integers(-149, 128, count))).astype(np.float32)


def test_division_and_root_are_those_of_ieee():
    """By the compiler's recipes, whose steps are the instructions above: with rough functions, to the last bit."""
    rng = np.random.default_rng(0)
    with np.errstate(all="ignore"):
        for high, low in [(wide(20000, rng), wide(20000, rng)), rng.standard_normal((2, 20000)).astype(np.float32)]:
            got, want = divided(high, low), high / low
            assert ((got.view(np.uint32) == want.view(np.uint32)) | np.isnan(got) & np.isnan(want)).all()
        x = np.abs(wide(20000, rng))
        assert (root(x) == np.sqrt(x)).all()


def divided(high, low):
    scaled_low, _ = floats.div_scale_f32(low, low, high)
    scaled_high, flag = floats.div_scale_f32(high, low, high)
    inverse = floats.rough_reciprocal(scaled_low)
    inverse = floats.fma_f32(floats.fma_f32(-scaled_low, inverse, np.float32([1])), inverse, inverse)
    quotient = scaled_high * inverse
    quotient = floats.fma_f32(floats.fma_f32(-scaled_low, quotient, scaled_high), inverse, quotient)
    rest = floats.fma_f32(-scaled_low, quotient, scaled_high)
    return floats.div_fixup_f32(floats.div_fmas_f32(rest, inverse, quotient, flag), low, high)


def root(x):
    small = x < np.float32(2.0**-96)
    y = np.where(small, x * np.float32(2.0**32), x)
    found = floats.rough_root(y)
    below, above = ((found.view(np.uint32) + np.uint32(n % 2**32)).view(np.float32) for n in (-1, 1))
    nearer = np.where(floats.fma_f32(-below, found, y) <= 0, below, found)
    nearer = np.where(floats.fma_f32(-above, found, y) > 0, above, nearer)
    nearer = np.where(small, nearer * np.float32(2.0**-16), nearer)
    return np.where((y == 0) | np.isinf(y), y, nearer)
