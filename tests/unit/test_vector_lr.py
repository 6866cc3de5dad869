"""``vector_lr`` and ``embeddings="adam"``: who goes without the ratio, and at which rate."""

import copy

import pytest
import torch
from torch import nn

from alto_distributed import ALTO, LAMB, param_groups
from scripts import launches
from tests.helpers.oracle import PaperALTO

HYPER = {"lr": 0.05, "betas": (0.99, 0.9, 0.99), "alpha": -5.0, "eps": (1e-6, 1e-6, 1e-10), "weight_decay": 1e-2}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.up, self.head = nn.Linear(4, 5), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def network():
    torch.manual_seed(3)
    model = Net().double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.rand_like(p))
    return model


def without_ratio(mode, name, p):
    if mode == "embeddings":
        return p.ndim < 2 or name == "embed.weight"
    return {"decayed": p.ndim < 2, "matrices": p.ndim < 2, "all": False, "none": True}[mode]


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("mode", ["decayed", "matrices", "all", "none", "embeddings"])
def test_what_has_no_ratio_has_the_factor(mode, kernel):
    """And nothing else, in every mode and under a schedule, whose rate stays in the groups."""
    model = network()
    groups = param_groups(model, 1e-2, embeddings="adam" if mode == "embeddings" else "ratio")
    layerwise = "decayed" if mode == "embeddings" else mode
    optimizer = ALTO(groups, **HYPER, layerwise=layerwise, vector_lr=0.3, kernel=kernel, diagnostics_every=1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (k + 1))
    oracles = {
        name: PaperALTO(
            p,
            **{**HYPER, "weight_decay": 1e-2 if p.ndim > 1 else 0.0},
            ratio=not without_ratio(mode, name, p),
            one_at_zero=mode != "all",
        )
        for name, p in model.named_parameters()
    }
    for k in range(4):
        torch.manual_seed(k)
        for name, p in model.named_parameters():
            p.grad = torch.randn_like(p)
            oracle = oracles[name]
            oracle.lr = 0.05 / (k + 1) * (0.3 if without_ratio(mode, name, p) else 1.0)
            oracle.step(p.grad)
        assert {group["lr"] for group in optimizer.param_groups} == {0.05 / (k + 1)}
        optimizer.step()
        schedule.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), oracles[name].theta, rtol=1e-12, atol=1e-13)
    for name, reading in optimizer.diagnostics().items():  # the ratio, and not the factor
        assert (reading.trust_ratio == 1) is without_ratio(mode, name, dict(model.named_parameters())[name])


def test_groups_may_have_factors_and_rates_of_their_own():
    p, q = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    groups = [{"params": [p], "vector_lr": 0.1, "lr": 0.2}, {"params": [q]}]
    optimizer = ALTO(groups, lr=0.4, layerwise="matrices")
    p.grad = q.grad = torch.ones(3, dtype=torch.float64)
    optimizer.step()
    torch.testing.assert_close((1 - p) / 0.02, (1 - q) / 0.4)
    optimizer.param_groups[0]["vector_lr"] = 0.0
    before = p.detach().clone()
    optimizer.step()
    assert torch.equal(p, before)


def test_lamb_has_it_too():
    model = network()
    lamb, alto = (copy.deepcopy(model) for _ in range(2))
    one = LAMB(param_groups(lamb), lr=0.1, betas=(0.8, 0.99), vector_lr=0.2)
    other = ALTO(param_groups(alto), 0.1, (0.99, 0.8, 0.99), 0.0, (1e-6, 0, 0), 0.01, vector_lr=0.2)
    for optimizer, net in ((one, lamb), (other, alto)):
        for p in net.parameters():
            p.grad = torch.full_like(p, 0.5)
        optimizer.step()
    for p, q, start in zip(lamb.parameters(), alto.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)
        assert not torch.equal(p, start)


def test_it_is_in_checkpoints_and_an_old_one_goes_on_without():
    model = network()
    optimizer = ALTO(param_groups(model, embeddings="adam"), vector_lr=0.3)
    saved = optimizer.state_dict()
    fresh = ALTO(param_groups(model))
    with pytest.raises(ValueError, match="the checkpoint has parameter groups of"):
        fresh.load_state_dict(saved)
    fresh = ALTO(param_groups(model, embeddings="adam"))
    fresh.load_state_dict(saved)
    assert [g["vector_lr"] for g in fresh.param_groups] == [0.3] * 3
    assert [g["layerwise"] for g in fresh.param_groups] == ["decayed", "none", "decayed"]
    for group in saved["param_groups"]:
        del group["vector_lr"]
    fresh.load_state_dict(saved)
    assert [g["vector_lr"] for g in fresh.param_groups] == [1.0] * 3


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "0.3", None, True])
def test_a_factor_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match="vector_lr="):
        ALTO([nn.Parameter(torch.ones(2))], vector_lr=value)


def test_embeddings_are_told_by_their_layers():
    model = network()
    decayed, embedded, undecayed = param_groups(model, 0.1, embeddings="adam", vector_lr=0.2)
    assert decayed["param_names"] == ["up.weight"]
    assert embedded["param_names"] == ["embed.weight"]  # the tied head is the same parameter
    assert undecayed["param_names"] == ["norm.weight", "norm.bias", "up.bias"]
    assert [group["weight_decay"] for group in (decayed, embedded, undecayed)] == [0.1, 0.1, 0.0]
    assert [group["vector_lr"] for group in (decayed, embedded, undecayed)] == [0.2] * 3
    assert len(param_groups(model)) == 2
    assert "vector_lr" not in param_groups(model)[0]


def test_rules_for_embeddings_that_cannot_be_kept_are_refused():
    model = network()
    with pytest.raises(ValueError, match=r"embeddings='adm' is not one of 'ratio', 'adam'; did you mean 'adam'\?"):
        param_groups(model, embeddings="adm")
    with pytest.raises(ValueError, match="needs the module"):
        param_groups(model.named_parameters(), embeddings="adam")


def test_it_costs_one_launch_and_no_copy_from_the_host():
    """A step on an accelerator, counted on meta tensors, which cannot be read or filled from the host."""
    counts, copied = {}, []
    for factor in (1.0, 0.3):
        params = [nn.Parameter(torch.empty(4, 3, device="meta")), nn.Parameter(torch.empty(4, device="meta"))]
        groups = [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.0}]
        optimizer = ALTO(groups, vector_lr=factor, kernel="torch")
        for k in range(3):
            for p in params:
                p.grad = torch.empty_like(p)
            with launches.Counting() as counted:
                optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.1 / (k + 1)
                optimizer.step()
            copied.append(optimizer._plan()[0]._factors)
        counts[factor] = counted.launches
    assert copied[:3] == [None] * 3
    assert copied[3] is copied[4] is copied[5]  # copied to the device once
    assert counts[0.3] == counts[1.0] + 1, counts
