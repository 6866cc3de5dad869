"""The study of memory, and the counting that it rests on."""

import pytest
import torch

from scripts.evidence import memory
from scripts.evidence.allocations import held, peak_beyond
from scripts.evidence.study import HELD, MIXED

MILLION = 1_000_000


def test_the_peak_is_counted_to_the_byte():
    kept = torch.zeros(MILLION)

    def work():
        first = torch.ones(MILLION)  # 4 MB
        second = first + kept  # and 4
        del first
        third = torch.ones(MILLION // 2)  # 2, when only second is left
        del second, third

    assert peak_beyond(work) == pytest.approx(8 * MILLION, abs=1000)
    assert peak_beyond(lambda: kept.add_(1)) < 1000
    # Two passes over the data, so an operator with a temporary inside must show it.
    assert peak_beyond(lambda: torch.linalg.vector_norm(kept.to(torch.float64))) >= 8 * MILLION


def test_shared_memory_is_held_once():
    one = torch.zeros(1000)
    assert held([one, one.view(10, 100), one[:500], torch.zeros(10)]) == 4040


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return memory.run(True, tmp_path_factory.mktemp("memory"))


def test_alto_needs_one_tensor_more_than_lamb_and_the_official_code_four(result):
    for row in result.settings["measured"]:
        name, extra = row["optimizer"], row["extra, tensors of d"]
        expected = {memory.LAMB: (2, 8), memory.OURS: (3, 12), memory.SMALL: (3, 10), memory.OTHER_LAMB: (2, 8)}
        tensors, per_parameter = expected.get(name, (6, 24))
        assert row["state tensors"] == tensors, name
        assert row["state bytes a parameter"] == pytest.approx(per_parameter, abs=0.01), name
        if name in (memory.OURS, memory.SMALL):  # nothing but the state: a step has no temporaries to speak of
            assert extra == pytest.approx({memory.OURS: 1.0, memory.SMALL: 0.5}[name], abs=0.01), row
        elif name == memory.OFFICIAL:
            assert extra > 3.99


def test_the_overhead_follows_the_papers_formula(result):
    c1, c2 = result.settings["c1 and c2, from the first and the last batch"][memory.OURS]
    between = [row for row in result.rows if row["batch"] == 4 and row["layers"] == 2]
    assert 1 / (c1 * 4 + c2) == pytest.approx(between[0]["ALTO, + %"] / 100, rel=0.05)
    falls, one_tensor, _ = result.claims
    assert falls.verdict in (HELD, MIXED)
    assert "1.00 to 1.00" in one_tensor.finding


def test_the_fit_is_the_papers():
    """c1 = 0.048 and c2 = 0.7877 from its table."""
    overhead = {batch: alto / lamb - 1 for batch, (lamb, alto) in memory.PAPER.items()}
    c1, c2 = memory.fit([32, 1024], [overhead[32], overhead[1024]])
    assert (c1, c2) == (pytest.approx(0.048, abs=2e-3), pytest.approx(0.7877, abs=0.05))
