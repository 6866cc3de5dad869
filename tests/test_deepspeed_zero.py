"""DeepSpeed's ZeRO stages: each case of tests/ranks/zero.py a test, with what NaN and disagreement do."""

import pytest

from .launcher import check, every_case

ZERO = "tests.ranks.zero,tests.ranks.nonfinite_deepspeed,tests.ranks.agreement_deepspeed"


@pytest.mark.parametrize(("world", "case"), every_case(ZERO, 1, 2, 4))
def test_deepspeed(world, case, directory):
    check(ZERO, world, case, directory)
