"""E: any optimizer, adapted; its state survives, and the gradient is given back."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from alto_distributed import ALTO, E, LogicalParameter, Segment, ShardLayout, param_groups

BASES = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.05),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "AdamW foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, alpha=0.9),  # an alpha of its own
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),  # sets its state up in its constructor
    "LAMB": lambda ps: ALTO(ps, alpha=0, weight_decay=0.01),
}


class PaperE:
    """a_k and g_{k-1} as the paper keeps them, on top of the same base optimizer."""

    def __init__(self, base, alpha, beta1):
        self.base, self.alpha, self.beta1 = base, alpha, beta1
        self.params = [p for g in base.param_groups for p in g["params"]]
        self.a = [torch.zeros_like(p) for p in self.params]
        self.previous = [torch.zeros_like(p) for p in self.params]

    def step(self):
        for i, p in enumerate(self.params):
            self.a[i] = self.beta1 * self.a[i] + (1 - self.beta1) * (p.grad - self.previous[i])
            self.previous[i] = p.grad
            p.grad = p.grad + self.alpha * self.a[i]
        self.base.step()

    def zero_grad(self):
        self.base.zero_grad()


def pair():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return model, copy.deepcopy(model)


X = torch.linspace(-1, 1, 96, dtype=torch.float64).reshape(16, 6)
Y = X.sum(1, keepdim=True).sin()


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        (model(X) - Y).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def assert_same(a, b, **tolerance):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, **(tolerance or dict(rtol=0, atol=0)))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("alpha_beta1", [(-5.0, 0.99), (0.5, 0.01), (-0.9, 0.0)], ids=str)
def test_any_base_optimizer(base, alpha_beta1):
    ours, theirs = pair()
    mine = E(BASES[base](ours.parameters()), *alpha_beta1)
    oracle = PaperE(BASES[base](theirs.parameters()), *alpha_beta1)
    assert_same(train(ours, mine, 100), train(theirs, oracle, 100), rtol=1e-9, atol=1e-11)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon():
    ours, theirs = pair()
    matrices = [[p for p in m.parameters() if p.ndim == 2] for m in (ours, theirs)]
    mine = E(torch.optim.Muon(matrices[0], lr=0.01))
    oracle = PaperE(torch.optim.Muon(matrices[1], lr=0.01), -5.0, 0.99)
    # Muon orthogonalises in bfloat16, which turns the last digit of a float64 into a visible one.
    assert_same(train(ours, mine, 10), train(theirs, oracle, 10), rtol=1e-2, atol=1e-3)


def test_e_of_lamb_is_alto():
    ours, theirs = pair()
    adapted = E(ALTO(param_groups(ours), alpha=0), alpha=-5.0, beta1=0.99)
    assert_same(train(ours, adapted, 50), train(theirs, ALTO(param_groups(theirs)), 50), rtol=1e-10, atol=1e-12)


def test_e_of_lamb_keeps_what_has_no_signal():
    """The adapted gradient is not zero then: a weight moved by lr of its norm a step, unlike under ALTO."""
    results = []
    for make in (lambda p: E(ALTO(p, alpha=0, lr=0.05), alpha=-5.0, beta1=0.99), lambda p: ALTO(p, lr=0.05)):
        torch.manual_seed(5)
        whole, flat = nn.Parameter(torch.randn(4, 3).double()), nn.Parameter(torch.randn(16).double())
        optimizer = make([whole, flat])
        first, second = (LogicalParameter(name, (2, 3)) for name in ("a", "b"))
        layout = ShardLayout(16, [Segment(first, 0, 6), Segment(second, 8, 6)])  # padding in between and at the end
        (optimizer.base if isinstance(optimizer, E) else optimizer).set_layouts({flat: layout})
        for k in range(30):
            before = [p.detach().clone() for p in (whole, flat)]
            whole.grad, flat.grad = torch.randn(4, 3).double(), torch.randn(16).double()
            if k >= 5:
                whole.grad.zero_()
                flat.grad[8:14] = 0
            optimizer.step()
            assert torch.equal(whole, before[0]) == (k >= 5)
            assert torch.equal(flat[8:14], before[1][8:14]) == (k >= 5)
            assert (flat[:6] != before[1][:6]).all()
        results.append([whole.detach(), flat.detach()])
    assert_same(*results, rtol=1e-10, atol=1e-12)


def test_lbfgs_sees_every_gradient_adapted_and_the_average_moves_once_a_step():
    model, _ = pair()
    gradients, seen = [], []

    class Watched(torch.optim.LBFGS):
        def step(self, closure):
            def watched():
                loss = closure()
                seen.append(model[0].weight.grad.clone())
                return loss

            return super().step(watched)

    optimizer = E(Watched(model.parameters(), lr=0.1, max_iter=3), alpha=-0.5, beta1=0.5)

    def closure():
        optimizer.zero_grad()
        loss = (model(X) - Y).square().mean()
        loss.backward()
        gradients.append(model[0].weight.grad.clone())
        return loss

    u = torch.zeros_like(model[0].weight)
    for _ in range(2):
        gradients.clear()
        seen.clear()
        optimizer.step(closure)
        assert len(gradients) == 3
        for g, d in zip(gradients, seen, strict=True):
            torch.testing.assert_close(d, g - 0.5 * 0.5 * (g - u), rtol=1e-12, atol=1e-14)
        u = 0.5 * u + 0.5 * gradients[0]
        torch.testing.assert_close(optimizer.state[model[0].weight]["grad_ema"], u, rtol=1e-12, atol=1e-14)


def test_closure_equals_no_closure():
    ours, theirs = pair()
    a, b = (E(torch.optim.Adam(m.parameters())) for m in (ours, theirs))

    def closure():
        a.zero_grad()
        loss = (ours(X) - Y).square().mean()
        loss.backward()
        return loss

    losses = [a.step(closure).item() for _ in range(5)]
    assert losses[-1] < losses[0]
    assert_same(list(ours.parameters()), train(theirs, b, 5))


@pytest.mark.parametrize("base", BASES)
def test_the_gradient_is_given_back_as_it_was(base):
    model, _ = pair()
    optimizer = E(BASES[base](model.parameters()))
    (model(X) - Y).square().mean().backward()
    before = [(p.grad, p.grad.clone()) for p in model.parameters()]
    for _ in range(2):
        optimizer.step()
        for p, (same, value) in zip(model.parameters(), before, strict=True):
            assert p.grad is same
            assert torch.equal(p.grad, value)


def test_a_base_that_fails_leaves_gradients_and_averages_as_they_were():
    class Fails(torch.optim.SGD):
        broken = False

        def step(self, closure=None):
            if self.broken:
                raise RuntimeError("out of memory")
            return super().step(closure)

    model, _ = pair()
    optimizer = E(Fails(model.parameters(), lr=0.1))
    train(model, optimizer, 2)
    average = {p: optimizer.state[p]["grad_ema"].clone() for p in model.parameters()}
    gradient = {p: p.grad.clone() for p in model.parameters()}
    optimizer.base.broken = True
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    for p in model.parameters():
        assert torch.equal(p.grad, gradient[p])
        assert torch.equal(optimizer.state[p]["grad_ema"], average[p])


@pytest.mark.parametrize("base", BASES)
def test_one_more_tensor_a_parameter(base):
    plain_model, model = pair()
    plain, adapted = BASES[base](plain_model.parameters()), E(BASES[base](model.parameters()))
    train(plain_model, plain, 2)
    train(model, adapted, 2)
    for p, q in zip(plain_model.parameters(), model.parameters(), strict=True):
        assert set(adapted.state[q]) - set(plain.state.get(p, {})) == {"grad_ema"}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_save_load_continue_is_bitwise_equal_to_not_stopping(base, dtype):
    """The authors' E forgets its state here. In bf16 the average stays float32."""
    model = pair()[0].to(dtype)

    def go(model, optimizer):
        for k in range(4):
            for i, p in enumerate(model.parameters()):
                p.grad = (
                    torch.cos(torch.arange(p.numel(), dtype=torch.float32) * (k + i + 1)).reshape(p.shape).to(dtype)
                )
            optimizer.step()

    optimizer = E(BASES[base](model.parameters()))
    go(model, optimizer)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    resumed = copy.deepcopy(model)
    fresh = E(BASES[base](resumed.parameters()), alpha=-1.0, beta1=0.5)  # the checkpoint's values win
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    assert fresh.param_groups is fresh.base.param_groups
    if dtype == torch.bfloat16 and base != "LAMB":
        # torch's optimizers keep bf16 states, so the loaded ones are exact; the average must be too.
        assert all(s["grad_ema"].dtype == torch.float32 for s in fresh.state.values())
    go(model, optimizer)
    go(resumed, fresh)
    assert_same(list(model.parameters()), list(resumed.parameters()))


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies(clone):
    model, _ = pair()
    optimizer = E(torch.optim.Adam(model.parameters()))
    train(model, optimizer, 3)
    model2, optimizer2 = clone((model, optimizer))
    assert_same(train(model, optimizer, 3), train(model2, optimizer2, 3))


