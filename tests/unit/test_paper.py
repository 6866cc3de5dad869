"""ALTO against the paper: by hand, by a float64 oracle in the paper's own form, and by its reductions."""

import math

import pytest
import torch
from torch import nn

from alto_distributed import ALTO, param_groups, recipe
from tests.helpers.oracle import PaperALTO

EPS = (1e-6, 1e-6, 1e-10)


def trained(theta, gradients, **hyper):
    """``theta`` after ALTO has seen the gradients, one a step."""
    p = nn.Parameter(theta.clone())
    optimizer = ALTO([p], **hyper)
    for g in gradients:
        p.grad = g.clone().to(p.dtype)
        optimizer.step()
    return p.detach(), optimizer


@pytest.mark.parametrize("kernel", ["torch", "reference"])
def test_two_steps_by_hand(kernel):
    """Numbers worked out on paper, with betas (1/2, 1/2, 3/4), alpha -1, every eps 0.

    Step 1, theta (3, 4), g (2, -4): a = (1, -2), d = (1, -2), m = (1/2, -1), v = (1/4, 1), corrected
    (1, -2) and (1, 4), so r = (1, -1). |theta| = 5, |r| = sqrt 2; with lr = sqrt(2)/5 theta = (2, 5).
    Step 2, g (4, -4): a = (1.5, -1), d = (2.5, -3), m = (1.5, -2), v = (1.75, 3), corrected by 3/4 and
    7/16 to (2, -8/3) and (4, 48/7), so r = (1, -8/3 * sqrt(7/48)).
    """
    lr = math.sqrt(2) / 5
    hyper = dict(lr=lr, betas=(0.5, 0.5, 0.75), alpha=-1.0, eps=(0, 0, 0), weight_decay=0.0, layerwise="all")
    theta, g1, g2 = (torch.tensor(x, dtype=torch.float64) for x in ([3.0, 4.0], [2.0, -4.0], [4.0, -4.0]))

    one, optimizer = trained(theta, [g1], kernel=kernel, **hyper)
    torch.testing.assert_close(one, torch.tensor([2.0, 5.0], dtype=torch.float64), rtol=1e-15, atol=0)
    (state,) = optimizer.state.values()
    assert state["exp_avg"].tolist() == [0.5, -1.0]
    assert state["exp_avg_sq"].tolist() == [0.25, 1.0]
    assert state["grad_ema"].tolist() == [1.0, -2.0]  # u_1 = (1-b1) g_1

    two, optimizer = trained(theta, [g1, g2], kernel=kernel, **hyper)
    (state,) = optimizer.state.values()
    assert state["exp_avg"].tolist() == [1.5, -2.0]
    assert state["exp_avg_sq"].tolist() == [1.75, 3.0]
    assert state["grad_ema"].tolist() == [2.5, -3.0]  # u_2 - u_1 is a_2 = (1.5, -1)
    r = torch.tensor([1.0, -8 / 3 * math.sqrt(7 / 48)], dtype=torch.float64)
    expected = torch.tensor([2.0, 5.0], dtype=torch.float64) - lr * r * math.sqrt(29) / r.norm()
    torch.testing.assert_close(two, expected, rtol=1e-14, atol=0)


SETTINGS = {
    "large batch": dict(alpha=-5.0, betas=(0.99, 0.9, 0.99)),
    "small batch": dict(alpha=0.5, betas=(0.01, 0.9, 0.99)),
    "near the bound": dict(alpha=-99.0, betas=(0.99, 0.9, 0.99)),
    "LAMB": dict(alpha=0.0, betas=(0.99, 0.9, 0.99)),
    "memoryless": dict(alpha=-0.5, betas=(0.0, 0.0, 0.0)),
}


