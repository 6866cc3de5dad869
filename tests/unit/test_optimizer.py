"""ALTO as a torch.optim.Optimizer: what a user of any other optimizer relies on."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from alto_distributed import ALTO, LogicalParameter, ShardLayout, param_groups
from alto_distributed import optimizer as optimizer_module
from alto_distributed.kernels.capture import is_capturing
from alto_distributed.sharding import Segment


def network():
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))


X = torch.linspace(-1, 1, 96).reshape(16, 6)
Y = X.sum(1, keepdim=True).sin()


def loss_of(model):
    return (model(X) - Y).square().mean()


def train(model, optimizer, steps, scheduler=None):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return [p.detach().clone() for p in model.parameters()]


def saved(optimizer):
    """A state_dict after a trip through a file, read back without running pickled code."""
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def assert_equal(a, b):
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


def test_the_names_others_rely_on():
    model = network()
    optimizer = ALTO(model.parameters())
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert ALTO.state_keys == ("exp_avg", "exp_avg_sq", "grad_ema")
    train(model, optimizer, 3)
    for p in model.parameters():
        assert set(optimizer.state[p]) == {"step", *ALTO.state_keys}
        assert optimizer.state[p]["step"] == 3
    assert optimizer.defaults["lr"] == 1e-2
    assert optimizer.defaults["eps"] == (1e-6, 1e-6, 1e-10)


def test_closure():
    model, again = network(), network()
    again.load_state_dict(model.state_dict())
    optimizer, plain = ALTO(model.parameters()), ALTO(again.parameters())

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    expected = loss_of(model).item()
    assert optimizer.step(closure).item() == expected
    assert_equal(model.parameters(), train(again, plain, 1))


def test_gradients_are_left_alone():
    model = network()
    optimizer = ALTO(model.parameters())
    loss_of(model).backward()
    before = [(p.grad, p.grad.clone()) for p in model.parameters()]
    optimizer.step()
    for p, (same, value) in zip(model.parameters(), before, strict=True):
        assert p.grad is same
        assert torch.equal(p.grad, value)


def test_no_gradient_means_no_step_and_no_state():
    model = network()
    optimizer = ALTO(model.parameters())
    loss_of(model).backward()
    model[0].weight.grad = None
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert torch.equal(model[0].weight, before)
    assert model[0].weight not in optimizer.state
    assert optimizer.state[model[2].weight]["step"] == 1


def test_groups_override_and_can_be_added():
    a, b, c = (nn.Parameter(torch.ones(2, 2)) for _ in range(3))
    optimizer = ALTO([{"params": [a]}, {"params": [b], "lr": 0.0, "eps": 1e-8, "betas": [0.5, 0.9, 0.9], "alpha": 1}])
    optimizer.add_param_group({"params": [c], "layerwise": "none", "weight_decay": 0})
    assert [g["lr"] for g in optimizer.param_groups] == [0.01, 0.0, 0.01]
    assert optimizer.param_groups[1]["eps"] == (1e-8, 1e-6, 1e-10)
    assert optimizer.param_groups[1]["betas"] == (0.5, 0.9, 0.9)
    for p in (a, b, c):
        p.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(b, torch.ones(2, 2))  # lr 0
    torch.testing.assert_close(c.detach(), torch.full((2, 2), 0.99), rtol=1e-5, atol=0)
    assert not torch.equal(a, torch.ones(2, 2))


def test_a_group_added_after_steps_joins_the_next():
    a, b = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = ALTO([a])
    a.grad = b.grad = torch.ones(2, 2)
    optimizer.step()
    optimizer.add_param_group({"params": [b]})
    optimizer.step()
    assert (optimizer.state[a]["step"], optimizer.state[b]["step"]) == (2, 1)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20, cycle_momentum=False),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: 0.5**k),
    ],
)
def test_schedulers(schedule):
    """The scheduled run equals one whose lr is set by hand to what the scheduler says."""
    model, by_hand = network(), network()
    by_hand.load_state_dict(model.state_dict())
    optimizer, plain = ALTO(model.parameters()), ALTO(by_hand.parameters())
    scheduler = schedule(optimizer)
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        plain.param_groups[0]["lr"] = rates[-1]
        a = train(model, optimizer, 1, scheduler)
        b = train(by_hand, plain, 1)
    assert len(set(rates)) > 1
    assert_equal(a, b)


def test_lr_as_a_tensor():
    model, again = network(), network()
    again.load_state_dict(model.state_dict())
    groups = param_groups(model)
    a = train(model, ALTO(groups, lr=torch.tensor(0.01, dtype=torch.float64)), 5)
    b = train(again, ALTO(param_groups(again), lr=0.01), 5)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("alpha", [-5.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_save_load_continue_is_bitwise_equal_to_not_stopping(alpha, dtype):
    """bf16 is the interesting one: torch's own load_state_dict would round the float32 states to it."""
    model = network().to(dtype)
    global X, Y
    x, y = X.to(dtype), Y.to(dtype)

    def go(model, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()

    optimizer = ALTO(param_groups(model), alpha=alpha)
    go(model, optimizer, 5)
    resumed = copy.deepcopy(model)
    fresh = ALTO(param_groups(resumed), lr=123.0, alpha=alpha)
    fresh.load_state_dict(saved(optimizer))
    assert fresh.param_groups[0]["lr"] == 1e-2
    go(model, optimizer, 5)
    go(resumed, fresh, 5)
    assert_equal(model.parameters(), resumed.parameters())
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        for key in optimizer.state[p]:
            assert (
                fresh.state[q][key].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
                or key == "step"
            )
            assert torch.equal(optimizer.state[p][key], fresh.state[q][key])


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies_go_on_as_the_original(clone):
    model = network()
    optimizer = ALTO(param_groups(model), kernel="reference")
    train(model, optimizer, 3)
    model2, optimizer2 = clone((model, optimizer))
    assert optimizer2._kernel == "reference"
    assert_equal(train(model, optimizer, 3), train(model2, optimizer2, 3))


def test_a_copy_of_a_sharded_optimizer_refuses_to_step_without_layouts():
    """Layouts hold process groups and the original's tensors; a copy that forgot them would be silently wrong."""
    p = nn.Parameter(torch.ones(4))
    p.grad = torch.ones(4)
    layout = ShardLayout.whole(LogicalParameter("w", (2, 2)), 4)
    optimizer = ALTO([p])
    optimizer.set_layouts({p: layout})
    twin = copy.deepcopy(optimizer)
    grandchild = copy.deepcopy(twin)
    for lost in (twin, grandchild):
        with pytest.raises(ValueError, match="call set_layouts on the copy"):
            lost.step()
    (q,) = twin.param_groups[0]["params"]
    q.grad = torch.ones(4)
    twin.set_layouts({q: layout})
    twin.step()
    optimizer.step()
    assert torch.equal(p, q)


def test_load_state_dict_keeps_layouts_of_the_same_tensors():
    p = nn.Parameter(torch.arange(1.0, 5.0))
    one, two = LogicalParameter("one", (2,)), LogicalParameter("two", (2,))
    optimizer = ALTO([p])
    optimizer.set_layouts({p: ShardLayout(4, [Segment(one, 0, 2), Segment(two, 2, 2)])})
    p.grad = torch.ones(4)
    optimizer.step()
    before, state = p.detach().clone(), copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    after = p.detach().clone()
    p.data.copy_(before)
    optimizer.load_state_dict(state)
    optimizer.step()
    assert torch.equal(p, after)


def test_a_step_skipped_for_overflow_changes_nothing():
    """torch's own loss scaler: an infinite gradient skips the step, and not even k moves."""
    model = network()
    optimizer = ALTO(param_groups(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for overflow in (False, True, False):
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        if overflow:
            model[0].weight.grad[0, 0] = torch.inf
        before = [t.clone() for p in model.parameters() for t in (p, *optimizer.state[p].values())]
        scaler.step(optimizer)
        scaler.update()
        after = [t.clone() for p in model.parameters() for t in (p, *optimizer.state[p].values())]
        same = len(before) == len(after) and all(map(torch.equal, before, after))
        assert same == overflow
    assert optimizer.state[model[0].weight]["step"] == 2


@pytest.mark.parametrize("unscaled_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_loss_scaler_changes_no_bit(unscaled_first, dtype):
    """Its scale is a power of two. Gradients are below what float16 holds, but for the scale."""
    if unscaled_first and dtype == torch.float16:
        pytest.skip("torch refuses to unscale float16 gradients by itself")
    ours, plain = ([nn.Parameter(torch.ones(5, 3, dtype=dtype))] for _ in range(2))
    optimizer, other = ALTO(ours, lr=0.1), ALTO(plain, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(torch.ones(1))
    for _ in range(3):
        gradient = torch.arange(1.0, 16.0).view(5, 3) * 2.0**-30
        ours[0].grad = (gradient * 2.0**16).to(dtype)
        if dtype != torch.float16:
            plain[0].grad = gradient.to(dtype)
            other.step()
        if unscaled_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert not hasattr(optimizer, "found_inf")
        if not unscaled_first:
            assert torch.equal(ours[0].grad, (gradient * 2.0**16).to(dtype))  # as docs/pytorch.md says
    if dtype == torch.float16:
        scaled = ALTO([(reference := nn.Parameter(torch.ones(5, 3)))], lr=0.1)
        for _ in range(3):
            reference.grad = gradient
            scaled.step()
        for key, value in optimizer.state[ours[0]].items():
            assert torch.equal(value, scaled.state[reference][key]), key
    else:
        assert torch.equal(ours[0], plain[0])
        for key, value in optimizer.state[ours[0]].items():
            assert torch.equal(value, other.state[plain[0]][key]), key


def test_hooks():
    model = network()
    optimizer = ALTO(model.parameters())
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    optimizer.register_state_dict_post_hook(lambda o, d: seen.append("state_dict"))
    train(model, optimizer, 1)
    optimizer.state_dict()
    assert seen == ["pre", "post", "state_dict"]


def test_a_users_load_pre_hook_is_respected():
    """The states that count are those after the user's pre-hooks, also where torch would have cast them."""
    model = network().bfloat16()
    optimizer = ALTO(model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()

    def doubled(_, state_dict):
        state = {k: {**s, "exp_avg": s["exp_avg"] * 2} for k, s in state_dict["state"].items()}
        return {**state_dict, "state": state}

    fresh = ALTO(model.parameters())
    fresh.register_load_state_dict_pre_hook(doubled)
    fresh.load_state_dict(optimizer.state_dict())
    for p in model.parameters():
        assert torch.equal(fresh.state[p]["exp_avg"], optimizer.state[p]["exp_avg"] * 2)
    assert len(fresh._optimizer_load_state_dict_pre_hooks) == 1  # ours is gone again


def test_initialize_state_allocates_everything_and_changes_nothing():
    model, again = network(), network()
    again.load_state_dict(model.state_dict())
    eager, lazy = ALTO(model.parameters()), ALTO(again.parameters())
    eager.initialize_state()
    assert all(set(eager.state[p]) == {"step", *ALTO.state_keys} for p in model.parameters())
    assert_equal(train(model, eager, 3), train(again, lazy, 3))


def test_alpha_may_change_in_mid_run():
    """From 0 on grad_ema starts at zero, as at step 1; back at 0 it is kept up to date for later."""
    p = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
    optimizer = ALTO([p], alpha=0)
    u = torch.zeros(3, 3, dtype=torch.float64)
    for alpha in (0, 0, -5.0, -2, 0, -5):
        optimizer.param_groups[0]["alpha"] = alpha
        p.grad = torch.randn_like(p)
        optimizer.step()
        if alpha != 0 or u.any():
            u = 0.99 * u + 0.01 * p.grad
        assert ("grad_ema" in optimizer.state[p]) == bool(u.any())
    torch.testing.assert_close(optimizer.state[p]["grad_ema"], u, rtol=1e-12, atol=0)


def test_lr_and_weight_decay_may_change_in_mid_run():
    p = nn.Parameter(torch.randn(3, 3))
    optimizer = ALTO([p])
    for lr, wd in ((1e-2, 1e-4), (0.0, 0.1), (0.5, 0.0)):
        optimizer.param_groups[0].update(lr=lr, weight_decay=wd)
        p.grad = torch.randn_like(p)
        before = p.detach().clone()
        optimizer.step()
        assert torch.equal(p, before) == (lr == 0)


def test_a_step_between_forward_and_backward_is_noticed():
    """The kernels write through addresses; gradients were 8.6% off without a word."""
    for kernel in ("auto", "torch", "reference"):
        p = nn.Parameter(torch.ones(4, 4))
        optimizer = ALTO([p], kernel=kernel)
        p.square().sum().backward()
        loss = p.square().sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_capture_is_refused(monkeypatch):
    """A CUDA graph would replay the numbers of one step."""
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert is_capturing("cuda")
    ALTO([p]).step()  # a graph has nothing to do with the CPU
    monkeypatch.setattr(optimizer_module, "is_capturing", lambda device_type: True)
    monkeypatch.setattr(optimizer_module, "accelerator_type", lambda: "cpu")
    with pytest.raises(ValueError, match="cannot be captured in a CUDA graph"):
        ALTO([p]).step()
