"""States in bfloat16: the generator of stochastic rounding, the same bits in every kernel, saving and loading."""

import copy
import io
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

from alto_distributed import ALTO
from alto_distributed.hyperparameters import Hyperparameters
from alto_distributed.kernels import Coefficients, FlatShard, Span, chunked, foreach, reference, rounding
from alto_distributed.kernels.cpu import kernel as native
from alto_distributed.sharding.layout import LogicalParameter, ShardLayout
from alto_distributed.sharding.plan import StepPlan

KERNELS = {"reference": reference, "torch": chunked, "native": native, "foreach": foreach.kernel}
BOTH = dict(grad_ema_dtype="bfloat16", exp_avg_dtype=torch.bfloat16)
MASK = 0xFFFFFFFF


def bits(t):
    return t.contiguous().view({2: torch.int16, 4: torch.int32}[t.element_size()])


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


# -- the generator -------------------------------------------------------------------------------------------------


def written_out(seed, k, which, i):
    """The definition, in Python's integers, without the code under test."""

    def mix(x):
        x ^= x >> 16
        x = x * 0x7FEB352D & MASK
        x ^= x >> 15
        x = x * 0x846CA68B & MASK
        return x ^ x >> 16

    key = mix((mix((seed + 0x9E3779B9 * k) & MASK) + which) & MASK)
    return mix((i & MASK) ^ mix((key + (i >> 32)) & MASK))


def test_the_generator_is_the_one_that_is_written_down():
    for seed, k, which in ((0, 1, 0), (0xFFFFFFFF, 12345, 1), (77, 2**31, 0)):
        key = rounding.key_of(seed, k, which)
        for start in (0, 5, 2**32 - 3, 2**35 + 1):
            got = rounding.random_bits(key, start, start + 7, torch.device("cpu")).tolist()
            assert got == [written_out(seed, k, which, i) for i in range(start, start + 7)]
    # A value to hold other kernels to.
    assert written_out(1, 2, 1, 2**32 + 3) == 0x1576D71E


def test_every_bit_is_a_fair_coin_over_elements_steps_and_seeds():
    cpu = torch.device("cpu")
    over_elements = rounding.random_bits(12345, 0, 1 << 16, cpu)
    over_steps = torch.tensor([written_out(3, k, 0, 17) for k in range(1, 20000)])
    seeds = seeds_of([f"h.{g}.w{i}" for g in range(20) for i in range(1000)])
    over_seeds = torch.tensor([written_out(seed, 1, 0, 17) for seed in seeds])
    for sample in (over_elements, over_steps, over_seeds):
        for bit in range(16):
            share = ((sample >> bit) & 1).double().mean().item()
            assert abs(share - 0.5) < 4.5 * 0.5 / len(sample) ** 0.5


def seeds_of(names):
    plan = StepPlan([{"params": [torch.ones(1) for _ in names], "param_names": names}], {}, ())
    return [planned.spans("no")[0].seed for planned in plan.groups[0]]


def test_seeds_follow_from_names_and_differ_from_parameter_to_parameter():
    names = [f"h.{i}.{name}" for i in range(300) for name in ("", "a.weight", "b.weight", "b.bias")]
    seeds = seeds_of(names)
    assert len(set(seeds)) > len(seeds) - 3  # of 1200 out of 2^32 hardly any two meet
    assert seeds_of(names[::-1]) == seeds[::-1]


