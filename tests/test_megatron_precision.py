"""Megatron in half precision, and against DeepSpeed."""

import pytest

from .launcher import check, every_case

PRECISION, ENGINES = "tests.ranks.megatron_precision", "tests.ranks.engines"


@pytest.mark.slow
@pytest.mark.parametrize(("world", "case"), every_case(PRECISION, 2, 4))
def test_megatron_in_half_precision(world, case, directory):
    check(PRECISION, world, case, directory)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "case"), every_case(ENGINES, 2))
def test_engines_agree(world, case, directory):
    check(ENGINES, world, case, directory)
