"""Python overhead of a step with many small parameters. Calls are counted, since times hang on the machine's load."""

import sys

import pytest
import torch
from torch import nn

from alto_distributed import ALTO
from scripts import overhead

#: Calls of Python and C functions that a step may make for each parameter. There were 64 and 69, then 52.
CALLS = {((10,), "native"): 36, ((2, 5), "native"): 36, ((10,), "triton"): 38}


def calls_of_a_step(count, shape, kernel):
    params = [nn.Parameter(torch.randn(shape)) for _ in range(count)]
    optimizer = ALTO(params, kernel=kernel)
    for p in params:
        p.grad = torch.randn(shape)
    for _ in range(2):  # makes the states, and gets to know where they are
        optimizer.step()
    found = 0

    def count_call(_frame, event, _argument):
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(count_call)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize(("shape", "kernel"), CALLS)
def test_a_parameter_costs_so_many_calls_whatever_their_number(shape, kernel):
    """The Triton kernel's without its launches."""
    with overhead.triton_stubbed():
        few, more, many = (calls_of_a_step(count, shape, kernel) for count in (10, 110, 310))
    assert 0 < many - more <= 200 * CALLS[shape, kernel]
    assert many - more <= 2 * (more - few) + 200  # linear