def test_rounding_is_right_in_the_mean_and_goes_to_a_neighbor():
    x = torch.cat([torch.randn(200), torch.randn(50) * 1e-39, torch.tensor([0.0, 1.0, -2.5, 3.38e38])])
    trials = 4000
    total = torch.zeros(len(x), dtype=torch.float64)
    out = torch.empty(len(x), dtype=torch.bfloat16)
    below = (bits(x) & -65536).view(torch.float32)  # towards zero
    unit = ((bits(x) & -65536) + 65536).view(torch.float32).double() - below.double()
    for k in range(trials):
        rounding.store(out, x, Span(0, len(x), 0), k, 0)
        neighbors = (out.float() == below) | (out.double() == below.double() + unit)
        assert neighbors.all()
        total += torch.where(out.isinf(), below.double() + unit, out.double())
    error = (total / trials - x.double()) / unit.abs().clamp_min(1e-45)
    assert error.abs().max().item() < 5 * 0.5 / trials**0.5
    nearest = (x.bfloat16().double() - x.double()) / unit.abs().clamp_min(1e-45)
    assert nearest.abs().max().item() > 10 * error.abs().max().item()  # the instrument sees a bias
    assert error[-3:-1].abs().max().item() == 0  # what fits is kept as it is


# -- kernels -------------------------------------------------------------------------------------------------------


def a_shard(n, *, seed=9, index=0, k=3, ema=torch.bfloat16, m=torch.bfloat16, spans=None, **hyper):
    return FlatShard(
        param=torch.randn(n),
        grad=torch.randn(n),
        exp_avg=torch.randn(n).to(m),
        exp_avg_sq=torch.rand(n) + 0.01,
        grad_ema=torch.randn(n).to(ema),
        spans=tuple(Span(*s)._replace(seed=seed, offset=index + s[0]) for s in spans or [(0, n, 0)]),
        coefficients=Coefficients.at_step(Hyperparameters(**hyper), k),
    )


def run(kernel, shard, step_sizes=None):
    tensors = ("param", "grad", "exp_avg", "exp_avg_sq", "grad_ema")
    shard = replace(shard, **{name: getattr(shard, name).clone() for name in tensors})
    sums = torch.zeros(3, 1, dtype=torch.float64)
    kernel.phase_one([shard], sums)
    kernel.phase_two([shard], torch.tensor([0.01], dtype=torch.float64) if step_sizes is None else step_sizes)
    return shard, sums


@pytest.mark.parametrize("step_size", [1e-4, 0.0])
def test_every_kernel_rounds_weights_with_the_same_bits(step_size):
    """Master weights in bfloat16. A weight that does not move keeps its bits."""
    n = 70001
    shard = a_shard(n, ema=torch.float32, m=torch.float32, weight_decay=0.01)
    shard = replace(shard, param=shard.param.bfloat16(), rounds_weights=True)
    sizes = torch.tensor([step_size], dtype=torch.float64)
    got = {}
    for name, kernel in KERNELS.items():
        got[name], _ = run(kernel, shard, sizes)
    exact, _ = run(reference, replace(shard, param=shard.param.float(), rounds_weights=False), sizes)
    below = (bits(exact.param) & -65536).view(torch.float32)
    for name, one in got.items():
        differing = (bits(one.param) != bits(got["reference"].param)).sum().item()
        assert differing <= n * 1e-4, (name, differing)  # where float32 has another last place
        assert same_bits(one.param, got["torch"].param) or name in ("reference", "foreach"), name
        if step_size:
            up = one.param.float() != below
            share = ((bits(exact.param) & 0xFFFF).double() / 65536).mean().item()
            assert abs(up.double().mean().item() - share) < 4 * 0.5 / n**0.5, name
        else:
            assert same_bits(one.param, shard.param), name
    nearest, _ = run(native, replace(shard, rounds_weights=False), sizes)
    assert step_size == 0 or not same_bits(nearest.param, got["native"].param)


