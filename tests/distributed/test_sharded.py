"""The cases of cases/, each a test; the ranks of a module and world size start once for all of them."""

import pytest

from tests.helpers.cases import every_case
from tests.helpers.launcher import check

SHARDED = "sharded,nonfinite,agreement,zero_gradients"
CHECKPOINTS, PROPERTY, SOAK = (
    "checkpoints",
    "property",
    "soak",
)


@pytest.mark.parametrize("case", every_case(SHARDED, 2, 4))
def test_sharded_equals_unsharded(case, directory):
    check(case, directory)


@pytest.mark.parametrize("case", every_case(CHECKPOINTS, 4, 2, 1))
def test_checkpoints(case, directory):
    check(case, directory)


@pytest.mark.slow
@pytest.mark.parametrize("case", every_case(PROPERTY, 8))
def test_any_cut(case, directory):
    check(case, directory)


@pytest.mark.slow
@pytest.mark.parametrize("case", every_case(SOAK, 4))
def test_soak(case, directory):
    check(case, directory)
