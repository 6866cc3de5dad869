"""The study of recipes: tuning finds the best, no run is run twice, and wrong norms are wrong as they say they are."""

import json
import math

import pytest
import torch
from torch import nn

from alto_distributed import ALTO
from scripts.evidence.paired import paired
from scripts.evidence.recipes import queue, training
from scripts.evidence.recipes.candidates import CANDIDATES, optimizers
from scripts.evidence.recipes.ledger import Ledger, OutOfTime
from scripts.evidence.recipes.trials import Setting, Trial, on_grid
from scripts.evidence.recipes.tuning import BUDGET, best_rate, tune
from scripts.evidence.recipes.wrong_norms import KINDS, layouts_of

SETTING = Setting("43k", 4, 3)


def trial(name="lamb-0.8"):
    return CANDIDATES[name].start(SETTING, name)


@pytest.mark.parametrize("best", [-9.0, -4.5, -4.0, 0.5])
def test_the_grid_grows_until_the_best_rate_is_inside(best):
    tried = []

    def loss(candidate):
        tried.append(math.log2(candidate.lr))
        return math.inf if tried[-1] > best + 2 else abs(tried[-1] - best)

    found, octaves = best_rate(trial(), -4.5, loss)
    assert (octaves, found.lr) == (best, on_grid(best))
    assert min(tried) < best - 0.4
    assert max(tried) > best + 0.4
    assert len(set(tried)) == len(tried)


def test_tuning_moves_along_every_knob_within_its_budget():
    def loss(candidate):
        own = dict(candidate.own)
        return abs(math.log2(candidate.lr) + 5) + abs(math.log(candidate.vectors / 0.3)) + 10 * abs(own["beta2"] - 0.8)

    found, runs = tune(trial("nesterov"), -4.5, CANDIDATES["nesterov"].knobs, loss)
    assert (found.lr, found.vectors, dict(found.own)["beta2"]) == (on_grid(-5), 0.3, 0.8)
    assert 6 <= runs <= BUDGET + 2


def test_a_run_is_run_once_and_kept_as_a_line(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        training, "train", lambda t: calls.append(t) or {"valid": 1.5 if t.lr < 1 else None, "seconds": 2.0}
    )
    path = tmp_path / "runs.jsonl"
    ledger, wild = Ledger(path, None), trial().with_knob("lr", 2.0)
    assert ledger.loss(trial()) == ledger.loss(trial()) == 1.5
    assert ledger.loss(wild) == math.inf
    assert calls == [trial(), wild]
    again = Ledger(path)
    assert (again.loss(trial()), again.loss(wild), len(again), again.seconds()) == (1.5, math.inf, 2, 4.0)
    with pytest.raises(OutOfTime):
        again.loss(trial("paper"))
    assert [json.loads(line)["trial"]["optimizer"] for line in path.read_text().splitlines()] == ["lamb-0.8"] * 2
    assert Trial.from_json(json.loads(json.dumps(trial("muon").as_json()))) == trial("muon")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.up, self.norm = nn.Embedding(6, 4), nn.Linear(4, 5), nn.LayerNorm(5)


@pytest.mark.parametrize("name", CANDIDATES)
@pytest.mark.parametrize("rule", ["ratio", "adam"])
def test_every_candidate_steps_every_parameter_at_the_rate_of_its_kind(name, rule):
    model = Net()
    start = CANDIDATES[name].start(SETTING, name, vectors=0.1, embeddings=rule)
    scaled = optimizers(start, model)
    listed = [p for _, group, _ in scaled for p in group["params"]]
    assert sorted(map(id, listed)) == sorted(map(id, model.parameters()))
    factors = {id(p): factor for _, group, factor in scaled for p in group["params"]}
    rest = dict(start.own).get("rest", 1.0)
    assert factors[id(model.up.bias)] == pytest.approx(0.1 * rest)
    assert factors[id(model.up.weight)] == 1
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    for optimizer in {id(o): o for o, *_ in scaled}.values():
        optimizer.step()
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_norms_are_those_of_pieces(kind):
    """Two ranks; what each takes for a layer is computed here by hand."""
    torch.manual_seed(2)
    params = [nn.Parameter(torch.randn(3, 2, dtype=torch.float64)), nn.Parameter(torch.randn(4, dtype=torch.float64))]
    grads = [torch.randn_like(p) for p in params]
    pieces = {
        "tensor pieces": [[(0, 0, 3)], [(0, 3, 6)], [(1, 0, 2)], [(1, 2, 4)]],
        "buffer pieces": [[(0, 0, 5)], [(0, 5, 6)], [(1, 0, 4)]],
        "buffer": [[(0, 0, 5)], [(0, 5, 6), (1, 0, 4)]],
    }[kind]
    expected = [p.detach().clone().view(-1) for p in params]
    for layer in pieces:
        theta = torch.cat([params[i].detach().view(-1)[a:b] for i, a, b in layer])
        g = torch.cat([grads[i].view(-1)[a:b] for i, a, b in layer])
        r = g / (g.abs() + 1e-6) + 1e-4 * theta
        phi = theta.norm() + 1e-10
        step = 0.1 * phi / (r.norm() + 1e-6 * phi) * r
        for i, a, b in layer:
            expected[i][a:b] -= step[: b - a]
            step = step[b - a :]
    optimizer = ALTO(params, lr=0.1, alpha=0.0)
    optimizer.set_layouts(layouts_of(params, kind, 2))
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    optimizer.step()
    for p, want in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach().view(-1), want, rtol=1e-9, atol=1e-12)


def test_the_queue_starts_with_what_decides_the_defaults():
    names = [name for name, _ in queue.parts()]
    assert names[0].startswith("vectors and embeddings, 43k")
    assert len(set(names)) >= len(names) - len(queue.FAMILY)  # the family at 43k is looked at twice


@pytest.mark.parametrize(
    ("first", "options", "counts"),
    [
        ([1.0, 1.1, 1.2, 1.0, 1.1], {}, True),
        ([1.0, 1.1, 1.2], {}, False),  # three seeds
        ([1.501, 1.502, 1.5, 1.501, 1.502], {"least": 0.01}, False),  # too small to be of use
        ([1.0, 2.1, 1.2, 0.9, 1.6], {}, False),
        ([1.2, 1.5, 1.3, 1.1, 1.3], {}, True),
        ([1.2, 1.5, 1.3, 1.1, 1.3], {"comparisons": 20}, False),  # one of twenty would do so by chance
    ],
)
def test_a_difference_counts_with_five_seeds_an_interval_and_an_effect(first, options, counts):
    difference = paired(first, [1.5, 1.5, 1.51, 1.5, 1.49][: len(first)], **options)
    assert difference.counts is counts
    assert difference.lower is counts
    assert not difference.higher


def test_intervals_are_students():
    difference = paired([1.0, 2.0, 3.0, 4.0, 5.0], [0.0] * 5)
    assert difference.half_width == pytest.approx(2.7764 * (2.5 / 5) ** 0.5, rel=1e-4)
    assert paired([1.0], [0.0]).half_width == math.inf
    assert paired([math.inf] * 5, [1.0] * 5).higher
