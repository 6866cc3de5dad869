"""The study of the tiny GPT-2: its quick form, how it tunes, and how it judges."""

import math
from dataclasses import replace

import pytest

from scripts.evidence import gpt, gpt_report
from scripts.evidence.gpt_findings import Entry, Findings
from scripts.evidence.study import FAILED, HELD
from scripts.evidence.tiny_gpt import Outcome, Trial, Trials


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """Validation losses of the quick form, by optimizer and alpha."""
    result = gpt.run(True, tmp_path_factory.mktemp("gpt"))
    return {(row["optimizer"], row["alpha"]): row["validation loss"] for row in result.rows}


def test_every_optimizer_learns(losses):
    """The initial loss is log 512 = 6.24; that of the tokens' frequencies alone is about 5.3."""
    bounds = {"ALTO": 5.33, "LAMB": 5.33, "AdamW": 5.25, "Adam": 5.25, "AdaBelief": 5.25, "Lion": 5.9}
    assert {optimizer for optimizer, _ in losses} == set(bounds)
    for (optimizer, alpha), loss in losses.items():
        assert 4.5 < loss < bounds[optimizer], (optimizer, alpha)


def test_the_sign_of_alpha_tells(losses):
    """Over ten steps and at |rho| = 0.7 to 0.9 a positive alpha is faster than LAMB here, and a negative one slower."""
    lamb = losses["LAMB", None]
    assert losses["ALTO", 9.0] < lamb - 0.03
    assert losses["ALTO", -7.0] > lamb + 0.01
    assert abs(losses["ALTO", -5.0] - lamb) < 0.01  # the paper's, at rho = 0.05


def outcome(loss):
    return Outcome([10, 20], [5.0, loss], loss, 1.0)


@pytest.mark.parametrize("best", [0.001, 0.3, 20.0])
def test_tuning_goes_on_beyond_the_first_rates(best):
    """The loss is least at ``best``; two more rates may be tried beyond an end, by the ratio of the last two."""
    tried = []

    def trials(trial):
        tried.append(trial.lr)
        return outcome(abs(math.log(trial.lr / best)))

    found = Findings([], [])
    chosen = gpt.tune(Trial("lamb", 0.0), (0.1, 0.2, 0.4), 2, trials, found)
    beyond = {0.001: [0.05, 0.025], 0.3: [0.8], 20.0: [0.8, 1.6]}[best]
    assert tried[3:] == pytest.approx(beyond if best != 0.3 else ([] if len(tried) == 3 else beyond))
    assert chosen.lr == min(tried, key=lambda rate: abs(math.log(rate / best)))
    assert [trial.lr for trial, _ in found.tuning] == tried


def made_up(alto, lamb, others):
    entries = []
    for name, loss in {
        "alto": alto,
        "lamb": lamb,
        **dict.fromkeys(("adamw", "adam", "adabelief", "lion"), others),
    }.items():
        trial = Trial(name, 0.1, alpha=-5.0 if name == "alto" else 0.0)
        entries.append(Entry("once", trial, [outcome(loss + jitter) for jitter in (0.0, 0.3, -0.2, 0.1, -0.1)]))
    positive = replace(entries[0].trial, alpha=50.0)
    entries.append(Entry("once", positive, [outcome(4.0 + jitter) for jitter in (0.0, 0.31, -0.2, 0.1, -0.1)]))
    return Findings(entries, [])


@pytest.mark.parametrize(("alto", "expected"), [(3.8, HELD), (4.2, FAILED)])
def test_verdicts_follow_the_numbers(alto, expected):
    found = made_up(alto, 4.0, 4.1)
    lowest, lamb, lion, faster, batches, negative = gpt_report.claims(found)
    assert [claim.verdict for claim in (lowest, lamb, faster, negative)] == [expected] * 4
    assert lion.verdict != HELD  # ends below Lion's, or never comes there; not in a third of the iterations
    assert batches.verdict == "not testable here"


def test_a_difference_within_noise_is_no_advantage():
    found = made_up(4.0, 4.0, 4.1)
    # Seed by seed -0.1, +0.1, -0.1, -0.1, +0.1
    found.entries[0].outcomes = [outcome(loss) for loss in (3.9, 4.4, 3.7, 4.0, 4.0)]
    assert gpt_report.claims(found)[1].verdict == FAILED


def test_three_seeds_tell_nothing():
    found = made_up(3.8, 4.0, 4.1)
    for entry in found.entries:
        del entry.outcomes[3:]
    assert {claim.verdict for claim in gpt_report.claims(found)} == {"not testable here"}
    assert all("ahead of" not in sentence for sentence in gpt_report.guidance(found))


def test_iterations_to_a_loss_are_read_between_validations():
    run = Outcome([10, 20, 30], [5.0, 4.0, 3.0], 3.0, 1.0)
    assert run.reaches(4.5) == pytest.approx(15)
    assert run.reaches(3.0) == pytest.approx(30)
    assert run.reaches(2.9) == math.inf


def test_an_interrupted_study_goes_on(tmp_path):
    trial = Trial("alto", 0.04, -5.0, share="0.8", batch=4, iterations=2)
    packages = gpt.QUICK_PACKAGES
    first = Trials(packages, tmp_path)(trial)
    again = Trials(packages, tmp_path)(trial)
    assert again == first  # its seconds too: it did not run again
    other = Trials(packages, tmp_path)(replace(trial, seed=2))
    assert other.valid != first.valid
