"""DeepSpeed's tensor parallelism, pipelines and experts: each case of cases/zero_tensor.py and so on a test."""

import pytest

from tests.helpers.cases import every_case
from tests.helpers.launcher import check

MODULES = "zero_tensor,zero_pipeline,zero_moe,zero_sequence,zero_parallel_checkpoints"


@pytest.mark.slow
@pytest.mark.parametrize("case", every_case(MODULES, 2, 4))
def test_deepspeed_parallel(case, directory):
    check(case, directory)
