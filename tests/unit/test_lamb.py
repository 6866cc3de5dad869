"""LAMB under its own name, against the formulas of the LAMBs that people come from.

DeepSpeed's runs on GPUs alone, so its formula is written out here, from csrc/lamb/fused_lamb_cuda_kernel.cu of
DeepSpeed 0.19.8. pytorch_optimizer's and timm's run.
"""

import importlib
import math
import subprocess
import sys
import types

import pytest
import torch
from pytorch_optimizer import Lamb
from torch import nn

from alto_distributed import ALTO, LAMB, param_groups
from scripts import matrix

TIMM = "1.0.31"


class Formula:
    """One parameter, in float64, with what differs between implementations as options."""

    def __init__(self, p, lr, betas, eps, decay, clip=None, correct="moments"):
        self.p, self.lr, self.betas, self.eps, self.decay = p.clone(), lr, betas, eps, decay
        self.clip, self.correct = clip, correct
        self.m, self.v, self.k = torch.zeros_like(p), torch.zeros_like(p), 0

    def step(self, g):
        b1, b2 = self.betas
        self.k += 1
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g * g
        bc1, bc2 = 1 - b1**self.k, 1 - b2**self.k
        lr, m, v = self.lr, self.m, self.v
        if self.correct == "moments":  # timm, apex, the paper
            m, v = m / bc1, v / bc2
        elif self.correct == "rate":  # DeepSpeed: after the ratio
            lr = lr * math.sqrt(bc2) / bc1
        update = m / (v.sqrt() + self.eps) + self.decay * self.p
        ratio = 1.0
        if self.p.norm() > 0 and update.norm() > 0:
            ratio = (self.p.norm() / update.norm()).item()
            if self.clip is not None:
                ratio = min(max(ratio, self.clip[0]), self.clip[1])
        self.p = self.p - lr * ratio * update
        return self.p


def gradients(shape, steps=30):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) * (k % 5 + 1) for k in range(steps)]


def start(*shape):
    return torch.linspace(-2, 3, math.prod(shape), dtype=torch.float64).reshape(shape) / 3


