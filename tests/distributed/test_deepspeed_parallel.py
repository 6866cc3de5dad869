"""DeepSpeed's tensor parallelism, pipelines and experts. Each leaves process groups of its own kind behind, so each has
ranks of its own."""

import pytest

from tests.helpers.launcher import check, every_case

TENSOR, PIPELINE, MOE = (f"zero_{kind}" for kind in ("tensor", "pipeline", "moe"))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "case"), every_case(TENSOR, 2, 4))
def test_deepspeed_tensor_parallel(world, case, directory):
    check(TENSOR, world, case, directory)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "case"), every_case(PIPELINE, 2, 4))
def test_deepspeed_pipeline(world, case, directory):
    check(PIPELINE, world, case, directory)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "case"), every_case(MOE, 4))
def test_deepspeed_experts(world, case, directory):
    check(MOE, world, case, directory)