@pytest.mark.parametrize("layerwise", ["decayed", "all", "none"])
@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("setting", SETTINGS)
def test_float64_equals_the_papers_two_tensor_form(setting, debias, layerwise):
    """300 steps: the single average u stands for a and g_{k-1} to the last digits."""
    hyper = dict(lr=0.03, weight_decay=0.02, eps=EPS, **SETTINGS[setting])
    theta = torch.randn(7, 3, dtype=torch.float64)
    oracle = PaperALTO(theta, ratio=layerwise != "none", one_at_zero=layerwise != "all", debias=debias, **hyper)
    p = nn.Parameter(theta.clone())
    optimizer = ALTO([p], layerwise=layerwise, bias_correction=debias, **hyper)
    for _ in range(300):
        p.grad = torch.randn(7, 3, dtype=torch.float64)
        expected = oracle.step(p.grad)
        optimizer.step()
        torch.testing.assert_close(p.detach(), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kernel", ["torch", "reference"])
def test_float32_stays_within_rounding_of_float64(kernel):
    hyper = dict(lr=0.01, weight_decay=1e-4, eps=EPS, **SETTINGS["large batch"])
    theta = torch.randn(200, 300)
    gradients = [torch.randn(200, 300) for _ in range(20)]
    oracle = PaperALTO(theta, **hyper)
    for g in gradients:
        expected = oracle.step(g)
    got, _ = trained(theta, gradients, kernel=kernel, **hyper)
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)


def test_the_kernels_agree_over_many_chunks():
    """More elements than a chunk, a length that does not divide it, several parameters and groups."""
    from alto_distributed.kernels.chunked import CPU_CHUNK

    shapes = [(2 * CPU_CHUNK + 77,), (3, CPU_CHUNK // 2), (5,), ()]
    thetas = [torch.randn(s, dtype=torch.float64) for s in shapes]
    results = []
    for kernel in ("torch", "reference"):
        torch.manual_seed(7)
        ps = [nn.Parameter(t.clone()) for t in thetas]
        optimizer = ALTO([{"params": ps[:2]}, {"params": ps[2:], "weight_decay": 0.0, "alpha": 0.0}], kernel=kernel)
        for _ in range(3):
            for p in ps:
                p.grad = torch.randn_like(p)
            optimizer.step()
        results.append(ps)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15)


def test_alpha_zero_is_an_independent_lamb():
    """pytorch_optimizer's Lamb: no bias correction of the moments, decay inside the update, its eps in both
    places; adam_debias=True turns off the division of its learning rate by 1 - beta^k."""
    from pytorch_optimizer import Lamb

    torch.set_default_dtype(torch.float64)
    try:
        ours, theirs = (nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1)) for _ in range(2))
        theirs.load_state_dict(ours.state_dict())
        eps = 1e-12
        a = ALTO(ours.parameters(), 0.02, alpha=0, eps=(eps, 0, 0), weight_decay=0.01, bias_correction=False)
        options = dict(weight_decay=0.01, weight_decouple=False, adam_debias=True)
        b = Lamb(theirs.parameters(), 0.02, betas=(0.9, 0.99), eps=eps, **options)
        x = torch.randn(32, 6)
        y = x.prod(1, keepdim=True)
        for _ in range(120):
            for model, optimizer in ((ours, a), (theirs, b)):
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                optimizer.step()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert p.norm() < 10  # where Lamb would begin to clamp
            torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10)
        assert all("grad_ema" not in state for state in a.state.values())
    finally:
        torch.set_default_dtype(torch.float32)


