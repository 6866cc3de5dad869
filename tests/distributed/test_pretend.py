"""The rank tests on a pretend accelerator (tests/helpers/pretend): what would break on GPUs and under NCCL."""

import pytest

from tests.end_to_end.test_pretrain_runs import ENTRIES, arguments, losses, prepared, torchrun
from tests.helpers.launcher import EXHAUSTIVE, REPO, check, every_case, launch
from tests.helpers.processes import run

CORE = "on_device,sharded,nonfinite,agreement"
CHECKPOINTS = "checkpoints"
# In this order: once DeepSpeed has been asked for float16 autocast, which we refuse, later engines have a GradScaler.
ZERO = "nonfinite_deepspeed,on_device_deepspeed,zero"
ZERO_CHECKPOINTS = "zero_checkpoints"
MEGATRON = ",".join(f"megatron{name}" for name in ("_on_device", "", "_parallel", "_program", "_overlap"))
MEGATRON_MORE = "megatron_precision,nonfinite_megatron,agreement_megatron,megatron_checkpoints"

exhaustive = pytest.mark.skipif(not EXHAUSTIVE, reason="a variation: EXHAUSTIVE=1 runs it")


@pytest.mark.parametrize(("world", "case"), every_case(CORE, 2))
def test_core(world, case, directory):
    check(CORE, world, case, directory, device="pretend")


@exhaustive
@pytest.mark.parametrize(("world", "case"), every_case(CORE, 4))
def test_core_on_two_dimensional_meshes(world, case, directory):
    check(CORE, world, case, directory, device="pretend")


def test_state_dicts(tmp_path):
    """The other checkpoints take longer; the training program's are below."""
    case = "case_flattened_and_full_state_dicts"
    check(CHECKPOINTS, 2, case, tmp_path, device="pretend", ALTO_CASES=case)


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


PROGRAM = "pretrain_deepspeed"


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
    check("sharded", 2, case, directory, device="pretend", PRETEND_NO_FLOAT64="1", ALTO_CASES=case)


@pytest.mark.parametrize(("world", "case"), every_case(MEGATRON, 2))
def test_megatron(world, case, directory):
    check(MEGATRON, world, case, directory, device="pretend")


@exhaustive
@pytest.mark.parametrize(("world", "case"), every_case(MEGATRON, 4))
def test_megatron_on_four_ranks(world, case, directory):
    check(MEGATRON, world, case, directory, device="pretend")


@exhaustive
@pytest.mark.parametrize(("world", "case"), every_case(MEGATRON_MORE, 2, 1, 4))
def test_more_of_megatron(world, case, directory):
    launch(MEGATRON_MORE, 2, directory, device="pretend")  # saves the checkpoints that the others load
    check(MEGATRON_MORE, world, case, directory, device="pretend")


# -- the training program --------------------------------------------------------------------------------

STEPS, STOP = 6, 4
SETTINGS = [
    "training.precision=bf16",
    f"training.iterations={STEPS}",
    "training.global_batch=32",
    "schedule.warmup=2",
    "evaluation.every=3",
    "evaluation.samples=16",
    "checkpoints.every=3",
    "model.dropout=0.0",
]


@pytest.mark.parametrize("engine", ["deepspeed", pytest.param("megatron", marks=exhaustive)])
def test_the_training_program(engine, tmp_path):
    """Stopped and resumed on two devices, it has the losses of two CPU ranks that nothing happened to."""
    data = prepared(tmp_path)
    run([*torchrun(2), *arguments(engine, data, tmp_path / "cpu", *SETTINGS)])
    job = arguments(engine, data, tmp_path / "device", *SETTINGS)[len(ENTRIES[engine]) :]
    command = [*torchrun(2), str(REPO / "tests" / "end_to_end" / "programs" / "pretrain_on_pretend.py"), *job]
    # Some schedulers show each rank its own device only. DeepSpeed takes the local rank for the device's number.
    visible = {"PRETEND_DEVICES": "1"} if engine == "megatron" else {}
    run([*command, "--stop-at", str(STOP)], device="pretend")
    assert list(losses(tmp_path / "device")) == list(range(1, STOP + 1))
    run(command, device="pretend", **visible)
    expected = losses(tmp_path / "cpu")
    assert list(expected) == list(range(1, STEPS + 1))
    assert losses(tmp_path / "device") == pytest.approx(expected, rel=1e-5)
