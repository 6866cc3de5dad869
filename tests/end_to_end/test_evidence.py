"""The studies of scripts/evidence in their quick forms, with what an optimizer that is broken would not pass."""

import csv
import json
import math

import pytest
import torch
from torch import nn

from alto_distributed import ALTO, param_groups
from scripts.evidence import STUDIES, landscapes, large_batch, page, study, wells
from scripts.evidence.__main__ import run_study
from scripts.evidence.ablated import AblatedALTO
from scripts.evidence.recipes import report
from scripts.evidence.recipes.ledger import Ledger
from scripts.evidence.review import REVIEWS
from scripts.evidence.study import Claim, Result


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A study's quick result, run once."""
    directory, found = tmp_path_factory.mktemp("evidence"), {}

    def run(name):
        if name not in found:
            found[name] = run_study(name, True, directory / name), directory / name
        return found[name]

    return run


def value(rows, column, **wanted):
    (row,) = [row for row in rows if all(row[key] == item for key, item in wanted.items())]
    return row[column]


@pytest.mark.parametrize("name", ["valleys", "large_batch", "images", "ablation"])
def test_a_study_leaves_its_table_its_figures_and_its_circumstances(quick, name):
    result, directory = quick(name)
    told = json.loads((directory / "result.json").read_text())
    assert told["study"] == name
    assert told["form"] == "quick"
    assert told["made"]["torch"] == torch.__version__
    assert {claim["verdict"] for claim in told["claims"]} <= set(study.VERDICTS)
    with open(directory / "table.csv") as file:
        assert len(list(csv.DictReader(file))) == len(result.rows) > 0
    assert (directory / "table.md").read_text().count("\n") == len(result.rows) + 2
    assert result.figures
    for figure in result.figures:
        assert (directory / figure).read_bytes().startswith(b"\x89PNG")
    assert told["title"] in page.compose([told])[f"results/{name}.md"]


def test_adapted_optimizers_see_more_of_the_cardioids_valley(quick):
    rows = quick("valleys")[0].rows

    def explored(optimizer):
        return value(rows, "explored", function="squared cardioid", optimizer=optimizer)

    assert explored("EAdam") > 4 * explored("Adam")
    assert explored("ALTO") > 1.5 * explored("LAMB")
    assert explored("ESGD") > 1.2 * explored("SGD")


def test_adapted_optimizers_leave_small_minima(quick):
    rows = quick("valleys")[0].rows
    for adapted, plain in (("ALTO", "LAMB"), ("ALTO", "Adam"), ("EAdam", "Adam")):
        lower, higher = (value(rows, "last", function="f1", optimizer=name) for name in (adapted, plain))
        assert lower < 0.9 * higher


def test_small_batches_need_fewer_epochs(quick):
    rows = quick("large_batch")[0].rows
    assert {claim.verdict for claim in quick("large_batch")[0].claims} == {"not testable here"}  # one seed
    for name, full in (("AdamW", "AdamW"), ("LAMB", "LAMB"), ("ALTO", "ALTO alpha -5")):
        small = value(rows, "best error", optimizer=name, batch=large_batch.SMALL)
        assert small < 0.8 * value(rows, "best error", optimizer=full, batch=4096)
    # The rate is one of relative change: without the ratio these would be Adam's, and far apart from them.
    lamb = value(rows, "best error", optimizer="LAMB", batch=4096)
    assert lamb == pytest.approx(0.309, abs=0.02)
    assert value(rows, "best error", optimizer="ALTO alpha -5", batch=4096) == pytest.approx(lamb, abs=0.005)
    assert value(rows, "best error", optimizer="ALTO alpha -50", batch=4096) > lamb + 0.01


def test_all_six_learn_digits(quick):
    rows = quick("images")[0].rows
    accuracy = {(row["optimizer"], row["batch"]): row["test accuracy (%)"] for row in rows}
    assert len(accuracy) == 13
    assert min(reached for (_, batch), reached in accuracy.items() if batch == 32) > 90
    assert min(reached for (_, batch), reached in accuracy.items() if batch == 1200) > 60
    assert accuracy["ALTO", 32] > 92


