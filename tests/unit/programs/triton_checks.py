"""The Triton kernels against the reference, run by tests/unit/test_triton.py in a process of its own.

Whether Triton interprets its kernels or compiles them is settled when it is imported, so this cannot be done
in pytest's process. One run does all checks and notes the outcome of each:

    TRITON_INTERPRET=1 python -m tests.unit.programs.triton_checks OUTCOMES.json [DEVICE]
"""

import copy
import dataclasses
import random
import sys

import torch

from alto_distributed.hyperparameters import Hyperparameters
from alto_distributed.kernels import Coefficients, FlatShard, Span, reference, rounding
from alto_distributed.kernels.shards import Batch, Dtypes, batch_of
from alto_distributed.kernels.triton.columns import ALIGNED, EXP_AVG, EXP_AVG_SQ, GRAD, GRAD_EMA, PARAM
from alto_distributed.kernels.triton.launch import launch_phase_one
from alto_distributed.kernels.triton.step import TritonKernel, serves
from alto_distributed.kernels.triton.table import ShardTable, Tiling
from alto_distributed.kernels.triton.values import Values
from tests.helpers.checks import run

DEVICE = torch.device(sys.argv[2] if len(sys.argv) > 2 else "cpu")
SMALL = Tiling(tile=16, tiles=2)  # so that a few hundred elements have every kind of edge
TENSORS = ("param", "exp_avg", "exp_avg_sq", "grad_ema")
HYPER = Hyperparameters(weight_decay=0.1, lr=0.02)
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16


def make(
    spans,
    c,
    param=FLOAT32,
    grad=FLOAT32,
    exp_avg=FLOAT32,
    grad_ema=FLOAT32,
    misaligned=0,
    padding=0,
    seed=0,
    index=0,
):
    """A shard whose elements outside of the spans are NaN; ``misaligned`` moves its tensors off their alignment."""
    length = max((stop for _, stop, *_ in spans), default=0) + padding

    def tensor(values, dtype):
        if dtype is None:
            return None
        flat = torch.full((misaligned + length,), float("nan")).to(dtype).to(DEVICE)[misaligned:]
        for start, stop, *_ in spans:
            flat[start:stop] = values(stop - start).to(dtype)
        return flat

    return FlatShard(
        tensor(torch.randn, param),
        tensor(torch.randn, grad),
        tensor(lambda n: torch.randn(n) * 0.1, exp_avg),
        tensor(torch.rand, FLOAT32),
        tensor(lambda n: torch.randn(n) * 0.5, grad_ema),
        tuple(Span(*span)._replace(seed=seed, offset=index + span[0]) for span in spans),
        c,
    )


def bits(tensor):
    """So that NaN is equal to itself, and 0 not to -0."""
    return tensor.view({4: torch.int32, 2: torch.int16}[tensor.element_size()])


def equal(one, other):
    return torch.equal(bits(one), bits(other))


def in_spans(shard):
    inside = torch.zeros_like(shard.param, dtype=torch.bool)
    for start, stop, *_ in shard.spans:
        inside[start:stop] = True
    return inside


def exact_weights(shard, step_sizes):
    """theta after phase two in float32, from the states as they are, in the kernel's own order of operations."""
    c = shard.coefficients
    theta = shard.param.float()
    root = shard.exp_avg_sq.double().sqrt().float()  # correctly rounded, which torch's own in float32 is not
    denominator = root * (c.correction3**-0.5) + c.eps1
    r = shard.exp_avg.float() / denominator * (1 / c.correction2) + c.weight_decay * theta
    scale = torch.full_like(theta, float("nan"))
    for start, stop, slot, *_ in shard.spans:
        scale[start:stop] = step_sizes[slot].float()
    return theta - scale * r