@pytest.mark.parametrize("kernel", ["torch", "native", "reference"])
def test_weights_in_bfloat16_go_where_those_in_float32_go(kernel):
    """In updates of a hundredth of their last place. To nearest, most would stay where they are."""
    torch.manual_seed(3)
    start, target = torch.randn(40, 50).bfloat16(), torch.randn(40, 50)
    moved = {}
    for name, dtype, rounds in (("float32", torch.float32, False), ("chance", torch.bfloat16, True),
                                ("nearest", torch.bfloat16, False)):  # fmt: skip
        weight = nn.Parameter(start.to(dtype, copy=True))
        optimizer = ALTO([weight], lr=2e-4, weight_decay=1e-4, kernel=kernel)
        if rounds:
            optimizer.round_weights_stochastically()
        for _ in range(60):
            weight.grad = (weight.detach().float() - target).to(dtype)
            optimizer.step()
        assert optimizer.state[weight]["exp_avg"].dtype == torch.float32
        moved[name] = (weight.detach().float() - start.float()).flatten()
    share = {name: (moved[name] @ moved["float32"] / moved["float32"].norm() ** 2).item() for name in moved}
    assert 0.9 < share["chance"] < 1.1, share
    assert share["nearest"] < 0.3, share


@pytest.mark.parametrize("k", [1, 7])
@pytest.mark.parametrize(
    "dtypes", [dict(ema=torch.float32), dict(m=torch.float32), dict()], ids=["exp_avg", "grad_ema", "both"]
)
def test_every_kernel_draws_the_same_bits(dtypes, k):
    """torch and C agree to the bit. The reference computes in another order; where its float32 value is another,
    the same draw mostly still gives the same bfloat16, and a wrong draw would differ in half of them."""
    n = 70000  # more than one block, one part of the generator's work, and not a multiple of anything
    shard = a_shard(n, k=k, spans=[(3, 40001, 0), (40010, n - 1, 0, False)], **dtypes)
    results = {name: run(kernel, shard) for name, kernel in KERNELS.items()}
    truth, truth_sums = results["reference"]
    for name in ("torch", "native", "foreach"):
        got, sums = results[name]
        torch.testing.assert_close(sums[:2], truth_sums[:2], rtol=1e-5, atol=0)
        for state in ("exp_avg", "grad_ema"):
            a, b = getattr(got, state), getattr(truth, state)
            if a.dtype == torch.bfloat16:
                assert (bits(a) != bits(b)).float().mean().item() < 1e-3, (name, state)
            torch.testing.assert_close(a.float(), b.float(), rtol=1e-2, atol=1e-5)
    for state in ("exp_avg", "exp_avg_sq", "grad_ema"):
        for name in ("native", "foreach"):
            assert same_bits(getattr(results["torch"][0], state), getattr(results[name][0], state)), (name, state)
    changed = [
        {"spans": tuple(span._replace(seed=10) for span in shard.spans)},
        {"spans": tuple(span._replace(offset=span.offset + 1) for span in shard.spans)},
        {"coefficients": replace(shard.coefficients, step=k + 1)},
    ]
    for other in (replace(shard, **change) for change in changed):
        drawn_again, _ = run(native, other)
        for state in ("exp_avg", "grad_ema"):
            if getattr(shard, state).dtype == torch.bfloat16:
                assert 0.2 < (getattr(drawn_again, state) != getattr(truth, state)).float().mean().item() < 0.8


