"""The cases of cases/, each a test; the ranks of a module and world size start once for all of them."""

import pytest

from tests.helpers.launcher import check, every_case, launch

SHARDED = "sharded,nonfinite,agreement,zero_gradients"
CHECKPOINTS, PROPERTY, SOAK = (
    "checkpoints",
    "property",
    "soak",
)


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
