"""The study of flatness, and the power iteration that it rests on."""

import pytest
import torch
from torch import nn

from scripts.evidence import flatness, flatness_report
from scripts.evidence.flatness import Course, Family
from scripts.evidence.hessian import top_eigenvalue
from scripts.evidence.study import FAILED, HELD


@pytest.mark.parametrize("top", [7.5, -7.5])
def test_the_power_iteration_finds_the_eigenvalue_that_is_largest_in_size(top):
    torch.manual_seed(2)
    q, _ = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64))
    values = torch.tensor([top, 5.0, -4.0, *[0.1 * i for i in range(9)]], dtype=torch.float64)
    matrix = q @ torch.diag(values) @ q.T
    first, second = (torch.randn(n, dtype=torch.float64, requires_grad=True) for n in (5, 7))

    def loss():
        x = torch.cat([first, second])
        return 0.5 * x @ matrix @ x + x.sum()

    assert top_eigenvalue(loss, [first, second], tolerance=1e-6) == pytest.approx(top, rel=1e-4)


def test_the_power_iteration_agrees_with_the_whole_hessian_of_a_network():
    net = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3)).double()
    x, y = torch.randn(40, 4, dtype=torch.float64), torch.randint(0, 3, (40,))
    names, values = zip(*net.named_parameters(), strict=True)

    def of(flat):
        cut, at = {}, 0
        for name, value in zip(names, values, strict=True):
            cut[name], at = flat[at : at + value.numel()].view_as(value), at + value.numel()
        return nn.functional.cross_entropy(torch.func.functional_call(net, cut, (x,)), y)

    flat = nn.utils.parameters_to_vector(values).detach()
    exact = torch.linalg.eigvalsh(torch.autograd.functional.hessian(of, flat))
    largest = exact[exact.abs().argmax()].item()
    found = top_eigenvalue(
        lambda: nn.functional.cross_entropy(net(x), y), list(values), iterations=2000, tolerance=1e-7
    )
    assert found == pytest.approx(largest, rel=1e-3)


def course(eigenvalue, drift, loss):
    return Course([1, 2], [9.0, eigenvalue], [0.1, drift], [0.1, 0.1], [2.0, loss], 0.1)


@pytest.mark.parametrize("flatter", [True, False])
def test_verdicts_follow_the_numbers(flatter):
    family = Family("made up", "LAMB", 0.1, 2, 1, ((-5.0, 0.99), (0.0, 0.99), (5.0, 0.99)), 2)
    jitter = (1.0, 1.01, 1.02, 0.99, 0.98)
    runs = {-1: [course(1 * j, 5 * j, 0.9 * j) for j in jitter], 1: [course(3 * j, 4 * j, 0.5 * j) for j in jitter]}
    low, high = (runs[-1], runs[1]) if flatter else (runs[1], runs[-1])
    middle = [course(2 * j, 4.5 * j, 0.7 * j) for j in jitter]
    courses = {(family, (-5.0, 0.99)): low, (family, (0.0, 0.99)): middle, (family, (5.0, 0.99)): high}
    assert {claim.verdict for claim in flatness_report.claims(courses)} == {HELD if flatter else FAILED}


def test_flatness_is_judged_where_losses_are_equal():
    """A run that is further on is flatter, whatever its alpha: at the end it was called flatter than alpha 0."""
    family = Family("made up", "LAMB", 0.1, 2, 1, ((-5.0, 0.99), (0.0, 0.99)), 2)
    jitter = (1.0, 1.01, 1.02, 0.99, 0.98)
    courses = {
        (family, (-5.0, 0.99)): [course(1 * j, 5, 0.2) for j in jitter],  # at a loss of 0.9 it has 4.1
        (family, (0.0, 0.99)): [course(3 * j, 4, 0.9) for j in jitter],
    }
    original = flatness_report.claims(courses)[1]
    assert original.verdict == FAILED
    assert "At the end, made up, alpha -5 against 0: 0.33 times." in original.finding
    (difference,) = flatness_report.at_equal_loss(courses, lambda _: 0.0).values()
    assert difference.higher
    assert difference.comparisons == 4  # one pair, in four claims


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return flatness.run(True, tmp_path_factory.mktemp("flatness"))


def test_the_sign_of_alpha_tells(result):
    """The further alpha is below 0, the further a run goes from its initial weights: seen with every seed."""
    drifts = {(row["base"], row["alpha"]): row["drift"] for row in result.rows}
    for base, size in (("AdamW", 5.0), ("LAMB", 50.0)):
        assert drifts[base, -size] > drifts[base, 0.0] > drifts[base, size] > 1
    flat, _, wide, _ = result.claims
    assert wide.verdict == "not testable here"  # the quick form has fewer seeds than count
    assert "digits, full batch" in flat.finding


def test_the_courses_are_those_of_these_optimizers(result):
    """Seen here: after 120 steps. The ratio, the decays of the moments and the correction of their bias all enter."""
    rows = {(row["base"], row["alpha"]): row for row in result.rows}
    assert rows["AdamW", 0.0]["drift"] == pytest.approx(6.56, rel=0.03)
    assert rows["LAMB", 0.0]["drift"] == pytest.approx(5.54, rel=0.03)
    assert rows["AdamW", 0.0]["training loss at the end"] == pytest.approx(0.503, rel=0.1)
    assert rows["LAMB", 0.0]["training loss at the end"] == pytest.approx(1.51, rel=0.1)
    assert rows["LAMB", 0.0]["top eigenvalue at the end"] == pytest.approx(6.4, rel=0.2)