def test_schedulers_and_groups_belong_to_both():
    model, _ = pair()
    optimizer = E(torch.optim.SGD(model[0].parameters(), lr=0.1))
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.2, "e_alpha": 0.0})
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train(model, optimizer, 1)
    scheduler.step()
    assert [g["lr"] for g in optimizer.base.param_groups] == [0.05, 0.1]
    assert [g["e_alpha"] for g in optimizer.param_groups] == [-5.0, 0.0]
    assert "grad_ema" in optimizer.state[model[0].weight]
    assert "grad_ema" not in optimizer.state.get(model[2].weight, {})  # alpha 0: nothing to keep
    with pytest.raises(ValueError, match="alpha=500 is out of range"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "e_alpha": 500.0})
    assert len(optimizer.param_groups) == 2


def test_alpha_zero_is_the_base_optimizer():
    ours, theirs = pair()
    adapted = E(torch.optim.Adam(ours.parameters()), alpha=0)
    assert_same(train(ours, adapted, 10), train(theirs, torch.optim.Adam(theirs.parameters()), 10))


# -- for clients of torch.optim ----------------------------------------------------------------------


def test_hooks_fire_once():
    """Those for all optimizers too, around E's step, with the gradient as it was."""
    model, _ = pair()
    optimizer = E(torch.optim.SGD(model.parameters(), lr=0.1))
    (model(X) - Y).square().mean().backward()
    gradient = model[0].weight.grad.clone()
    seen = []

    def hook(name):
        return lambda o, *_: seen.append((name, o is optimizer, torch.equal(model[0].weight.grad, gradient)))

    handles = [
        register_optimizer_step_pre_hook(hook("global pre")),
        register_optimizer_step_post_hook(hook("global post")),
        optimizer.register_step_pre_hook(hook("pre")),
        optimizer.register_step_post_hook(hook("post")),
        optimizer.base.register_step_pre_hook(hook("base")),
    ]
    try:
        optimizer.step()
        expected = [("global pre", True, True), ("pre", True, True), ("base", False, False)]
        expected += [("post", True, True), ("global post", True, True)]
        assert seen == expected
        torch.optim.SGD(model.parameters(), lr=0.1).step()  # hooks for all optimizers are still there
        assert [name for name, *_ in seen[5:]] == ["global pre", "global post"]
    finally:
        for handle in handles:
            handle.remove()


