"""DeepSpeed's ZeRO stages: each case of cases/zero.py a test, and so of the modules that share its ranks."""

import pytest

from tests.helpers.cases import every_case
from tests.helpers.launcher import check

ZERO = ",".join(
    (
        "zero",
        "zero_settings",
        "zero_refusals",
        "agreement_deepspeed",
        "nonfinite_deepspeed",
        "zero_gradients_deepspeed",
        "zero_nvme",
        "zero_user",
        "zero_master_weights",
    )
)


@pytest.mark.parametrize("case", every_case(ZERO, 1, 2, 4))
def test_deepspeed(case, directory):
    check(case, directory)
