"""DeepSpeed's ZeRO stages: each case of tests/distributed/cases/zero.py a test, and what NaN and disagreement do."""

import pytest

from tests.helpers.cases import every_case
from tests.helpers.launcher import check

ZERO = "zero,agreement_deepspeed,nonfinite_deepspeed,zero_gradients_deepspeed,zero_nvme,zero_user,zero_master_weights"


@pytest.mark.parametrize("case", every_case(ZERO, 1, 2, 4))
def test_deepspeed(case, directory):
    check(case, directory)
