"""Parameters whose memory changes under the optimizer, and programs that change torch's defaults."""

import gc
import weakref

import pytest
import torch
from torch import nn

from alto_distributed import ALTO, E, LogicalParameter, ShardLayout

KERNELS = ["native", "torch", "reference"]


def stepped(kernel, *shape):
    p = nn.Parameter(torch.randn(*shape))
    p.grad = torch.randn(*shape)
    optimizer = ALTO([p], kernel=kernel)
    optimizer.step()
    return p, optimizer


@pytest.mark.parametrize("kernel", KERNELS)
def test_smaller_data_is_refused_and_its_neighbors_stay(kernel):
    """The C kernel went by the old size: it overwrote what lies behind the new data, in 200 of 200 tries."""
    p, optimizer = stepped(kernel, 64, 64)
    memory, gradients = torch.randn(4096), torch.randn(4096)
    before = memory.clone()
    p.data = memory[:64].view(8, 8)
    p.grad = gradients[:64].view(8, 8)
    with pytest.raises(RuntimeError, match=r"shape \(8, 8\), torch.float32 on cpu, has exp_avg of shape \(64, 64\)"):
        optimizer.step()
    assert torch.equal(memory, before)
    with pytest.raises(RuntimeError):  # what torch.optim raises
        adam_after_the_same()
    optimizer.state.clear()  # as a user of torch.optim would: it starts again
    optimizer.step()
    assert torch.equal(memory[64:], before[64:])
    assert (memory[:64] != before[:64]).all()


def adam_after_the_same():
    p = nn.Parameter(torch.randn(64, 64))
    p.grad = torch.randn(64, 64)
    adam = torch.optim.AdamW([p])
    adam.step()
    p.data, p.grad = torch.randn(8, 8), torch.randn(8, 8)
    adam.step()