def check_step(shards, slots, kernel=None):
    """One step here and in the reference, from the same values; leaves the new ones in ``shards``."""
    kernel = kernel or TritonKernel(SMALL)
    before, expected = copy.deepcopy(shards), copy.deepcopy(shards)
    sums = torch.full((3, slots), 3.0, dtype=torch.float64, device=DEVICE)  # it adds to what is there
    expected_sums = sums.clone()
    kernel.phase_one(shards, sums)
    reference.phase_one(expected, expected_sums)
    for shard, other, old in zip(shards, expected, before, strict=True):
        assert equal(shard.grad, old.grad)
        assert equal(shard.param, old.param)
        for name in ("exp_avg", "exp_avg_sq", "grad_ema"):
            if getattr(shard, name) is not None:
                assert equal(getattr(shard, name), getattr(other, name)), name
    ratio = torch.zeros(slots, dtype=torch.bool, device=DEVICE)
    ratio[[span.slot for shard in shards for span in shard.spans if span.ratio]] = True
    torch.testing.assert_close(sums[:2, ratio], expected_sums[:2, ratio], rtol=1e-6, atol=0)
    assert torch.equal(sums[2], expected_sums[2])

    step_sizes = torch.rand(slots, dtype=torch.float64, device=DEVICE) * 0.1
    exact = [exact_weights(shard, step_sizes) for shard in shards]
    kernel.phase_two(shards, step_sizes)
    reference.phase_two(expected, step_sizes)
    for shard, other, old, theta in zip(shards, expected, before, exact, strict=True):
        inside = in_spans(shard)
        for name in TENSORS:
            new = getattr(shard, name)
            if new is not None:
                assert equal(new[~inside], getattr(old, name)[~inside]), f"padding of {name}"
                assert not new[inside].isnan().any(), name
        assert torch.equal(shard.param[inside], theta[inside].to(shard.param.dtype))
        one_place = {FLOAT32: 1e-6, BFLOAT16: 2**-7, FLOAT16: 2**-10}[shard.param.dtype]
        torch.testing.assert_close(shard.param[inside], other.param[inside], rtol=one_place, atol=1e-6)


def tables(shards):
    table = ShardTable(DEVICE, SMALL)
    table.update([(shard, shard.memory, Dtypes.of(shard)) for shard in batch_of(shards)])
    return table.tables


# -- what every run does ----------------------------------------------------------------------------------


def check_shards_of_every_length_share_a_launch():
    """Lengths around a tile (16) and a chunk (32), two groups; slots shared between shards and within one."""
    c, other = Coefficients.at_step(HYPER, 3), Coefficients.at_step(Hyperparameters(lr=0.5, betas=(0.9, 0.8, 0.7)), 1)
    lengths = (1, 15, 16, 17, 31, 32, 33, 64, 65)
    shards = [make([(0, n, i % 4)], (c, other)[i % 2]) for i, n in enumerate(lengths)]
    shards.append(make([(0, 20, 4, False), (20, 40, 2), (40, 60, 5), (60, 80, 2)], other))
    kernel = TritonKernel(SMALL)
    for _ in range(2):
        check_step(shards, 6, kernel)
    assert len(tables(shards).launches) == 1


def check_padding_and_spans_anywhere():
    """Elements between spans are NaN, must stay so to the bit, and must not reach a sum."""
    c = Coefficients.at_step(HYPER, 2)
    check_step([make([(5, 9, 0), (13, 50, 1), (50, 51, 2, False), (70, 135, 0)], c, padding=7)], 3)


def check_misaligned_tensors():
    """Views that begin anywhere give the same bits as aligned ones."""
    c = Coefficients.at_step(HYPER, 2)
    check_step([make([(0, 70, 0)], c, misaligned=n) for n in (1, 2, 3)] + [make([(0, 70, 0)], c)], 1)
    aligned = make([(5, 140, 0)], c)
    moved = copy.deepcopy(aligned)
    moved.grad = torch.cat([moved.grad[:1], moved.grad])[1:]  # one tensor off is enough
    sums = torch.zeros(3, 2, dtype=torch.float64, device=DEVICE)
    for n, shard in enumerate((aligned, moved)):
        TritonKernel(SMALL).phase_one([shard], sums[:, n:])
    assert torch.equal(sums[:, 0], sums[:, 1])
    check_step([moved], 1)


def check_alpha_zero_has_no_third_state():
    c = Coefficients.at_step(Hyperparameters(alpha=0.0), 4)
    check_step([make([(0, 50, 0)], c, grad_ema=None), make([(0, 20, 0)], Coefficients.at_step(HYPER, 1))], 1)


