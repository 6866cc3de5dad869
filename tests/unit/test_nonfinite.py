"""Steps with gradients that are not finite, in one process; over ranks: tests/distributed/cases/nonfinite*.py."""

import copy
import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from alto_distributed import ALTO, E, LogicalParameter, Segment, ShardLayout
from alto_distributed.kernels import Coefficients, FlatShard, Span, chunked, foreach, kernel_with_skip
from alto_distributed.kernels.cpu import kernel as native
from alto_distributed.nonfinite import SkippedSteps, flag_of
from alto_distributed.sharding import collective

NAN, INF = math.nan, math.inf


def tensors():
    torch.manual_seed(3)
    return [
        nn.Parameter(torch.randn(7, 5)),
        nn.Parameter(torch.randn(9).bfloat16()),
        nn.Parameter(torch.randn(4, 3).t()),
    ]


def optimizer_of(params, **options):
    return ALTO([{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.0}], lr=0.1, **options)


def give_gradients(params, seed, bad=None):
    """``bad``: (which tensor, value) of one element that is not finite."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    if bad is not None:
        params[bad[0]].grad.view(-1)[-1] = bad[1]


def everything(params, optimizer):
    """Bytes of weights and of all states."""
    states = [t for p in params for _, t in sorted(optimizer.state[p].items())]
    return [t.detach().contiguous().view(-1).view(torch.uint8).clone() for t in [*params, *states]]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(params=["read by the host", "on the device"])
def way(request, monkeypatch):
    """How a step learns of its flag. The second is how accelerators do it; here the device is the CPU."""
    if request.param == "on the device":
        monkeypatch.setattr(SkippedSteps, "is_readable", staticmethod(lambda flag: False))
    return request.param


@pytest.mark.parametrize("kernel", ["auto", "torch", "reference"])
@pytest.mark.parametrize("states", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_skipped_step_leaves_no_trace(way, kernel, states, value):
    """Bit for bit, and the steps after it are those of a run that never had it. The bad element is in each tensor in
    turn, the last included; some are skipped two in a row, one before there is any state."""
    params, others = tensors(), tensors()
    options = {"kernel": kernel, "grad_ema_dtype": states, "exp_avg_dtype": states}
    optimizer, plain = optimizer_of(params, skip_nonfinite=True, **options), optimizer_of(others, **options)
    bad = {1: 0, 4: 1, 5: 2, 8: 2, 11: 0}
    for k in range(1, 12):
        give_gradients(params, k, (bad[k], value) if k in bad else None)
        before = everything(params, optimizer)
        optimizer.step()
        if k in bad:
            assert optimizer.skipped_in_a_row == (2 if k == 5 else 1)  # settles the count
            after = everything(params, optimizer)
            if k > 1:
                assert same(before, after), k
        else:
            give_gradients(others, k)
            plain.step()
    assert optimizer.skipped_steps == len(bad)
    assert plain.skipped_steps == 0
    assert same(everything(params, optimizer), everything(others, plain))
    assert {float(state["step"]) for state in optimizer.state.values()} == {11.0 - len(bad)}


def test_the_count_is_right_wherever_it_is_asked_for(way):
    """On a device the host has counted before it knows: saved, copied and next steps must not see that."""
    for ask in (
        lambda o: o.state_dict()["state"][0]["step"],
        lambda o: copy.deepcopy(o).state_dict()["state"][0]["step"],
        lambda o: (o.load_state_dict(o.state_dict()), o.state_dict()["state"][0]["step"])[1],
        lambda o: (o.skipped_steps, next(iter(o.state.values()))["step"])[1],
    ):
        params = tensors()
        optimizer = optimizer_of(params, skip_nonfinite=True)
        for k, bad in enumerate((None, None, (2, NAN))):
            give_gradients(params, k, bad)
            optimizer.step()
        assert float(ask(optimizer)) == 2.0


def test_padding_is_not_looked_at(way):
    """ZeRO stage 3 leaves uninitialized memory at the end of a shard."""
    whole = LogicalParameter("w", (3, 3))
    flat = torch.arange(12.0)
    flat.grad = torch.ones(12)
    flat.grad[9:] = NAN
    optimizer = ALTO([{"params": [flat]}], skip_nonfinite=True)
    optimizer.set_layouts({flat: ShardLayout(12, [Segment(whole, 0, 9)])})
    optimizer.step()
    assert optimizer.skipped_steps == 0
    assert (flat[:9] != torch.arange(9.0)).all()
    assert torch.equal(flat[9:], torch.arange(9.0, 12.0))
    before = flat.clone()
    flat.grad[8] = NAN
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert torch.equal(flat, before)


def test_large_values_are_finite():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        largest = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
        assert flag_of([largest, -largest]).item() == 0.0, dtype
        for value in (NAN, INF, -INF):
            for place in (0, 517, 999):
                bad = largest.clone()
                bad[place] = value
                assert flag_of([largest, bad, largest.double()]).item() == 1.0, (dtype, value, place)
    assert flag_of([]).item() == flag_of([torch.empty(0)]).item() == 0.0


def test_the_host_reads_nothing_while_the_step_is_under_way(monkeypatch):
    """Only what belongs to the step before: by then it is long there."""
    monkeypatch.setattr(SkippedSteps, "is_readable", staticmethod(lambda flag: False))
    params = tensors()
    optimizer = optimizer_of(params, skip_nonfinite=True, kernel="torch")
    allowed = []

    class NoReadBack(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._local_scalar_dense.default:
                counters = [id(state["step"]) for state in optimizer.state.values()]
                assert id(args[0]) in [*counters, *allowed], "a value was read back by the host"
            return func(*args, **(kwargs or {}))

    for k in range(4):
        give_gradients(params, k, (1, NAN) if k == 2 else None)
        with NoReadBack():
            optimizer.step()
        allowed[:] = [id(optimizer._skipped._pending[0].host)]
    assert optimizer.skipped_steps == 1


@pytest.mark.parametrize("kernel", [chunked, native, foreach.kernel])
def test_predicated_chunks(kernel, monkeypatch):
    """Several chunks a span, and the sums of an unguarded step where the flag is 0."""
    monkeypatch.setattr(chunked, "CPU_CHUNK", 16)
    monkeypatch.setattr(foreach, "BLOCK", 16)
    monkeypatch.setattr(foreach, "BLOCKS", 2)
    c = Coefficients(-5.0, 0.99, 0.9, 0.99, 1e-6, 0.01, 0.5, 0.5)
    torch.manual_seed(1)
    spans = (Span(2, 50, 0), Span(50, 69, 0, False))
    piece = FlatShard(*(torch.rand(70) for _ in range(5)), spans, c)
    for flag in (1.0, 0.0):
        expected, sums = copy.deepcopy(piece), torch.zeros(3, 1, dtype=torch.float64)
        guarded = kernel_with_skip(kernel, torch.tensor([flag]))
        guarded.phase_one([piece], sums)
        guarded.phase_two([piece], torch.tensor([0.1], dtype=torch.float64))
        if not flag:
            plain = torch.zeros_like(sums)
            kernel.phase_one([expected], plain)
            kernel.phase_two([expected], torch.tensor([0.1], dtype=torch.float64))
            torch.testing.assert_close(sums, plain, rtol=1e-12, atol=0)
        for name in ("param", "exp_avg", "exp_avg_sq", "grad_ema"):
            assert torch.equal(getattr(piece, name), getattr(expected, name)), (name, flag)


def test_refusals():
    with pytest.raises(ValueError, match="skip_nonfinite='yes' must be True or False"):
        ALTO(tensors(), skip_nonfinite="yes")
    with pytest.raises(ValueError, match="E's average"):
        E(ALTO(tensors(), alpha=0.0, skip_nonfinite=True))


def test_a_copy_and_an_old_pickle_keep_or_lack_the_choice():
    optimizer = ALTO(tensors(), skip_nonfinite=True)
    assert copy.deepcopy(optimizer).skip_nonfinite
    state = optimizer.__getstate__()
    del state["_skipped"]
    old = ALTO.__new__(ALTO)
    old.__setstate__(state)
    assert not old.skip_nonfinite


@pytest.fixture
def two_ranks():
    """A process group in which collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("backend", ["cuda:nccl", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"])
@pytest.mark.parametrize("held", ["nothing", "on the GPU", "on the CPU"])
def test_whether_the_host_reads_the_flag_follows_from_the_group(backend, held, two_ranks, monkeypatch):
    """A rank without elements read its flag, on the CPU, and returned; the others waited for it in the norms."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta"):
        pytest.skip("this torch has no collectives of fake tensors")
    monkeypatch.setattr("torch.distributed.get_backend_config", lambda group: backend)
    monkeypatch.setattr(collective, "accelerator_type", lambda: "cuda")
    two_ranks.bound_device_id = torch.device("cuda", 1)
    with FakeTensorMode():
        gradients = {
            "nothing": [],
            "on the GPU": [torch.empty(3, device="cuda:1")],
            "on the CPU": [torch.empty(3, device="cpu")],
        }[held]
        skipped = SkippedSteps(True)
        flag = skipped.flags(gradients, None, ())
        assert flag.device == torch.device("cpu" if backend == "cpu:gloo,cuda:gloo" else "cuda:1")
        assert skipped.is_readable(flag) == (flag.device.type == "cpu")


@pytest.mark.parametrize("kernel", ["auto", "torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("largest", [False, True], ids=["its square overflows", "near the largest number"])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-30, 0.01])
def test_a_finite_gradient_whose_square_is_not(kernel, dtype, largest, weight_decay):
    """1e21 left exp_avg_sq infinite for good. skip_nonfinite skips it; without it, that is as with Adam.

    3e38 made NaN of the weights in the torch kernel: a product that overflowed was divided by that infinity.
    """
    huge = 1e200 if dtype == torch.float64 else 1e21
    huge = torch.finfo(dtype).max * 0.88 if largest else huge
    for skips in (True, False):
        p = nn.Parameter(torch.linspace(0.5, 2, 6, dtype=dtype).reshape(2, 3))
        optimizer = ALTO([p], skip_nonfinite=skips, kernel=kernel, weight_decay=weight_decay, layerwise="all")
        for k in range(4):
            p.grad = torch.linspace(-1, 1, 6, dtype=dtype).reshape(2, 3)
            if k == 1:
                p.grad[0, 0] = huge
            before = p.detach().clone()
            optimizer.step()
            assert torch.equal(p, before) == (skips and k == 1)
            assert p.isfinite().all()
        assert optimizer.skipped_steps == int(skips)
        assert optimizer.state[p]["exp_avg_sq"].isinf().sum() == (0 if skips else 1)
    adam = torch.optim.Adam([p])
    p.grad[0, 0] = huge
    adam.step()
    assert adam.state[p]["exp_avg_sq"].isinf().sum() == 1
