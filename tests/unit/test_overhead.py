"""Python overhead of a step with many small parameters. Calls are counted, since times hang on the machine's load."""

import sys

import pytest
import torch
from torch import nn

from alto_distributed import ALTO

#: Calls of Python and C functions that a step may make for each parameter. There were 64 and 69.
CALLS = {(10,): 54, (2, 5): 54}


def calls_of_a_step(count, shape):
    params = [nn.Parameter(torch.randn(shape)) for _ in range(count)]
    optimizer = ALTO(params, kernel="native")
    for p in params:
        p.grad = torch.randn(shape)
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


@pytest.mark.parametrize("shape", CALLS)
def test_a_parameter_costs_so_many_calls_whatever_their_number(shape):
    few, more, many = (calls_of_a_step(count, shape) for count in (10, 110, 310))
    assert 0 < many - more <= 200 * CALLS[shape]
    assert many - more <= 2 * (more - few) + 200  # linear