def test_a_class_for_clients_that_take_one():
    ours, theirs = pair()
    made = E.of(torch.optim.AdamW)
    assert made is E.of(torch.optim.AdamW)
    assert issubclass(made, E)
    assert made.__name__ == "EAdamW"
    optimizer = made(ours.parameters(), lr=0.01, weight_decay=0.1, alpha=-2.0, beta1=0.9)
    plain = E(torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.1), alpha=-2.0, beta1=0.9)
    assert_same(train(ours, optimizer, 5), train(theirs, plain, 5))
    for clone in (copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))):
        model, again = clone((ours, optimizer))
        assert type(again) is made
        assert_same(train(model, again, 2), train(*copy.deepcopy((ours, optimizer)), 2))


def test_a_class_of_a_base_with_an_alpha_of_its_own():
    p = nn.Parameter(torch.ones(2))
    optimizer = E.of(torch.optim.RMSprop)([p], lr=0.1, alpha=0.9, e_alpha=-0.5, beta1=0.5)
    (group,) = optimizer.param_groups
    assert (group["alpha"], group["e_alpha"], group["e_beta1"]) == (0.9, -0.5, 0.5)


def test_groups_may_have_the_constructors_names():
    """Frameworks put all options into groups. These were kept there without effect."""
    first, second, third = ({"params": [nn.Parameter(torch.ones(2))]} for _ in range(3))
    groups = [{**first, "alpha": -0.5, "beta1": 0.5}, {**second, "e_beta1": 0.8}]
    by_class = E.of(torch.optim.AdamW)(copy.deepcopy(groups), alpha=-2.0, beta1=0.9)
    by_base = E(torch.optim.AdamW(copy.deepcopy(groups)), alpha=-2.0, beta1=0.9)
    for optimizer in (by_class, by_base):
        optimizer.add_param_group({**third, "alpha": 0})
        assert [group["e_alpha"] for group in optimizer.param_groups] == [-0.5, -2.0, 0.0]
        assert [group["e_beta1"] for group in optimizer.param_groups] == [0.5, 0.8, 0.9]
        assert not any({"alpha", "beta1"} & group.keys() for group in optimizer.param_groups)
        with pytest.raises(ValueError, match="alpha=-200 is out of range"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "alpha": -200})
        optimizer.step()
        optimizer.param_groups[1]["alpha"] = 0.0
        with pytest.raises(ValueError, match="alpha=0.0 was written into a parameter group.*write 'e_alpha' instead"):
            optimizer.step()
    (own,) = E.of(torch.optim.RMSprop)([{**first, "alpha": 0.5, "beta1": 0.3}], e_alpha=-1.0).param_groups
    assert (own["alpha"], own["e_alpha"], own["e_beta1"]) == (0.5, -1.0, 0.3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: E.of(E), "E of E has no meaning"),
        (lambda: E.of(E.of(torch.optim.SGD)), "ESGD is adapted already"),
        (lambda: E.of(torch.nn.Linear), "takes a class of optimizers such as torch.optim.AdamW, got <class"),
        (lambda: E.of("AdamW"), "takes a class of optimizers such as torch.optim.AdamW, got 'AdamW'"),
        (
            lambda: E.of(torch.optim.SGD)([nn.Parameter(torch.ones(1))], momentun=0.9),
            "'momentun' is not a hyperparameter of E of SGD; did you mean 'momentum'",
        ),
        (lambda: E.of(torch.optim.SGD)([nn.Parameter(torch.ones(1))], alpha=-200), "alpha=-200 is out of range"),
    ],
)
def test_a_class_refuses_what_it_cannot_do(make, message):
    with pytest.raises(ValueError, match=message):
        make()
