"""Presets by name, and what is said of a setting's momentum, held to the averages themselves."""

import json
import math

import pytest
import torch
from torch import nn

from alto_distributed import ALTO, LAMB, Hyperparameters, param_groups, recipe
from alto_distributed.presets import PRESETS, describe, momentum_of
from alto_distributed.pretrain.checkpoint.changes import differences
from alto_distributed.pretrain.cli import plan
from alto_distributed.pretrain.config.settings import load, parse

STEPS = 400


def first_moment(hyper, gradients):
    """m of a setting after each gradient, from the paper's lines."""
    beta1, beta2, _ = hyper.betas
    a = m = before = 0.0
    for g in gradients:
        a = beta1 * a + (1 - beta1) * (g - before)
        m = beta2 * m + (1 - beta2) * (g + hyper.alpha * a)
        before = g
        yield m


def setting(preset):
    return Hyperparameters(**recipe(4096, preset))


def test_the_papers_is_what_recipes_without_a_name_are():
    for batch in (1, 1023, 1024, 4096):
        assert recipe(batch, preset="paper") == recipe(batch)
    assert setting("paper") == Hyperparameters()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("batch", [32, 4096])
def test_every_preset_builds_an_optimizer(preset, batch):
    chosen = recipe(batch, preset)
    assert ("lr" in chosen) is (batch == 4096)
    optimizer = ALTO(param_groups(nn.Linear(3, 2)), **{"lr": 0.1, **chosen})
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert ("grad_ema" in optimizer.state[p]) is (preset != "recommended")


@pytest.mark.parametrize("preset", PRESETS)
def test_the_lag_is_that_of_a_gradient_that_grows_steadily(preset):
    hyper = setting(preset)
    *_, last = first_moment(hyper, range(20 * STEPS))
    assert 20 * STEPS - 1 - last == pytest.approx(momentum_of(hyper).lag, abs=1e-6)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_momentum_is_of_the_weight_of_the_newest_gradient(preset):
    hyper = setting(preset)
    newest = next(first_moment(hyper, [1.0]))
    assert 1 - newest == pytest.approx(momentum_of(hyper).momentum, abs=1e-12)


def test_what_presets_are_called_is_what_they_are():
    impulse = [0.0, 1.0, *[0.0] * 50]
    beta = setting("nesterov").betas[1]
    average, expected = 0.0, []
    for g in impulse:
        average = beta * average + (1 - beta) * g
        expected.append(beta * average + (1 - beta) * g)  # Nesterov's
    assert list(first_moment(setting("nesterov"), impulse)) == pytest.approx(expected, abs=1e-15)
    assert momentum_of(setting("zero-lag")).lag == pytest.approx(0, abs=1e-12)
    assert momentum_of(setting("recommended")) == pytest.approx((0.0, 4.0, 0.8))
    assert momentum_of(setting("paper")) == pytest.approx((0.05, 14.0, 0.905))
    same = Hyperparameters(alpha=0.9 / 0.1 - 0.85 / 0.15, betas=(0.85, 0.9, 0.99))  # exactly momentum 0.85
    plain = Hyperparameters(alpha=0.0, betas=(0.99, 0.85, 0.99))
    assert list(first_moment(same, impulse)) == pytest.approx(list(first_moment(plain, impulse)), abs=1e-15)


def test_an_explicit_value_wins_and_shows():
    chosen = recipe(4096, preset="recommended", vector_lr=0.1, betas=(0.99, 0.5, 0.99))
    assert (chosen["vector_lr"], chosen["betas"], chosen["alpha"]) == (0.1, (0.99, 0.5, 0.99), 0.0)
    told = ALTO([nn.Parameter(torch.ones(2, 2))], **chosen).describe()
    assert told == ("ALTO: alpha 0, betas 0.99 0.5 0.99, vector_lr 0.1: rho 0, lag 1 steps, effective momentum 0.5"), (
        told
    )


def test_other_betas_leave_a_preset_what_it_is_called():
    chosen = recipe(4096, preset="nesterov", betas=(0, 0.9, 0.99))
    assert chosen["alpha"] == 0.9
    assert recipe(4096, preset="nesterov", betas=(0, 0.9, 0.99), alpha=0.5)["alpha"] == 0.5
    assert recipe(4096, preset="recommended", betas=(0.9, 0.9, 0.99))["alpha"] == 0.0
    slow = Hyperparameters(**recipe(4096, preset="zero-lag", betas=(0.9, 0.9, 0.99)))
    assert momentum_of(slow).lag == pytest.approx(0, abs=1e-12)
    with pytest.raises(ValueError, match=r"betas=\(0\.9, 0\.9, 0\.99\) with preset='nesterov': only beta1=0 is"):
        recipe(4096, preset="nesterov", betas=(0.9, 0.9, 0.99))
    run = parse({"optimizer": {"preset": "nesterov", "options": {"betas": [0, "9e-1", 0.99]}}})  # YAML reads text
    assert run.optimizer.resolved["alpha"] == 0.9
    with pytest.raises(ValueError, match=r"optimizer\.options\.betas=\(0\.5, 0\.9, 0\.99\) with preset='nesterov'"):
        parse({"optimizer": {"preset": "nesterov", "options": {"betas": [0.5, 0.9, 0.99]}}})
    with pytest.raises(ValueError, match=r"optimizer\.options\.betas=\[0\.9\] must be 3 numbers"):
        parse({"optimizer": {"preset": "nesterov", "options": {"betas": [0.9]}}})