def follow(optimizer, p, formula, rate=None):
    for k, g in enumerate(gradients(p.shape), 1):
        if rate is not None:
            optimizer.param_groups[0]["lr"] = rate(k)
        p.grad = g.clone()
        optimizer.step()
        torch.testing.assert_close(p.detach(), formula.step(g), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("clip", [None, (0.01, 10.0), (0.0, 0.3), (2.0, math.inf)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_papers_formula(decay, clip):
    """Also apex's with use_nvlamb=True."""
    p = nn.Parameter(start(6, 5))
    optimizer = LAMB([{"params": [p], "decayed": True}], lr=0.02, weight_decay=decay, trust_clip=clip)
    follow(optimizer, p, Formula(p.detach(), 0.02, (0.9, 0.999), 1e-6, decay, clip))


@pytest.fixture(scope="module")
def timms():
    """timm's Lamb, from its wheel. The rest of timm needs torchvision, so its packages are not imported."""
    try:
        folder = matrix.install("timm", TIMM) / "timm"
    except subprocess.CalledProcessError as error:
        pytest.skip(f"pip cannot install timm {TIMM} here: {error}")
    for name, path in (("timm", folder), ("timm.optim", folder / "optim")):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(path)]
    yield importlib.import_module("timm.optim.lamb").Lamb
    for name in [name for name in sys.modules if name.split(".")[0] == "timm"]:
        del sys.modules[name]


@pytest.mark.parametrize("trust_clip", [False, True])
@pytest.mark.parametrize(("decay", "always_adapt"), [(0.0, False), (0.02, False), (0.0, True), (0.02, True)])
def test_timms(timms, decay, always_adapt, trust_clip):
    """By default it adapts decayed parameters alone. Its trust_clip is an upper limit of 1."""
    shapes = ((6, 5), (7,))
    ours, theirs = ([nn.Parameter(start(*shape) * 30) for shape in shapes] for _ in range(2))
    other = timms(
        theirs, lr=0.02, weight_decay=decay, max_grad_norm=None, always_adapt=always_adapt, trust_clip=trust_clip
    )
    groups = [
        {"params": ours, "weight_decay": decay, **({"decayed": True} if always_adapt else {})},
        {"params": [nn.Parameter(start(2))], "weight_decay": 0.02},  # some group has decay
    ]
    optimizer = LAMB(groups, lr=0.02, trust_clip=(0.0, 1.0) if trust_clip else None)
    for gs in zip(*(gradients(shape) for shape in shapes), strict=True):
        for p, q, g in zip(ours, theirs, gs, strict=True):
            p.grad, q.grad = g.clone(), g.clone()
        optimizer.step()
        other.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("bias_correction", [True, False])
def test_deepspeeds_formula(bias_correction):
    """With bias_correction it scales the rate, after the ratio: a factor on lr does that."""
    p = nn.Parameter(start(6, 5) / 100)
    b1, b2 = betas = (0.9, 0.999)

    def rate(k):
        return 0.01 * (math.sqrt(1 - b2**k) / (1 - b1**k) if bias_correction else 1.0)

    options = {"betas": betas, "eps": 1e-8, "weight_decay": 0.01, "trust_clip": (0.01, 10.0), "bias_correction": False}
    formula = Formula(
        p.detach(), 0.01, betas, 1e-8, 0.01, (0.01, 10.0), correct="rate" if bias_correction else "nothing"
    )
    follow(LAMB([p], lr=0.01, **options), p, formula, rate)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_pytorch_optimizers(decay):
    """Its rate is divided by 1 - beta1^k, its ratio has an eps, and it limits |theta| to 10, which is not reached."""
    ours, theirs = (nn.Parameter(start(6, 5)) for _ in range(2))
    options = {"betas": (0.9, 0.99), "weight_decay": decay}
    other = Lamb([theirs], lr=0.01, weight_decouple=False, eps=1e-9, foreach=False, **options)
    optimizer = LAMB([{"params": [ours], "decayed": True}], eps=1e-9, bias_correction=False, **options)
    assert theirs.norm() < 9
    for k, g in enumerate(gradients(ours.shape), 1):
        optimizer.param_groups[0]["lr"] = 0.01 / (1 - 0.9**k)
        ours.grad, theirs.grad = g.clone(), g.clone()
        optimizer.step()
        other.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


def test_it_is_alto_with_alpha_0_and_loads_its_checkpoints():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    other = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    other.load_state_dict(model.state_dict())
    optimizer = LAMB(param_groups(model), lr=0.01, weight_decay=0.1)
    plain = ALTO(param_groups(other), lr=0.01, betas=(0.99, 0.9, 0.999), alpha=0, eps=(1e-6, 0, 0), weight_decay=0.1)
    for k in range(6):
        for m, o in ((model, optimizer), (other, plain)):
            o.zero_grad()
            m(torch.ones(2, 4)).square().sum().backward()
            o.step()
        if k == 2:
            one, two = optimizer.state_dict(), plain.state_dict()
            optimizer, plain = LAMB(param_groups(model)), ALTO(param_groups(other))
            optimizer.load_state_dict(two)
            plain.load_state_dict(one)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        assert set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"}
    added = nn.Parameter(torch.ones(2, 2))
    optimizer.add_param_group({"params": [added], "betas": (0.8, 0.9), "eps": 1e-8})
    assert (optimizer.param_groups[-1]["betas"], optimizer.param_groups[-1]["eps"]) == ((0.99, 0.8, 0.9), (1e-8, 0, 0))


def test_groups_stay_lambs_in_mid_run():
    """alpha=-5 made a grad_ema, and eps=1e-3 brought back ALTO's eps2 and eps3."""
    p = nn.Parameter(torch.ones(2, 2))
    p.grad = torch.ones(2, 2)
    optimizer = LAMB([p])
    optimizer.step()
    (group,) = optimizer.param_groups
    group["eps"] = 1e-3
    optimizer.step()
    assert group["eps"] == (1e-3, 0.0, 0.0)
    for name, value, message in (("alpha", -5.0, "alpha=-5.0 is not LAMB's"), ("layerwise", "all", "layerwise='all'")):
        saved, kept = optimizer.state_dict(), group[name]
        group[name] = value
        with pytest.raises(ValueError, match=message):
            optimizer.step()
        group[name] = kept
        saved["param_groups"][0][name] = value
        if name == "layerwise":
            with pytest.raises(ValueError, match=message):
                optimizer.load_state_dict(saved)
    assert set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"}
    alto = ALTO([p])
    alto.step()
    with pytest.raises(ValueError, match="alpha=-5.0 is not LAMB's"):
        optimizer.load_state_dict(alto.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -5.0}, "'alpha' is not a hyperparameter of LAMB"),
        ({"max_coeff": 10.0}, "did you mean 'trust_clip'"),
        ({"layerwise": "all"}, 'write "decayed": True into a group'),
        ({"trust_clip": 10.0}, r"trust_clip=10.0 must be None or two numbers, \(low, high\)"),
        ({"trust_clip": (2.0, 1.0)}, r"low is above high; write \(1, 2\)"),
        ({"trust_clip": (-1.0, 1.0)}, r"trust_clip\[0\] \(low\)=-1.0 is out of range"),
        ({"betas": (0.9, 1.0)}, r"betas\[2\] \(beta3\)=1.0 is out of range"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        LAMB([nn.Parameter(torch.ones(2, 2))], **options)
    with pytest.raises(ValueError, match="alpha=-1.0 is not LAMB's"):
        LAMB([{"params": [nn.Parameter(torch.ones(2, 2))], "alpha": -1.0}])