def test_without_alpha_and_ratio_it_is_adam_with_the_decay_inside_r():
    """r = Adam's step + wd*theta, so AdamW with the same decay is the same update."""
    theta = torch.randn(20, 3, dtype=torch.float64)
    gradients = [torch.randn_like(theta) for _ in range(100)]
    got, _ = trained(theta, gradients, lr=1e-2, alpha=0, layerwise="none", eps=1e-8, weight_decay=0.1)
    q = nn.Parameter(theta.clone())
    adamw = torch.optim.AdamW([q], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for g in gradients:
        q.grad = g.clone()
        adamw.step()
    torch.testing.assert_close(got, q.detach(), rtol=1e-12, atol=1e-14)


class TestWhichParametersGetTheRatio:
    """shared/alto.md, "Which parameters get the layer-wise ratio"."""

    hyper = dict(lr=0.1, betas=(0.99, 0.9, 0.99), alpha=-5.0, eps=EPS)

    def both(self, theta, *, ratio, one_at_zero=True, weight_decay=0.0, **options):
        g = torch.randn_like(theta)
        got, _ = trained(theta, [g], weight_decay=weight_decay, **self.hyper, **options)
        oracle = PaperALTO(theta, weight_decay=weight_decay, ratio=ratio, one_at_zero=one_at_zero, **self.hyper)
        torch.testing.assert_close(got, oracle.step(g), rtol=1e-12, atol=1e-14)

    def test_decayed(self):
        self.both(torch.randn(5, dtype=torch.float64), weight_decay=0.1, ratio=True)
        p, q = (nn.Parameter(torch.randn(4, 4, dtype=torch.float64)) for _ in range(2))
        before = q.detach().clone()
        optimizer = ALTO([{"params": [p]}, {"params": [q], "weight_decay": 0.0}], **self.hyper)
        p.grad, q.grad = torch.randn_like(p), torch.randn_like(q)
        optimizer.step()
        oracle = PaperALTO(before, weight_decay=0.0, ratio=False, **self.hyper)
        torch.testing.assert_close(q.detach(), oracle.step(q.grad), rtol=1e-12, atol=1e-14)

    def test_matrices_whatever_their_decay(self):
        self.both(torch.randn(3, 4, dtype=torch.float64), layerwise="matrices", ratio=True)
        self.both(torch.randn(12, dtype=torch.float64), layerwise="matrices", ratio=False)
        self.both(torch.randn(12, dtype=torch.float64), layerwise="matrices", weight_decay=0.1, ratio=False)

    def test_all_is_the_formula_to_the_letter(self):
        self.both(torch.randn(12, dtype=torch.float64), layerwise="all", ratio=True, one_at_zero=False)
        zero = torch.zeros(12, dtype=torch.float64)
        got, _ = trained(zero, [torch.ones_like(zero)], layerwise="all", weight_decay=0.0, **self.hyper)
        assert 0 < got.abs().max() < 1e-10  # a zero-initialized bias hardly moves: its ratio is about eps3

    def test_a_norm_of_zero_gives_ratio_one(self):
        zero = torch.zeros(3, 4, dtype=torch.float64)
        self.both(zero, weight_decay=0.1, ratio=False)
        self.both(zero, layerwise="matrices", ratio=False)
        theta = torch.randn(5, dtype=torch.float64)
        got, _ = trained(
            theta, [torch.zeros(5)], weight_decay=0.0, layerwise="all", **{**self.hyper, "eps": (1e-6, 0, 0)}
        )
        torch.testing.assert_close(got, theta, rtol=0, atol=0)  # |r| = 0 and eps2 = 0: no step, not NaN

    def test_a_groups_intent_outweighs_a_decay_that_is_zero_today(self):
        p = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        oracle = PaperALTO(p, weight_decay=0.0, ratio=True, **self.hyper)
        optimizer = ALTO([{"params": [p], "weight_decay": 0.0, "decayed": True}], **self.hyper)
        p.grad = torch.randn_like(p)
        optimizer.step()
        torch.testing.assert_close(p.detach(), oracle.step(p.grad), rtol=1e-12, atol=1e-14)

    def test_no_decay_anywhere_warns_once_and_names_the_other_settings(self):
        p = nn.Parameter(torch.randn(3, 3))
        with pytest.warns(UserWarning, match=r'layerwise="matrices" or "all"') as caught:
            optimizer = ALTO([p], weight_decay=0)
            p.grad = torch.ones_like(p)
            optimizer.step()
            optimizer.step()
        assert len(caught) == 1

    @pytest.mark.parametrize("layerwise", ["matrices", "all", "none"])
    def test_the_other_settings_do_not_warn(self, layerwise, recwarn):
        ALTO([nn.Parameter(torch.randn(3, 3))], weight_decay=0, layerwise=layerwise)
        ALTO([nn.Parameter(torch.randn(3, 3))])
        assert not recwarn.list


class TestRecipe:
    def test_paper_values(self):
        large, small = recipe(1024), recipe(1023)
        assert recipe(4096) == large
        assert large["lr"] == 1e-2
        assert (large["alpha"], large["betas"]) == (-5.0, (0.99, 0.9, 0.99))
        assert (small["alpha"], small["betas"]) == (0.5, (0.01, 0.9, 0.99))
        assert "lr" not in small  # the paper tunes it
        for r in (large, small):
            assert r["eps"] == (1e-6, 1e-6, 1e-10)
            assert r["weight_decay"] == 1e-4

    def test_the_large_one_is_the_packages_default(self):
        p = nn.Parameter(torch.zeros(2, 2))
        assert ALTO([p], **recipe(4096)).defaults == ALTO([p]).defaults
        ALTO([p], lr=1e-3, **recipe(128))

    @pytest.mark.parametrize("bad", [0, -1, 2.5, "4096", True, None])
    def test_bad_batch_sizes(self, bad):
        with pytest.raises(ValueError, match="global_batch_size"):
            recipe(bad)


class TestParamGroups:
    def model(self):
        m = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm((3, 4)), nn.BatchNorm1d(3), nn.Linear(4, 7))
        m[4].weight = m[0].weight  # tied
        m[1].weight.requires_grad_(False)
        m.table_bias = nn.Parameter(torch.zeros(2, 2))
        return m

    def test_split(self):
        m = self.model()
        decayed, undecayed = param_groups(m, weight_decay=0.3)
        assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.3, 0.0)
        name = {id(p): n for n, p in m.named_parameters()}
        assert [name[id(p)] for p in decayed["params"]] == ["0.weight"]
        # A LayerNorm over two dimensions has a two-dimensional weight: it is a norm layer all the same.
        assert {name[id(p)] for p in undecayed["params"]} == {
            "table_bias", "1.bias", "2.weight", "2.bias", "3.weight", "3.bias", "4.bias",
        }  # fmt: skip

    def test_named_parameters_and_empty_groups(self):
        m = nn.Linear(3, 3)
        assert [len(g["params"]) for g in param_groups(m.named_parameters())] == [1, 1]
        assert [g["weight_decay"] for g in ALTO(param_groups([("w", m.weight)])).param_groups] == [1e-4]

    def test_the_optimizers_weight_decay_holds_unless_the_groups_were_given_one(self):
        """``ALTO(param_groups(m), weight_decay=0.1)`` trained with 1e-4, which the groups had brought along."""
        m = nn.Linear(3, 3)
        for given, options, expected in (
            ({}, {}, 1e-4),
            ({}, {"weight_decay": 0.1}, 0.1),
            ({}, {**recipe(4096), "weight_decay": 0.1}, 0.1),
            ({}, recipe(4096), 1e-4),
            ({"weight_decay": 0.3}, {"weight_decay": 0.1}, 0.3),
        ):
            optimizer = ALTO(param_groups(m, **given), **options)
            assert [g["weight_decay"] for g in optimizer.param_groups] == [expected, 0.0]

    def test_bare_parameters_are_refused(self):
        with pytest.raises(ValueError, match="named_parameters"):
            param_groups(nn.Linear(3, 3).parameters())


