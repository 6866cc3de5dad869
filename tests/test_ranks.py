"""The cases of tests/ranks, each a test; the ranks of a module and world size start once for all of them."""

import pytest

from .launcher import check, every_case, launch

SHARDED = "tests.ranks.sharded,tests.ranks.nonfinite,tests.ranks.agreement"
CHECKPOINTS, PROPERTY, SOAK = "tests.ranks.checkpoints", "tests.ranks.property", "tests.ranks.soak"


@pytest.mark.parametrize(("world", "case"), every_case(SHARDED, 2, 4))
def test_sharded_equals_unsharded(world, case, directory):
    check(SHARDED, world, case, directory)


@pytest.mark.parametrize(("world", "case"), every_case(CHECKPOINTS, 4, 2, 1))
def test_checkpoints(world, case, directory):
    launch(CHECKPOINTS, 4, directory)  # it saves what the smaller worlds load
    check(CHECKPOINTS, world, case, directory)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "case"), every_case(PROPERTY, 8))
def test_any_cut(world, case, directory):
    check(PROPERTY, world, case, directory)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "case"), every_case(SOAK, 4))
def test_soak(world, case, directory):
    check(SOAK, world, case, directory)