@pytest.mark.parametrize("kernel", KERNELS)
def test_data_of_another_shape_is_refused(kernel):
    p, optimizer = stepped(kernel, 6, 10)
    p.data, p.grad = torch.randn(10, 6), torch.randn(10, 6)
    with pytest.raises(RuntimeError, match="its data was replaced"):
        optimizer.step()
    assert float(optimizer.state[p]["step"]) == 1.0


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("options", [{}, {"exp_avg_dtype": "bfloat16"}], ids=["float32", "bfloat16"])
def test_data_of_more_precision_is_refused(kernel, options):
    """Its states stayed float32, and the step went on with them; AdamW raises."""
    p = nn.Parameter(torch.randn(6, 10))
    optimizer = ALTO([p], kernel=kernel, **options)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):  # all of them have states of float32
        p.data, p.grad = p.data.to(dtype), torch.randn(6, 10).to(dtype)
        optimizer.step()
    p.data, p.grad = p.data.double(), torch.randn(6, 10).double()
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match="torch.float64 on cpu, has exp_avg.*torch.float32 on cpu, instead of torch"):
        optimizer.step()
    assert torch.equal(p, before)
    assert float(optimizer.state[p]["step"]) == 3.0


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("options", [{}, {"layerwise": "none"}, {"skip_nonfinite": True}], ids=str)
def test_data_in_another_memory_order_goes_on(kernel, options):
    """As after ``model.to(memory_format=torch.channels_last)``: step() raised what ``view`` says, and had counted."""
    orders = (torch.contiguous_format, torch.channels_last, torch.contiguous_format)
    results = []
    for changes in (False, True):
        torch.manual_seed(3)
        p, q = nn.Parameter(torch.randn(2, 3, 4, 5)), nn.Parameter(torch.randn(7))
        optimizer = ALTO([p, q], kernel=kernel, **options)
        for order in orders:
            if changes:
                p.data = p.data.contiguous(memory_format=order)
            for _ in range(2):
                p.grad, q.grad = torch.randn(2, 3, 4, 5), torch.randn(7)
                optimizer.step()
            assert not changes or p.is_contiguous(memory_format=order)
        assert {float(state["step"]) for state in optimizer.state.values()} == {6.0}
        results.append([p.detach(), q.detach(), *(optimizer.state[p][key] for key in optimizer.state_keys)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_resized_storage_is_refused(kernel):
    """As some frameworks free a parameter's memory while it is not needed."""
    p, optimizer = stepped(kernel, 64, 64)
    for size in (0, 100):
        p.untyped_storage().resize_(size)
        with pytest.raises(RuntimeError, match=f"memory for {size // 4} elements: its storage was resized"):
            optimizer.step()


def test_a_layout_is_of_the_data_that_it_was_given_for():
    flat = torch.ones(8)
    flat.grad = torch.ones(8)
    optimizer = ALTO([flat])
    optimizer.set_layouts({flat: ShardLayout.whole(LogicalParameter("w", (2, 4)), 8)})
    optimizer.step()
    optimizer.state.clear()
    flat.data, flat.grad = torch.ones(4), torch.ones(4)
    with pytest.raises(RuntimeError, match="of another length than its tensor of 4 elements"):
        optimizer.step()


def test_nothing_is_kept_of_tensors_that_are_gone():
    """Engines and users put new tensors into a group; the plans of the old ones held on to them."""
    p = nn.Parameter(torch.randn(50))
    optimizer = ALTO([p])
    gone = []
    for _ in range(5):
        p = nn.Parameter(torch.randn(50))
        p.grad = torch.randn(50)
        optimizer.param_groups[0]["params"] = [p]
        optimizer.step()
        optimizer.state.clear()
        gone.append(weakref.ref(p))
    gc.collect()
    assert [ref() for ref in gone[:-1]] == [None] * 4
    assert gone[-1]() is p
    assert len(optimizer._plans) == 1


def test_parameters_can_be_swapped_after_a_step():
    """As ``module.to()`` does with DTensors: torch refuses a tensor that somebody watches."""
    p, _ = stepped("native", 3, 4)
    q = nn.Parameter(torch.zeros(3, 4))
    torch.utils.swap_tensors(p, q)
    assert not p.any()


def test_a_plan_is_not_taken_for_that_of_other_tensors():
    """A new tensor may get the id of one that is gone."""
    optimizer = ALTO([nn.Parameter(torch.randn(3))])
    for size in (3, 5, 3, 7) * 20:
        optimizer.state.clear()
        optimizer.param_groups[0]["params"] = []
        p = nn.Parameter(torch.randn(size))
        p.grad = torch.randn(size)
        before = p.detach().clone()
        optimizer.param_groups[0]["params"] = [p]
        optimizer.step()
        assert (p != before).all()


SETTINGS = {
    "plain": {},
    "bfloat16 states": {"grad_ema_dtype": "bfloat16", "exp_avg_dtype": "bfloat16"},
    "no ratio": {"layerwise": "none"},
    "skips": {"skip_nonfinite": True},
    "measured": {"diagnostics_every": 1},
    "lr as a tensor": {"lr": torch.tensor(0.01)},
}


def trained(kernel, options):
    torch.manual_seed(7)
    shapes = [(9, 5), (11,)]
    params = [nn.Parameter(torch.randn(*s, dtype=torch.float32, device="cpu")) for s in shapes]
    groups = [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.0}]
    plain = nn.Parameter(torch.ones(4, dtype=torch.float32, device="cpu"))
    optimizers = [ALTO(groups, kernel=kernel, **options), E(torch.optim.SGD([plain], lr=0.1))]
    for _ in range(3):
        for p in [*params, plain]:
            p.grad = torch.randn(p.shape, dtype=torch.float32, device="cpu")
        for optimizer in optimizers:
            optimizer.step()
    optimizers[0].load_state_dict(optimizers[0].state_dict())
    optimizers[0].step()
    readings = optimizers[0].diagnostics()
    states = [value for p in params for _, value in sorted(optimizers[0].state[p].items())]
    return [*params, plain, *states], readings, optimizers[0].skipped_steps


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("default", ["meta", torch.float64, torch.bfloat16])
def test_torchs_defaults_change_nothing(kernel, setting, default):
    """Buffers were made on the default device: the C kernel wrote to address 0."""
    expected = trained(kernel, SETTINGS[setting])
    dtype = torch.get_default_dtype()
    try:
        if default == "meta":
            torch.set_default_device(default)
        else:
            torch.set_default_dtype(default)
        found = trained(kernel, SETTINGS[setting])
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)
    assert found[1:] == expected[1:]
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert (mine.dtype, mine.device) == (theirs.dtype, theirs.device)
        assert torch.equal(mine, theirs)


def test_a_grad_scaler_without_gradients_whatever_the_default_device():
    """Its 0 became a tensor there: on "meta" the step waited for a copy to pinned memory, and failed."""
    p = nn.Parameter(torch.ones(4, dtype=torch.float32, device="cpu"))
    optimizer, scaler = ALTO([p]), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1, dtype=torch.float32, device="cpu"))
    torch.set_default_device("meta")
    try:
        scaler.step(optimizer)
    finally:
        torch.set_default_device(None)
    assert torch.equal(p, torch.ones(4))