def check_no_decay_and_no_bias_correction():
    c = Coefficients.at_step(Hyperparameters(weight_decay=0.0, bias_correction=False), 4)
    check_step([make([(0, 50, 0), (50, 60, 1, False)], c)], 2)


def check_weights_and_gradients_of_low_precision():
    """Read and written in their own precision, ties to even; one launch for each combination."""
    c = Coefficients.at_step(HYPER, 2)
    pairs = [(BFLOAT16, BFLOAT16), (FLOAT16, FLOAT16), (FLOAT32, BFLOAT16), (BFLOAT16, FLOAT32)]
    shards = [make([(3, 70, i)], c, param=p, grad=g) for i, (p, g) in enumerate(pairs)]
    check_step(shards, 4)
    assert len(tables(shards).launches) == 4


def check_several_launches_add_to_one_slot():
    c = Coefficients.at_step(HYPER, 2)
    check_step([make([(0, 70, 0)], c, param=p) for p in (BFLOAT16, FLOAT32, FLOAT16)], 1)


def check_rounding_to_nearest_of_every_kind():
    """theta - tiny * 0 = theta: ties, halves, subnormals and overflow, as torch rounds them."""
    special = [1.0, -1.0, 0.0, -0.0, 3.4e38, -3.4e38, 1e-40, -3e-41, 1e-45]
    words = [0x3F808000, 0x3F818000, 0x00018000, 0x7F7F8000, 0x3F808001, 0x3F807FFF]  # ties, a tie's neighbors
    words = torch.tensor(words, dtype=torch.int32).view(FLOAT32)
    theta = torch.cat([torch.tensor(special), words, torch.randn(49)]).to(DEVICE)
    from alto_distributed.kernels.triton.elements import to_nearest

    assert equal(rounded_by(to_nearest, theta), theta.to(BFLOAT16))
    not_numbers = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001], dtype=torch.int32).view(FLOAT32).to(DEVICE)
    assert rounded_by(to_nearest, not_numbers.repeat(16)).isnan().all()
    infinities = torch.tensor([float("inf"), -float("inf")], device=DEVICE).repeat(32)
    assert equal(rounded_by(to_nearest, infinities), infinities.to(BFLOAT16))


def rounded_by(to_nearest, x):
    """64 numbers as bfloat16."""
    import triton
    import triton.language as tl

    @triton.jit
    def rounds(source, target, ROUND: tl.constexpr):
        place = tl.arange(0, 64)
        tl.store(target + place, ROUND(tl.load(source + place), tl.bfloat16))

    bits_of = torch.zeros(64, dtype=torch.uint16, device=DEVICE)
    rounds[(1,)](x.contiguous(), bits_of, ROUND=to_nearest)
    return bits_of.view(BFLOAT16)


def check_states_in_bfloat16():
    """Stochastic rounding by the bits of kernels/rounding.py: equal to the reference to the bit, m and u alike."""
    c, later = Coefficients.at_step(HYPER, 1), Coefficients.at_step(HYPER, 70_000)
    shards = [
        make([(0, 70, 0)], c, exp_avg=BFLOAT16, grad_ema=BFLOAT16, seed=0xFEDCBA98),
        make([(9, 70, 1)], later, exp_avg=BFLOAT16, grad_ema=BFLOAT16, seed=1, padding=3, index=2**32 - 40),
        make([(0, 70, 0)], c, exp_avg=BFLOAT16, grad_ema=None, seed=2, index=12345),
        make([(0, 70, 1)], c, grad_ema=BFLOAT16, seed=3, param=BFLOAT16, misaligned=1),
    ]
    plain = copy.deepcopy(shards[0])
    kernel = TritonKernel(SMALL)
    for _ in range(2):
        check_step(shards, 2, kernel)
    for changed in ({"seed": 5}, {"offset": 1}):  # they are used, or this would be the same
        other = copy.deepcopy(plain)
        other.spans = (other.spans[0]._replace(**changed),)
        kernel.phase_one([other], torch.zeros(3, 2, dtype=torch.float64, device=DEVICE))
        assert not equal(other.exp_avg, shards[0].exp_avg)


