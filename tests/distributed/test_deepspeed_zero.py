"""DeepSpeed's ZeRO stages: each case of tests/distributed/cases/zero.py a test, with what NaN and disagreement do."""

import pytest

from tests.helpers.launcher import check, every_case

# NaN first: once DeepSpeed was asked for float16 autocast, which zero.py sees refused, later engines of the process
# have a torch GradScaler, and that skips a step on the rank that sees the NaN alone.
ZERO = "nonfinite_deepspeed,agreement_deepspeed,zero_gradients_deepspeed,zero"


@pytest.mark.parametrize(("world", "case"), every_case(ZERO, 1, 2, 4))
def test_deepspeed(world, case, directory):
    check(ZERO, world, case, directory)
