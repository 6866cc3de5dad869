"""DeepSpeed's ZeRO stages: each case of tests/ranks/zero.py a test."""

import pytest

from .launcher import check, every_case

ZERO = "tests.ranks.zero"


@pytest.mark.parametrize(("world", "case"), every_case(ZERO, 1, 2, 4))
def test_deepspeed(world, case, directory):
    check(ZERO, world, case, directory)