def check_indices_beyond_32_bits():
    """Addresses are moved back so that the indices of a small tensor lie about a multiple of 2^32."""
    first, length = 3 * 2**32 - 37, 100
    c = Coefficients.at_step(HYPER, 6)
    shard = make([(0, length, 0)], c, exp_avg=BFLOAT16, grad_ema=BFLOAT16, seed=77)
    expected = copy.deepcopy(shard)
    moved = dataclasses.replace(shard, spans=(Span(first, first + length, 0, True, 77, first),))
    values, table = Values(1, DEVICE), ShardTable(DEVICE, SMALL)
    sent = [(moved, moved.memory, Dtypes.of(moved))]
    table.update(sent)
    values.send(sent, table.rows)
    for column, tensor in {
        PARAM: shard.param,
        GRAD: shard.grad,
        EXP_AVG: shard.exp_avg,
        EXP_AVG_SQ: shard.exp_avg_sq,
        GRAD_EMA: shard.grad_ema,
    }.items():
        values.shards[0, column] -= first * tensor.element_size()
    values.shards[0, ALIGNED] = 0  # where the tiles begin, the tensors are not aligned now
    sums = torch.zeros(3, 1, dtype=torch.float64, device=DEVICE)
    launch_phase_one(table.tables, SMALL, values, sums)

    d, u = reference.adapt_gradient(expected.grad, expected.grad_ema.float(), c.alpha, c.beta1)
    m = c.beta2 * expected.exp_avg.float() + (1 - c.beta2) * d
    (span,) = moved.spans
    rounding.store(expected.grad_ema, u, span, 6, rounding.GRAD_EMA_BITS)
    rounding.store(expected.exp_avg, m, span, 6, rounding.EXP_AVG_BITS)
    assert equal(shard.grad_ema, expected.grad_ema)
    assert equal(shard.exp_avg, expected.exp_avg)


def check_gradients_are_unscaled_and_negated_as_they_are_read():
    """In float32, also those of float16, which could not hold the small ones; and the gradients stay as they are."""
    climbing = Coefficients.at_step(dataclasses.replace(HYPER, maximize=True), 2)
    for grad in (FLOAT32, BFLOAT16, FLOAT16):
        shards = [make([(0, 70, 0)], c, grad=grad) for c in (climbing, Coefficients.at_step(HYPER, 2))]
        scale = torch.full((1,), 1 / 1024, device=DEVICE)
        for shard in shards:
            shard.inverse_scale = scale
        by_hand = copy.deepcopy(shards)
        for shard in by_hand:
            shard.grad = shard.grad.float() * (shard.coefficients.sign / 1024)
            shard.inverse_scale, shard.coefficients = None, Coefficients.at_step(HYPER, 2)
        sums = [torch.zeros(3, 1, dtype=torch.float64, device=DEVICE) for _ in range(2)]
        gradients = [shard.grad.clone() for shard in shards]
        for some, total in zip((shards, by_hand), sums, strict=True):
            TritonKernel(SMALL).phase_one(some, total)
        for shard, other, gradient in zip(shards, by_hand, gradients, strict=True):
            assert equal(shard.grad, gradient)
            assert all(equal(getattr(shard, name), getattr(other, name)) for name in TENSORS)
        assert torch.equal(*sums)


def check_counters_on_the_device_make_the_corrections():
    """As under capturable: each shard at a step of its own, and bits of rounding that hang on it."""
    for corrected in (True, False):
        hyper = dataclasses.replace(HYPER, bias_correction=corrected)
        steps = (1, 4, 1000)
        shards = [make([(0, 40, i)], Coefficients.at_step(hyper, k), exp_avg=BFLOAT16) for i, k in enumerate(steps)]
        others = copy.deepcopy(shards)
        unknown = Coefficients.at_step(hyper, 0)
        for shard, k in zip(others, steps, strict=True):
            shard.coefficients, shard.counter = unknown, torch.tensor(float(k), device=DEVICE)
        results = []
        for some in (shards, others):
            sums = torch.zeros(3, 3, dtype=torch.float64, device=DEVICE)
            kernel = TritonKernel(SMALL)
            sizes = torch.full((3,), 0.1, dtype=torch.float64, device=DEVICE)
            kernel.phase_two(some, sizes, kernel.phase_one(some, sums))
            results.append(sums)
        torch.testing.assert_close(*results, rtol=1e-6, atol=0)
        for shard, other in zip(shards, others, strict=True):
            assert all(equal(getattr(shard, name), getattr(other, name)) for name in TENSORS[1:])
            torch.testing.assert_close(shard.param, other.param, rtol=1e-6, atol=1e-7)


