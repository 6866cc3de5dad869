"""Diagnostics: what they say is what the step did, and they cost nothing when off."""

import copy

import pytest
import torch
from torch import nn

from alto_distributed import ALTO, LogicalParameter, ShardLayout, param_groups
from alto_distributed.diagnostics import Diagnostics
from tests.helpers.oracle import PaperALTO

HYPER = dict(lr=0.1, betas=(0.99, 0.9, 0.99), alpha=-5.0, eps=(1e-6, 1e-6, 1e-10))


def test_readings_are_those_of_the_paper():
    model = nn.Linear(5, 3).double()
    named = list(model.named_parameters())
    groups = [{"params": named[:1], "weight_decay": 0.01}, {"params": named[1:], "weight_decay": 0.0}]
    optimizer = ALTO(groups, diagnostics_every=3, **HYPER)
    oracles = {
        "weight": PaperALTO(model.weight, weight_decay=0.01, **HYPER),
        "bias": PaperALTO(model.bias, weight_decay=0.0, ratio=False, **HYPER),
    }
    for k in range(1, 7):
        expected = {}
        for name, p in named:
            p.grad = torch.randn_like(p)
            oracle, before = oracles[name], p.detach().clone()
            step = (before - oracle.step(p.grad)).norm().item()
            m_hat, v_hat = oracle.m / (1 - 0.9**k), oracle.v / (1 - 0.99**k)
            r = (m_hat / (v_hat.sqrt() + 1e-6) + oracle.wd * before).norm().item()
            share = (5 * oracle.a.norm() / p.grad.norm()).item()
            expected[name] = (step / (0.1 * r), before.norm().item(), r, share)
        optimizer.step()
        assert optimizer.has_new_diagnostics() == (k % 3 == 0)
        if k % 3 == 0:
            readings = optimizer.diagnostics()
            assert not optimizer.has_new_diagnostics()
            assert readings.keys() == {"weight", "bias"}
            for name, reading in readings.items():
                assert tuple(reading) == pytest.approx(expected[name], rel=1e-9)
            assert readings["bias"].trust_ratio == 1.0


def test_off_by_default_and_not_copied():
    p = nn.Parameter(torch.randn(3, 3))
    p.grad = torch.randn(3, 3)
    off, on = ALTO([p]), ALTO([p], diagnostics_every=1)
    off.step()
    assert off.diagnostics() == {}
    on.step()
    assert set(on.diagnostics()) == {"parameter 0 of group 0"}
    assert copy.deepcopy(on).diagnostics() == {}


def test_parameters_have_their_names():
    """A reading of "param_groups[0][0]" told nobody which parameter it was."""
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    for groups in (param_groups(model), list(model.named_parameters()), [{"params": list(model.named_parameters())}]):
        optimizer = ALTO(groups, diagnostics_every=1)
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        assert set(optimizer.diagnostics()) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    optimizer = ALTO(param_groups(model), diagnostics_every=1)
    added = nn.Parameter(torch.ones(2))
    added.grad = torch.ones(2)
    optimizer.add_param_group({"params": added})  # without a name
    optimizer.step()
    assert "parameter 0 of group 2" in optimizer.diagnostics()
    with pytest.raises(ValueError, match="two parameters have the name 'w'"):
        param_groups([("w", nn.Parameter(torch.ones(1))), ("w", nn.Parameter(torch.ones(1)))])


def test_measuring_changes_nothing():
    results = []
    for every in (0, 1):
        torch.manual_seed(3)
        p = nn.Parameter(torch.randn(30, 4))
        optimizer = ALTO([p], diagnostics_every=every)
        for _ in range(5):
            p.grad = torch.randn_like(p)
            optimizer.step()
        results.append(p.detach())
    assert torch.equal(*results)


def test_lamb_has_no_acceleration():
    p = nn.Parameter(torch.randn(3, 3))
    p.grad = torch.randn(3, 3)
    optimizer = ALTO([p], alpha=0, diagnostics_every=1)
    optimizer.step()
    assert optimizer.diagnostics()["parameter 0 of group 0"].acceleration == 0.0


@pytest.mark.parametrize("bad", [-1, 1.5, "10", True, None])
def test_bad_intervals(bad):
    with pytest.raises(ValueError, match="diagnostics_every=.* must be a whole number of steps"):
        ALTO([nn.Parameter(torch.ones(2))], diagnostics_every=bad)


def test_a_rank_that_only_joins_cannot_measure():
    optimizer = ALTO([{"params": []}], diagnostics_every=5)
    with pytest.raises(ValueError, match="needs a tensor on every rank"):
        optimizer.set_layouts({}, joined=[LogicalParameter("w", (2, 2))])
    p = nn.Parameter(torch.ones(4))
    p.grad = torch.ones(4)
    optimizer.add_param_group({"params": [p]})
    optimizer.set_layouts({p: ShardLayout.whole(LogicalParameter("w", (2, 2)), 4)})
    assert not Diagnostics(5).due(0)
