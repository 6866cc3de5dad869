"""The rank tests on a pretend accelerator (tests/pretend): what would break on GPUs and under NCCL."""

import pytest

from .launcher import EXHAUSTIVE, check, every_case, launch

CORE = "tests.ranks.on_device,tests.ranks.sharded,tests.ranks.nonfinite,tests.ranks.agreement"
CHECKPOINTS = "tests.ranks.checkpoints"
# In this order: once DeepSpeed has been asked for float16 autocast, which we refuse, later engines have a GradScaler.
ZERO = "tests.ranks.nonfinite_deepspeed,tests.ranks.on_device_deepspeed,tests.ranks.zero"
ZERO_CHECKPOINTS = "tests.ranks.zero_checkpoints"

exhaustive = pytest.mark.skipif(not EXHAUSTIVE, reason="a variation: EXHAUSTIVE=1 runs it")


@pytest.mark.parametrize(("world", "case"), every_case(CORE, 2))
def test_core(world, case, directory):
    check(CORE, world, case, directory, device="pretend")


@exhaustive
@pytest.mark.parametrize(("world", "case"), every_case(CORE, 4))
def test_core_on_two_dimensional_meshes(world, case, directory):
    check(CORE, world, case, directory, device="pretend")


@exhaustive
@pytest.mark.parametrize(("world", "case"), every_case(CHECKPOINTS, 4, 2))
def test_checkpoints(world, case, directory):
    launch(CHECKPOINTS, 4, directory, device="pretend")
    check(CHECKPOINTS, world, case, directory, device="pretend")


@pytest.mark.parametrize(("world", "case"), every_case(ZERO, 2))
def test_zero(world, case, directory):
    check(ZERO, world, case, directory, device="pretend")


@exhaustive
@pytest.mark.parametrize(("world", "case"), every_case(ZERO_CHECKPOINTS, 2))
def test_zero_checkpoints(world, case, directory):
    check(ZERO_CHECKPOINTS, world, case, directory, device="pretend")


PROGRAM = "tests.ranks.pretrain_deepspeed"


@exhaustive
@pytest.mark.parametrize(("world", "case"), every_case(PROGRAM, 2))
def test_the_training_programs_deepspeed_engine(world, case, directory):
    check(PROGRAM, world, case, directory, device="pretend")


def test_one_visible_device_for_each_rank(directory):
    """As some schedulers have it: LOCAL_RANK is not the number of the device then."""
    case = "case_the_device_is_set_before_the_first_collective"
    check(PROGRAM, 2, case, directory, device="pretend", PRETEND_DEVICES="1", ALTO_CASES=case)


def test_a_backend_without_float64(directory):
    case = "case_fsdp2_in_float32_stays_within_rounding"
    check("tests.ranks.sharded", 2, case, directory, device="pretend", PRETEND_NO_FLOAT64="1", ALTO_CASES=case)