def check_gradients_that_are_not_finite():
    """An infinity or NaN goes where the reference has it, into the sums, and to no other element."""
    c = Coefficients.at_step(HYPER, 2)
    shards = [make([(0, 40, 0)], c), make([(0, 40, 1)], c, exp_avg=BFLOAT16, grad_ema=BFLOAT16)]
    for shard in shards:
        shard.grad[3], shard.grad[39] = float("inf"), -float("inf")
        bits(shard.grad)[20] = 0x7FFFFFFF  # a NaN to which nothing can be added without its becoming a zero
    expected = copy.deepcopy(shards)
    sums = torch.zeros(3, 2, dtype=torch.float64, device=DEVICE)
    expected_sums = sums.clone()
    kernel = TritonKernel(SMALL)
    kernel.phase_one(shards, sums)
    reference.phase_one(expected, expected_sums)
    torch.testing.assert_close(sums, expected_sums, rtol=1e-6, atol=0, equal_nan=True)
    kernel.phase_two(shards, torch.ones(2, dtype=torch.float64, device=DEVICE))
    reference.phase_two(expected, torch.ones(2, dtype=torch.float64, device=DEVICE))
    for shard, other in zip(shards, expected, strict=True):
        assert shard.param.isnan().sum() == 3
        for name in ("param", "exp_avg", "exp_avg_sq", "grad_ema"):
            torch.testing.assert_close(
                getattr(shard, name), getattr(other, name), rtol=1e-6, atol=1e-6, equal_nan=True, msg=name
            )


def check_a_flag_on_the_device_skips_the_step():
    """Nothing changes while the flag is set, also in shards that go another way; with a flag of 0 it is a step."""
    c = Coefficients.at_step(HYPER, 2)
    shards = [
        make([(0, 40, 0), (50, 90, 0, False)], c, padding=7),
        make([(0, 40, 1)], c, exp_avg=BFLOAT16, grad_ema=BFLOAT16, seed=5),
        make([(0, 20, 1)], c),
    ]
    for name in ("param", "grad", "exp_avg", "exp_avg_sq", "grad_ema"):
        setattr(shards[2], name, getattr(shards[2], name).double())
    assert [serves(shard) for shard in shards] == [True, True, False]
    kernel = TritonKernel(SMALL)
    expected, steps = copy.deepcopy(shards), torch.full((2,), 0.1, dtype=torch.float64, device=DEVICE)
    good = [shard.grad.clone() for shard in shards]
    for shard in shards:
        shard.grad[3], shard.grad[19] = float("nan"), float("inf")
    for flag in (1.0, 0.0):
        guarded = kernel.unless(torch.tensor([flag], device=DEVICE))
        sums = torch.zeros(3, 2, dtype=torch.float64, device=DEVICE)
        guarded.phase_one(shards, sums)
        guarded.phase_two(shards, steps * (float("nan") if flag else 1))
        if not flag:
            assert (sums > 0).all()
            plain = torch.zeros_like(sums)
            kernel.phase_one(expected, plain)
            kernel.phase_two(expected, steps)
            assert torch.equal(sums, plain)
        for shard, other in zip(shards, expected, strict=True):
            for name in TENSORS:
                if getattr(shard, name) is not None:
                    one, two = (getattr(p, name).view(torch.uint8) for p in (shard, other))
                    assert torch.equal(one, two), (name, flag)
        for shard, grad in zip(shards, good, strict=True):
            shard.grad.copy_(grad)


def check_eps1_of_zero():
    """The lanes of a tile that lie outside of the span are 0/0; none of that may reach the sums."""
    check_step([make([(3, 45, 0)], Coefficients.at_step(Hyperparameters(eps=(0.0, 0.0, 0.0)), 2))], 1)