@pytest.mark.parametrize("kernel", KERNELS)
def test_both_phases_see_the_first_moment_that_is_kept(kernel):
    """|r| must be of the r that phase two uses: with another, a step would not have the length lr * |theta|."""
    shard = a_shard(300, alpha=0.0, weight_decay=0.0, eps=1e-3)
    got, sums = run(KERNELS[kernel], shard)
    step = shard.param.double() - got.param.double()
    assert (step.norm() / 0.01).item() == pytest.approx(sums[1, 0].sqrt().item(), rel=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_infinity_and_nan_stay_what_they_are(kernel):
    shard = a_shard(64, alpha=0.5, betas=(0.01, 0.9, 0.99))
    shard.grad[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    # Random bits that are added to this NaN would make a number of it.
    shard.grad[3:20] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    got, _ = run(KERNELS[kernel], shard)
    for state in (got.exp_avg, got.grad_ema):
        assert not state[:2].isfinite().any()
        assert state[2:20].isnan().all()
        assert state[20:].isfinite().all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_indices_beyond_32_bits(kernel):
    """A tensor of 2^32 elements would not fit here. One that holds the elements about there of a parameter does."""
    shard = a_shard(100, index=2**32 - 40, spans=[(3, 97, 0)])
    got, _ = run(KERNELS[kernel], shard)
    c, expected = shard.coefficients, shard.grad_ema.clone()
    (span,) = shard.spans
    u = shard.grad_ema.float().lerp(shard.grad, 1 - c.beta1)
    noise = [written_out(span.seed, c.step, rounding.GRAD_EMA_BITS, span.offset + i) & 0xFFFF for i in range(94)]
    rounded = (u[3:97].view(torch.int32) + torch.tensor(noise, dtype=torch.int32)) >> 16
    expected[3:97] = rounded.to(torch.int16).view(torch.bfloat16)
    assert (bits(got.grad_ema) != bits(expected)).sum() <= 1  # the reference has another order of operations


# -- the optimizer -------------------------------------------------------------------------------------------------


def trained(optimizer, params, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator) + 0.3 * p.detach().float().sign()
            p.grad = p.grad.to(p.dtype)
        optimizer.step()


def parameters():
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(40, 50)), nn.Parameter(torch.randn(30))]


@pytest.mark.parametrize("kernel", ["native", "torch", "reference"])
def test_ten_bytes_of_state_a_parameter_and_eight_with_both(kernel):
    for options, expected in ((dict(grad_ema_dtype=torch.bfloat16), 10), (BOTH, 8), ({}, 12)):
        params = parameters()
        optimizer = ALTO(params, kernel=kernel, **options)
        trained(optimizer, params, 2)
        kept = sum(t.nbytes for s in optimizer.state.values() for key, t in s.items() if key != "step")
        assert kept == expected * sum(p.numel() for p in params)
        assert all(s["exp_avg_sq"].dtype == torch.float32 for s in optimizer.state.values())


def test_small_states_follow_full_ones():
    """Over 60 steps the average in bfloat16 keeps up with that in float32; rounded to nearest it would stand still
    (its steps of a hundredth are below half a unit in the last place)."""
    ends = []
    for options in ({}, dict(grad_ema_dtype="bfloat16"), BOTH):
        params = parameters()
        optimizer = ALTO(params, **options)
        trained(optimizer, params, 60)
        ends.append((params[0].detach(), optimizer.state[params[0]]["grad_ema"].double()))
    (theta, u), *others = ends
    for other_theta, other_u in others:
        assert ((other_u - u).mean() / u.abs().mean()).abs().item() < 2e-3
        assert ((other_u - u).norm() / u.norm()).item() < 0.03
        assert ((other_theta - theta).norm() / theta.norm()).item() < 0.02


@pytest.mark.parametrize("kernel", ["native", "torch", "reference"])
@pytest.mark.parametrize("through", ["state_dict", "pickle", "deepcopy"])
def test_a_resumed_run_goes_on_to_the_bit(kernel, through):
    params = parameters()
    optimizer = ALTO(params, kernel=kernel, **BOTH)
    trained(optimizer, params, 3)
    if through == "state_dict":
        file = io.BytesIO()
        torch.save((params, optimizer.state_dict()), file)
        file.seek(0)
        others, saved = torch.load(file, weights_only=False)
        other = ALTO(others, kernel=kernel, **BOTH)
        other.load_state_dict(saved)
    elif through == "pickle":
        others, other = pickle.loads(pickle.dumps((params, optimizer)))
    else:
        others, other = copy.deepcopy((params, optimizer))
    for run_on, its in ((optimizer, params), (other, others)):
        trained(run_on, its, 3, seed=8)
    for p, q in zip(params, others, strict=True):
        assert same_bits(p, q)
        for key in ALTO.state_keys:
            assert same_bits(optimizer.state[p][key], other.state[q][key]), key


