"""The cases of tests/ranks, each a test; the ranks of a module and world size start once for all of them."""

import pytest

from .launcher import cases_of, launch

SHARDED, CHECKPOINTS, PROPERTY = "tests.ranks.sharded", "tests.ranks.checkpoints", "tests.ranks.property"
ZERO, ZERO_TENSOR = "tests.ranks.zero", "tests.ranks.zero_tensor"
ZERO_PIPELINE, ZERO_MOE = "tests.ranks.zero_pipeline", "tests.ranks.zero_moe"


def every_case(module, *world_sizes):
    return [
        pytest.param(world, case, id=f"{world} ranks-{case}")
        for world in world_sizes
        for case in cases_of(module, world)
    ]


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


def check(module, world, case, directory):
    problem = launch(module, world, directory)[case]
    if problem:
        pytest.fail(problem, pytrace=False)


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


@pytest.mark.parametrize(("world", "case"), every_case(ZERO, 1, 2, 4))
def test_deepspeed(world, case, directory):
    check(ZERO, world, case, directory)


# Each of these leaves DeepSpeed with process groups of its own kind, so each has ranks of its own.


@pytest.mark.slow
@pytest.mark.parametrize(("world", "case"), every_case(ZERO_TENSOR, 2, 4))
def test_deepspeed_tensor_parallel(world, case, directory):
    check(ZERO_TENSOR, world, case, directory)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "case"), every_case(ZERO_PIPELINE, 2, 4))
def test_deepspeed_pipeline(world, case, directory):
    check(ZERO_PIPELINE, world, case, directory)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "case"), every_case(ZERO_MOE, 4))
def test_deepspeed_experts(world, case, directory):
    check(ZERO_MOE, world, case, directory)
