"""Megatron in float32: each case of tests/ranks/megatron.py and megatron_parallel.py a test."""

import pytest

from .launcher import check, every_case

LAYOUTS, PARALLEL = "tests.ranks.megatron", "tests.ranks.megatron_parallel"


@pytest.mark.slow
@pytest.mark.parametrize(("world", "case"), every_case(LAYOUTS, 2, 4))
def test_megatron(world, case, directory):
    check(LAYOUTS, world, case, directory)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "case"), every_case(PARALLEL, 2, 4))
def test_megatron_pipelines_experts_and_contexts(world, case, directory):
    check(PARALLEL, world, case, directory)