def check_sums_keep_their_digits():
    """Squares are taken and added in float64: float32 would lose digits, overflow or vanish."""
    n = 40_000
    c = dataclasses.replace(Coefficients.at_step(HYPER, 1), weight_decay=0.0)
    shard = make([(0, n, 0), (n, n + 8, 1), (n + 8, n + 16, 2)], c)
    shard.param[n : n + 8], shard.param[n + 8 :] = 1e25, 1e-30
    expected = torch.stack([shard.param[s.start : s.stop].double().square().sum() for s in shard.spans])
    sums = torch.zeros(3, 3, dtype=torch.float64, device=DEVICE)
    TritonKernel(Tiling(tile=2048, tiles=4)).phase_one([shard], sums)
    torch.testing.assert_close(sums[0], expected, rtol=1e-14, atol=0)
    m, v = shard.exp_avg / c.correction2, shard.exp_avg_sq / c.correction3
    r = (m.double() / (v.double().sqrt() + c.eps1))[:n]
    torch.testing.assert_close(sums[1, 0], r.square().sum(), rtol=1e-7, atol=0)


def check_sums_do_not_depend_on_the_order_of_programs():
    """The same bits however the programs of a launch take turns, and again when it is launched once more."""
    c = Coefficients.at_step(HYPER, 2)
    shards = [make([(0, 200, 0), (200, 300, 1)], c), make([(0, 333, 0)], c)]
    results = []
    for order in ("forward", "forward", "reverse", "random", "random"):
        kernel, fresh = TritonKernel(SMALL), copy.deepcopy(shards)
        sums = torch.zeros(3, 2, dtype=torch.float64, device=DEVICE)
        with turns(order):
            kernel.phase_one(fresh, sums)
        results.append(sums)
    assert all(torch.equal(sums, results[0]) for sums in results)
    assert (results[0] > 0).all()


class turns:
    """Under the interpreter, which runs programs one after the other, another order than the usual."""

    def __init__(self, order):
        self.order = order

    def __enter__(self):
        if DEVICE.type != "cpu":
            return
        from triton.runtime.interpreter import interpreter_builder as builder

        def set_grid_idx(x, y, z):
            programs = list(range(builder.grid_dim[0]))
            if self.order == "reverse":
                programs.reverse()
            elif self.order == "random":
                random.Random(f"{id(self)}").shuffle(programs)
            type(builder).set_grid_idx(builder, programs[x], y, z)

        builder.set_grid_idx = set_grid_idx

    def __exit__(self, *_):
        if DEVICE.type == "cpu":
            from triton.runtime.interpreter import interpreter_builder as builder

            del builder.set_grid_idx


# -- what the host does -----------------------------------------------------------------------------------


def check_tables_are_kept_and_values_sent_only_if_they_changed():
    """New gradients and new numbers need no new tables; equal ones need no copy at all."""
    kernel, kept = TritonKernel(SMALL), {}
    shard = make([(0, 40, 0)], Coefficients.at_step(HYPER, 1))

    def batch():
        return Batch([shard], kept)

    check_step(batch(), 1, kernel)
    table, values = kept["triton", SMALL]
    tables, addresses, numbers = table.tables, values._addresses, values._numbers
    kernel.phase_two(batch(), torch.zeros(1, dtype=torch.float64, device=DEVICE))
    assert values._addresses is addresses
    assert values._numbers is numbers
    for k in (2, 3):
        old = shard.grad  # kept alive, so that the new one is elsewhere
        shard = dataclasses.replace(shard, grad=torch.randn_like(old), coefficients=Coefficients.at_step(HYPER, k))
        check_step(batch(), 1, kernel)
    assert values._addresses is not addresses
    assert values._numbers is not numbers
    assert table.tables is tables
    assert list(kept.values()) == [(table, values)] * 2  # of this stream, and the latest


