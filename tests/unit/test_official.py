"""Against the authors' own code, PyPI's ``e-optimizer-adaptor`` 0.1.0 (modules ``ALTO`` and ``E``).

It clips the gradient to norm 1 inside ``step``, keeps a and the previous gradient, and has no eps2 and
eps3; all three are taken into account here, nothing else is.
"""

import copy

import pytest
import torch
from torch import nn

import alto_distributed
from alto_distributed import ALTO, param_groups

official_alto = pytest.importorskip("ALTO")
official_e = pytest.importorskip("E")

STEPS = 120
# |ours - theirs| / |theirs| of a parameter after all steps. Seen here: at most 8e-16 in float64 and 1.1e-6
# in float32, which is rounding.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5}


class Net(nn.Module):
    """A small convolutional network with every kind of parameter the official factory tells apart."""

    def __init__(self):
        super().__init__()
        # No bias before batch norm: its gradient would be rounding noise, which Adam's quotient blows up.
        self.conv, self.bn = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.ln, self.out = nn.LayerNorm(4 * 36), nn.Linear(4 * 36, 10)

    def forward(self, x):
        return self.out(self.ln(torch.relu(self.bn(self.conv(x))).flatten(1)))


def problem(dtype):
    torch.manual_seed(3)
    model = Net().to(dtype)
    x = torch.randn(64, 1, 8, 8, dtype=dtype)
    y = (x.flatten(1) @ torch.randn(64, 10, dtype=dtype)).argmax(1)
    return model, copy.deepcopy(model), x, y


def train(model, optimizer, x, y, *, clip, steps=STEPS):
    losses = []
    for step in range(steps):
        batch = slice(16 * (step % 4), 16 * (step % 4) + 16)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same(ours, theirs, dtype):
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        gap = ((p - q).norm() / q.norm()).item()
        assert gap < TOLERANCE[dtype], f"{name} differs by {gap:.1e}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("alpha_betas", [(-5, (0.99, 0.9, 0.99)), (0.5, (0.01, 0.9, 0.99))], ids=str)
def test_alto(dtype, alpha_betas):
    alpha, betas = alpha_betas
    ours, theirs, x, y = problem(dtype)
    official = official_alto.create_ALTO_optimizer(theirs, 0.01, betas=betas, alpha=alpha, eps=1e-6, weight_decay=1e-2)
    mine = ALTO(param_groups(ours, 1e-2), 0.01, betas, alpha, eps=(1e-6, 0, 0))
    their_losses = train(theirs, official, x, y, clip=False)
    my_losses = train(ours, mine, x, y, clip=True)
    assert my_losses[-1] < my_losses[0] / 2
    assert my_losses == pytest.approx(their_losses, rel=1e-3 if dtype == torch.float32 else 1e-9)
    assert_same(ours, theirs, dtype)
    theirs_kept = sum(t.numel() for s in official.state.values() for t in s.values() if isinstance(t, torch.Tensor))
    ours_kept = sum(s[key].numel() for s in mine.state.values() for key in ALTO.state_keys)
    assert theirs_kept == 2 * ours_kept  # six tensors a parameter against three


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "base",
    [
        pytest.param(lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9), id="ESGD"),
        pytest.param(lambda ps: torch.optim.Adam(ps, lr=1e-3), id="EAdam"),
    ],
)
def test_e(base, dtype):
    ours, theirs, x, y = problem(dtype)
    official = official_e.E(base(theirs.parameters()), alpha=-5, beta=0.99)
    mine = alto_distributed.E(base(ours.parameters()), alpha=-5, beta1=0.99)
    train(theirs, official, x, y, clip=False)
    my_losses = train(ours, mine, x, y, clip=False)
    assert my_losses[-1] < my_losses[0] / 2
    assert_same(ours, theirs, dtype)
