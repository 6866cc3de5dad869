"""Launches and bytes of a step on an accelerator without Triton, counted on meta tensors by scripts/launches.py."""

import pytest
import torch

from scripts import launches
from tests.helpers.cases import EXHAUSTIVE

#: case, option: at most so many launches, and bytes a parameter.
BUDGET = {
    ("345M, one GPU", "float32"): (300, 130),
    ("345M, one GPU", "bf16 grad_ema"): (910, 350),
    ("345M, one GPU", "skip_nonfinite"): (650, 310),
    ("345M, one GPU", "measured"): (15_800, 350),
    ("345M, ZeRO-2 over 8", "float32"): (100, 130),
    ("345M, ZeRO-2 over 8", "bf16 grad_ema"): (270, 350),
    ("345M, ZeRO-2 over 8", "measured"): (2_100, 350),
    ("7B, ZeRO-2 over 8", "float32"): (700, 140),
    ("7B, ZeRO-2 over 64", "float32"): (130, 130),
    ("7B, ZeRO-2 over 8", "skip_nonfinite"): (1_450, 320),
    ("7B, ZeRO-2 over 64", "bf16 grad_ema"): (400, 350),
    ("3,000 small tensors of a MoE", "float32"): (800, 130),
    ("3,000 small tensors of a MoE", "bf16 grad_ema"): (1_300, 370),
    ("3,000 small tensors of a MoE", "skip_nonfinite"): (1_300, 310),
    ("3,000 small tensors of a MoE", "measured"): (88_000, 360),
}


#: Takes longer than all others together, and the other measured steps take the same way.
EXHAUSTIVE_ALONE = {("3,000 small tensors of a MoE", "measured")}


@pytest.mark.parametrize(("case", "option"), [key for key in BUDGET if EXHAUSTIVE or key not in EXHAUSTIVE_ALONE])
def test_a_step_keeps_to_its_budget(case, option):
    _, counted, moved = launches.count(case, "torch", **launches.OPTIONS[option])
    most, widest = BUDGET[case, option]
    assert 10 < counted <= most
    assert 40 < moved <= widest


def test_a_foreach_operation_is_as_many_launches_as_its_tensors_need():
    small, large = torch.empty(10, device="meta"), torch.empty(launches.BLOCK * launches.BLOCKS + 1, device="meta")
    assert launches.launches_of_lists([[small] * 110]) == 1
    assert launches.launches_of_lists([[small] * 111]) == 2
    assert launches.launches_of_lists([[small] * 37] * 4) == 2
    assert launches.launches_of_lists([[large]]) == 2


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