def test_precision_is_the_optimizers_choice_not_the_checkpoints():
    params = parameters()
    small, full = ALTO(params, **BOTH), ALTO(params)
    trained(small, params, 3)
    full.load_state_dict(small.state_dict())
    for key in ("exp_avg", "grad_ema"):
        up = full.state[params[0]][key]
        assert up.dtype == torch.float32
        assert torch.equal(up, small.state[params[0]][key].float())  # exact
    trained(full, params, 1)
    down = ALTO(params, grad_ema_dtype="bfloat16")
    down.load_state_dict(full.state_dict())
    wide = full.state[params[0]]
    assert same_bits(down.state[params[0]]["grad_ema"], wide["grad_ema"].bfloat16())  # to nearest
    assert same_bits(down.state[params[0]]["exp_avg"], wide["exp_avg"])
    # An engine that puts states back by itself, in float32.
    down.state[params[0]]["grad_ema"] = wide["grad_ema"].clone()
    trained(down, params, 1)
    assert down.state[params[0]]["grad_ema"].dtype == torch.bfloat16


def test_replicas_stay_equal_and_tensors_draw_apart():
    runs = []
    for _ in range(2):
        params = parameters()
        optimizer = ALTO(params, **BOTH)
        trained(optimizer, params, 4)
        runs.append((params, optimizer))
    (params, optimizer), (others, other) = runs
    for p, q in zip(params, others, strict=True):
        assert all(same_bits(optimizer.state[p][key], other.state[q][key]) for key in ALTO.state_keys)

    twins = [nn.Parameter(torch.ones(1000)) for _ in range(2)]
    optimizer = ALTO(twins, **BOTH)
    for p in twins:
        p.grad = torch.linspace(0.1, 0.9, 1000)
    optimizer.step()
    a, b = (optimizer.state[p]["grad_ema"] for p in twins)
    assert 0.2 < (a != b).float().mean().item() < 0.8


def test_an_engine_that_steps_one_tensor_after_the_other_draws_apart():
    """DeepSpeed puts every sub-group's flat tensor into the same place of the same group."""
    flats = [nn.Parameter(torch.ones(1000)) for _ in range(2)]
    optimizer = ALTO(flats[:1], **BOTH)
    layouts = {p: ShardLayout.whole(LogicalParameter(f"layer{i}", (1000,)), 1000) for i, p in enumerate(flats)}
    optimizer.set_layouts(layouts)
    for p in flats:
        optimizer.param_groups[0]["params"] = [p]
        p.grad = torch.linspace(0.1, 0.9, 1000)
        optimizer.step()
    a, b = (optimizer.state[p]["grad_ema"] for p in flats)
    assert 0.2 < (a != b).float().mean().item() < 0.8


def test_refusals():
    p = nn.Parameter(torch.ones(3))
    for options, message in (
        (dict(grad_ema_dtype="float16"), "grad_ema_dtype='float16' is not one of 'float32', 'bfloat16'"),
        (dict(exp_avg_dtype=torch.float64), "exp_avg_dtype=torch.float64 is not one of"),
        (dict(exp_avg_dtype=None), "exp_avg_dtype=None is not one of"),
        (dict(exp_avg_sq_dtype="bfloat16"), "did you mean 'exp_avg_dtype'"),
    ):
        with pytest.raises(ValueError, match=message):
            ALTO([p], **options)
    wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="of at most float32"):
        ALTO([wide], grad_ema_dtype="bfloat16")
    optimizer = ALTO([p], grad_ema_dtype="bfloat16")
    with pytest.raises(ValueError, match="of at most float32"):
        optimizer.add_param_group({"params": [wide]})
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0]["params"].append(wide)  # as Megatron does it
    p.grad, wide.grad = torch.ones_like(p), torch.ones_like(wide)
    with pytest.raises(ValueError, match="of at most float32"):
        optimizer.step()
    assert not optimizer.state  # nothing has changed