# -- zero gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["auto", "torch", "reference"])
@pytest.mark.parametrize("layerwise", ["decayed", "matrices", "all", "none"])
def test_a_parameter_without_gradient_signal_keeps_its_weights(layerwise, kernel):
    """After 20 ordinary steps, 300 steps with zeros grew a weight's norm 11.7 times. Under "none" a step is AdamW's."""
    hyper = dict(lr=0.03, weight_decay=0.02, eps=EPS, betas=(0.99, 0.9, 0.99), alpha=-5.0)
    params = [nn.Parameter(torch.randn(8, 5)), nn.Parameter(torch.randn(5))]
    ratios = [layerwise != "none", layerwise in ("decayed", "all")]
    oracles = [
        PaperALTO(p, ratio=ratio, one_at_zero=layerwise != "all", zero_stays=layerwise != "none", **hyper)
        for p, ratio in zip(params, ratios, strict=True)
    ]
    optimizer = ALTO(params, layerwise=layerwise, kernel=kernel, **hyper)
    for k in range(60):
        before = [p.detach().clone() for p in params]
        for p, oracle in zip(params, oracles, strict=True):
            p.grad = torch.randn_like(p) if k < 20 else torch.zeros_like(p)
            expected = oracle.step(p.grad)
        optimizer.step()
        torch.testing.assert_close(params[-1].detach().double(), expected, rtol=1e-3, atol=1e-4)
        for p, old in zip(params, before, strict=True):
            assert torch.equal(p, old) == (k >= 20 and layerwise != "none"), k
    for p, oracle in zip(params, oracles, strict=True):
        torch.testing.assert_close(p.detach().double(), oracle.theta, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(optimizer.state[p]["exp_avg"].double(), oracle.m, rtol=1e-3, atol=1e-6)