def test_parts_that_are_taken_out_make_a_difference(quick):
    rows = quick("ablation")[0].rows
    losses = [row["test loss"] for row in rows]
    assert len(losses) == len(set(losses)) == 8


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("ratio", [True, False])
@pytest.mark.parametrize("alpha", [-50.0, 0.5, 0.0])
def test_the_optimizer_of_the_ablation_is_alto_when_nothing_else_is_ablated(alpha, ratio, bias_correction):
    models = []
    for ablated in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        groups = param_groups(model, 1e-2)
        settings = {"lr": 0.05, "alpha": alpha, "weight_decay": 1e-2, "bias_correction": bias_correction}
        if ablated:
            optimizer = AblatedALTO(groups, ratio=ratio, **settings)
        else:
            optimizer = ALTO(groups, layerwise="decayed" if ratio else "none", **settings)
        for step in range(30):
            torch.manual_seed(step)
            x = torch.randn(16, 5, dtype=torch.float64)
            optimizer.zero_grad()
            model(x).sin().mean().backward()
            optimizer.step()
        models.append(model)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_taking_a_part_out_of_the_ablations_optimizer_changes_it():
    ends = set()
    for parts in ({}, {"in_m": False}, {"in_v": False}, {"in_m": False, "in_v": False}):
        param = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
        optimizer = AblatedALTO([param], lr=0.01, alpha=-50.0, **parts)
        for _ in range(5):
            param.grad = param.detach() ** 3
            optimizer.step()
        ends.add(tuple(param.tolist()))
    assert len(ends) == 4


def test_explored_counts_each_piece_of_valley_once():
    """A path that swings in one place is long and sees nothing: that is what LAMB does at a constant rate."""
    floor = landscapes.ROSENBROCK
    x = torch.linspace(0.5, 1.0, 400, dtype=torch.float64)
    along = torch.stack([x, x**2], -1)
    once, twice = landscapes.explore(floor, along), landscapes.explore(floor, torch.cat([along, along.flip(0)]))
    length = (along[1:] - along[:-1]).norm(dim=-1).sum().item()
    assert once.path == pytest.approx(length)
    assert twice.path == pytest.approx(2 * length)
    assert once.explored == twice.explored == pytest.approx(length, abs=2 * landscapes.PIECE)
    assert once.lowest == 0
    far = landscapes.explore(floor, torch.full((3, 2), 9.0, dtype=torch.float64))
    assert far.entered is None
    assert math.isnan(far.flattest)


def test_curvatures_are_those_of_the_functions():
    lowest = landscapes.top_eigenvalues(landscapes.rosenbrock, torch.tensor([[1.0, 1.0]], dtype=torch.float64))
    assert lowest.item() == pytest.approx(1001.6006, rel=1e-6)  # of [[802, -400], [-400, 200]]
    sharp, flat = landscapes.top_eigenvalues(landscapes.f2, torch.tensor([[0.6], [0.0]], dtype=torch.float64)).tolist()
    assert sharp == pytest.approx(1800, rel=0.01)
    assert flat == pytest.approx(50, rel=0.01)
    assert landscapes.squared_cardioid(landscapes.CARDIOID.curve).abs().max() < 1e-25
    assert wells.F1.function(torch.tensor([2.3], dtype=torch.float64)).item() == pytest.approx(0.76483, abs=1e-5)


def test_a_stair_is_a_plateau_and_then_a_drop():
    def stair(errors):
        return large_batch.has_stair(list(enumerate(errors)))

    assert stair([0.2] * 50 + [0.02] * 50)
    assert stair([0.2] * 50 + [0.02] * 500)
    assert not stair([0.2 * 0.95**i for i in range(100)])
    assert not stair([0.2] * 100)


def test_verdicts_follow_from_numbers_and_are_never_anything_else():
    assert study.verdict([True, True]) == "held"
    assert study.verdict([False]) == "did not hold"
    assert study.verdict([True, False]) == "mixed"
    assert study.verdict([]) == "not testable here"
    with pytest.raises(ValueError, match="is not one of"):
        Claim("p", "w", "held, more or less", "f")


def test_every_review_is_of_one_claim():
    claims = {result["study"]: [claim["paper"] for claim in result["claims"]] for result in page.read_results()}
    for name, reviews in REVIEWS.items():
        for words, review in reviews.items():
            assert sum(claim.startswith(words) for claim in claims[name]) == 1, words
            assert review.verdict in study.VERDICTS
            assert review.why


def test_a_result_that_names_a_figure_that_is_not_there_is_refused(tmp_path):
    result = Result("valleys", "t", "quick", {}, [], [{"a": 1}], ["no.png"], [])
    with pytest.raises(ValueError, match=r"no\.png"):
        study.write(result, tmp_path)


def test_the_page_is_the_one_that_the_committed_results_make():
    """Nobody edits these pages, and nobody forgets to make them."""
    results, parts = page.read_results(), report.finished(Ledger())
    for name, text in page.compose(results, parts).items():
        assert (page.DOCS / name).read_text() == text, f"python -m scripts.evidence page writes another {name}"
        cells = [cell for line in text.splitlines() if line.startswith("|") for cell in line.strip("|").split("|")]
        assert [cell for cell in cells if len(cell.strip()) > 60] == []
    assert [result["study"] for result in results] == [name for name in STUDIES if (page.RESULTS / name).is_dir()]
    for result in results:
        assert result["form"] == "full"
        for figure in result["figures"]:
            assert (page.RESULTS / result["study"] / figure).stat().st_size < 200_000