def test_a_preset_replaces_what_earlier_files_say(tmp_path):
    """gpt2-345m.yaml has alpha -5: the recommended preset over it used to keep that, and nobody was told."""
    base, over = tmp_path / "base.yaml", tmp_path / "over.yaml"
    base.write_text(
        "optimizer: {lr: 0.03, options: {alpha: -5, betas: [0.99, 0.9, 0.99], vector_lr: 0.5, kernel: torch}}"
    )
    over.write_text("extends: base.yaml\noptimizer: {preset: recommended, options: {vector_lr: 0.1}}")
    for run, vector_lr in (
        (load(base, ["optimizer.preset=recommended"]), 0.3),
        (load(base, ["optimizer.options.vector_lr=0.2", "optimizer.preset=recommended"]), 0.2),
        (load(over), 0.1),
        (load(over, ["optimizer.preset=recommended"]), 0.3),
    ):
        chosen = run.optimizer.resolved
        assert (chosen["alpha"], chosen["betas"], chosen["vector_lr"]) == (0.0, (0.99, 0.8, 0.99), vector_lr)
        assert (chosen["lr"], chosen["kernel"]) == (0.03, "torch")  # no preset says these
    assert load(over, ["optimizer.options.alpha=3"]).optimizer.resolved["alpha"] == 3.0
    assert load(over, ["optimizer.preset=paper"]).optimizer.resolved["vector_lr"] == 1.0
    assert load(base).optimizer.resolved["alpha"] == -5.0


def test_describe_has_a_line_for_each_setting_of_the_groups():
    groups = [{"params": [nn.Parameter(torch.ones(2, 2))], "alpha": alpha} for alpha in (-5.0, -5.0, 0.0)]
    first, second = ALTO(groups).describe().splitlines()
    assert "rho 0.05, lag 14 steps, effective momentum 0.905" in first
    assert "rho 0, lag 9 steps, effective momentum 0.9" in second
    assert LAMB(groups[2]["params"]).describe().startswith("LAMB: alpha 0")
    assert "lag 0 steps" in describe(setting("zero-lag"))


def test_an_unknown_preset_lists_those_there_are():
    with pytest.raises(ValueError, match=r"preset='papers' is not one of 'paper', 'recommended', 'nesterov', 'zero"):
        recipe(4096, preset="papers")
    with pytest.raises(ValueError, match="'vectorlr' is not a hyperparameter of ALTO; did you mean 'vector_lr'"):
        recipe(4096, vectorlr=0.1)
    with pytest.raises(ValueError, match="alpha=-200 is out of range"):
        recipe(4096, alpha=-200)


def test_a_run_says_what_its_optimizer_amounts_to(tmp_path):
    told = plan(parse({"optimizer": {"preset": "nesterov", "lr": 0.02}}), 4, tmp_path)
    assert "alto, lr 0.02, decay 0.0001, alpha 0.8, betas 0 0.8 0.99, vector_lr 0.3: rho -0.8, lag 3.2 steps" in told
    assert "optimizer   adamw, lr 0.0008, decay 0.01\n" in plan(parse({"optimizer": {"name": "adamw"}}), 4, tmp_path)


def test_a_run_takes_a_preset_and_its_own_values_win():
    run = parse({"optimizer": {"preset": "recommended", "options": {"vector_lr": 0.1}}})
    assert run.optimizer.resolved["alpha"] == 0.0
    assert run.optimizer.resolved["betas"] == (0.99, 0.8, 0.99)
    assert run.optimizer.resolved["vector_lr"] == 0.1
    assert run.optimizer.lr == 1e-2
    assert parse(run.as_dict()) == run
    saved = json.loads(json.dumps(run.as_dict()))
    assert list(differences(saved, run.as_dict())) == []  # a run that resumes
    del saved["optimizer"]["preset"]  # an earlier version's
    assert list(differences(saved, run.as_dict())) == []
    other = parse({"optimizer": {"preset": "nesterov", "options": {"vector_lr": 0.1}}}).as_dict()
    assert [line.split()[0] for line in differences(saved, other)] == [
        "optimizer.options.alpha",
        "optimizer.options.betas",
    ]
    own = parse({"optimizer": {"preset": "zero-lag", "lr": 0.5, "weight_decay": 0.1}}).optimizer
    assert (own.lr, own.weight_decay, own.resolved["alpha"]) == (0.5, 0.1, 4.0)
    small = parse({"optimizer": {"preset": "paper"}, "training": {"global_batch": 64}}).optimizer
    assert math.isclose(small.resolved["alpha"], 0.5)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"preset": "best"}, r"optimizer\.preset='best' is not one of 'paper', 'recommended'"),
        ({"preset": 3}, r"optimizer\.preset=3 is not one of"),
        ({"preset": "paper", "name": "lamb"}, r"optimizer\.preset='paper' is alto's, and optimizer\.name='lamb'"),
        ({"preset": "paper", "options": [1]}, r"optimizer\.options"),
    ],
)
def test_presets_of_a_run_that_cannot_be_are_refused(optimizer, message):
    with pytest.raises(ValueError, match=message):
        parse({"optimizer": optimizer})