def check_shards_that_are_not_in_a_step():
    """Their chunks stay in the tables, and nothing of theirs is touched or added, whoever else is there."""
    kernel, kept, c = TritonKernel(SMALL), {}, Coefficients.at_step(HYPER, 2)
    shards = [make([(0, 70, 0)], c), make([(3, 40, 1)], c), make([(0, 33, 1)], c, grad=BFLOAT16)]
    for place, shard in enumerate(shards):
        shard.place = place
    made = []
    for present in ([0], [0, 1, 2], [1], [2, 0], [0, 1, 2]):
        before = copy.deepcopy(shards)
        check_step(Batch([shards[i] for i in present], kept), 2, kernel)
        for i, (shard, old) in enumerate(zip(shards, before, strict=True)):
            for name in TENSORS:
                same = equal(getattr(shard, name), getattr(old, name))
                assert same == (i not in present), (present, i, name)
        made.append(next(iter(kept.values()))[0].tables)
    assert len({id(tables) for tables in made}) == 2  # with the new shards of the second step, and never again


def check_a_step_size_of_zero_leaves_weights_alone():
    """Also where there has been no gradient yet, and eps1 is 0: r is 0/0 there."""
    shard = make([(0, 40, 0), (40, 90, 1)], Coefficients.at_step(Hyperparameters(eps=(0.0, 0.0, 0.0)), 1))
    for tensor in (shard.grad, shard.exp_avg, shard.exp_avg_sq, shard.grad_ema):
        tensor[:40] = 0
    shard.grad[50], shard.grad[51:60] = 1e-45, 0.0
    before, sums = copy.deepcopy(shard), torch.zeros(3, 2, dtype=torch.float64, device=DEVICE)
    kernel = TritonKernel(SMALL)
    kernel.phase_one([shard], sums)
    assert sums[2].tolist() == [0.0, 41.0]
    kernel.phase_two([shard], torch.tensor([0.0, 0.1], dtype=torch.float64, device=DEVICE))
    assert equal(shard.param[:40], before.param[:40])
    assert (shard.param[40:] != before.param[40:]).all()


def check_float64_goes_another_way():
    """Shards that the kernel is not written for are served by plain torch operations, in the same call."""
    c = Coefficients.at_step(HYPER, 2)
    ours, theirs = make([(0, 20, 0)], c), make([(0, 20, 1)], c)
    for name in ("param", "grad", "exp_avg", "exp_avg_sq", "grad_ema"):
        setattr(theirs, name, getattr(theirs, name).double())
    assert serves(ours)
    assert not serves(theirs)
    # A subclass may have no memory of its own: a collective's result that is not there yet has address 0.
    assert not serves(dataclasses.replace(ours, grad=ours.grad.as_subclass(type("Wrapper", (torch.Tensor,), {}))))
    shards = [theirs, ours]
    expected, kernel = copy.deepcopy(shards), TritonKernel(SMALL)
    for module in (kernel, reference):
        sums = torch.zeros(3, 2, dtype=torch.float64, device=DEVICE)
        module.phase_one(shards if module is kernel else expected, sums)
        module.phase_two(shards if module is kernel else expected, sums[0] * 1e-3)
        assert (sums > 0).all()
    for shard, other in zip(shards, expected, strict=True):
        torch.testing.assert_close(shard.param, other.param, rtol=1e-6, atol=1e-7)


def check_expanded_gradients_go_another_way():
    """As autograd makes them of a sum: one element that stands for all, so memory has no others to be read."""
    shard = make([(0, 40, 0)], Coefficients.at_step(HYPER, 2))
    shard.grad = torch.ones(1, device=DEVICE).expand(40)
    expected, kernel = copy.deepcopy(shard), TritonKernel(SMALL)
    sums = torch.zeros(3, 1, dtype=torch.float64, device=DEVICE)
    assert not kernel.phase_one([shard], sums).ours
    reference.phase_one([expected], sums)
    torch.testing.assert_close(shard.exp_avg, expected.exp_avg, rtol=1e-6, atol=1e-7)


def check_nothing_to_do():
    kernel = TritonKernel(SMALL)
    sums = torch.zeros(3, 0, dtype=torch.float64, device=DEVICE)
    for shards in ([], [make([], Coefficients.at_step(HYPER, 1))], [make([(0, 0, 0)], Coefficients.at_step(HYPER, 1))]):
        kernel.phase_one(shards, sums)
        kernel.phase_two(shards, sums[0])


CHECKS = {name: check for name, check in list(globals().items()) if name.startswith("check_") and name != "check_step"}


if __name__ == "__main__":
    run(CHECKS)
