"""Launches and bytes of a step on an accelerator without Triton, counted on meta tensors by scripts/launches.py."""

import pytest
import torch

from scripts import launches
from tests.helpers.cases import EXHAUSTIVE

#: case, option: at most so many launches, and bytes a parameter.
BUDGET = {
    ("345M, one GPU", "float32"): (300, 130),
    ("345M, one GPU", "bf16 grad_ema"): (910, 350),
    ("345M, one GPU", "bf16 exp_avg"): (930, 360),
    ("345M, one GPU", "skip_nonfinite"): (650, 310),
    ("345M, one GPU", "measured"): (440, 145),
    ("345M, one GPU", "Triton"): (30, 48.1),
    ("345M, ZeRO-2 over 8", "float32"): (100, 130),
    ("345M, ZeRO-2 over 8", "bf16 grad_ema"): (270, 350),
    ("345M, ZeRO-2 over 8", "skip_nonfinite"): (155, 310),
    ("345M, ZeRO-2 over 8", "measured"): (110, 145),
    ("7B, ZeRO-2 over 8", "float32"): (700, 140),
    ("7B, ZeRO-2 over 8", "bf16 grad_ema"): (2_000, 365),
    ("7B, ZeRO-2 over 8", "skip_nonfinite"): (1_450, 320),
    ("7B, ZeRO-2 over 8", "measured"): (950, 160),
    ("7B, ZeRO-2 over 8", "Triton"): (30, 48.1),
    ("7B, ZeRO-2 over 64", "float32"): (130, 130),
    ("7B, ZeRO-2 over 64", "bf16 grad_ema"): (400, 350),
    ("7B, ZeRO-2 over 64", "skip_nonfinite"): (250, 300),
    ("7B, ZeRO-2 over 64", "measured"): (180, 145),
    ("3,000 small tensors of a MoE", "float32"): (800, 130),
    ("3,000 small tensors of a MoE", "bf16 grad_ema"): (1_300, 370),
    ("3,000 small tensors of a MoE", "skip_nonfinite"): (1_300, 310),
    ("3,000 small tensors of a MoE", "measured"): (1_200, 155),
    ("3,000 small tensors of a MoE", "Triton"): (30, 48.5),
}
#: These take longer than the others, and go the same ways.
LONG = [("7B, ZeRO-2 over 8", option) for option in ("bf16 grad_ema", "skip_nonfinite", "measured")]
LINES = (launches.ROOT / "docs" / "benchmarks.md").read_text().splitlines()


@pytest.mark.parametrize(("case", "option"), [key for key in BUDGET if EXHAUSTIVE or key not in LONG])
def test_a_step_keeps_to_its_budget(case, option):
    found = launches.count(case, **launches.OPTIONS[option])
    most, widest = BUDGET[case, option]
    assert (5 if option == "Triton" else 10) < found.launches <= most
    assert 40 < found.bytes <= widest
    assert found.extra <= (3072 if option == "skip_nonfinite" else 2048)
    assert launches.line(case, option, found) in LINES  # what the documentation says


def test_a_foreach_operation_is_as_many_launches_as_its_tensors_need():
    small, large = torch.empty(10, device="meta"), torch.empty(launches.BLOCK * launches.BLOCKS + 1, device="meta")
    assert launches.launches_of_lists([[small] * 110]) == 1
    assert launches.launches_of_lists([[small] * 111]) == 2
    assert launches.launches_of_lists([[small] * 37] * 4) == 2
    assert launches.launches_of_lists([[large]]) == 2


def test_a_norm_fills_and_cleans_up_and_cat_takes_few_expanded_numbers():
    some = [torch.empty(10, device="meta") for _ in range(401)]
    with launches.Counting() as counted:
        torch._foreach_norm(some)
    assert counted.launches == 1 + 4 + 2
    numbers = torch.empty(129, device="meta").unbind()
    with launches.Counting() as counted:
        torch.stack(numbers)
        torch.cat([number.expand(7) for number in numbers])
    assert counted.launches == 2 + 3


def test_the_memory_is_that_of_what_is_alive():
    x = torch.empty(2**20, device="meta")
    with launches.Counting() as counted:
        for _ in range(5):
            y = x + 1  # the old one is freed after the new one is made
        y.add_(1)
    assert 2 * 4 * 2**20 <= counted.peak < 2.2 * 4 * 2**20


def test_the_instrument_counts_what_adamw_does():
    """144 launches of AdamW's foreach steps for 345M, eight operations over 18 launches each."""
    shapes = launches.CASES["345M, one GPU"][0]
    params = [torch.empty(shape, device="meta", requires_grad=True) for _, shape in shapes]
    optimizer = torch.optim.AdamW(params, foreach=True)
    for _ in range(2):
        for p in params:
            p.grad = torch.empty_like(p)
        with launches.Counting() as counted:
            optimizer.step()
    assert 120 <= counted.launches <= 200
