"""The rank tests on a pretend accelerator (tests/helpers/pretend): what would break on GPUs and under NCCL."""

import pytest

from tests.helpers.cases import EXHAUSTIVE, REPO, every_case
from tests.helpers.launcher import check
from tests.helpers.pretrain_runs import ENTRIES, arguments, losses, torchrun
from tests.helpers.processes import run

CORE = "on_device,sharded,nonfinite,agreement"
CHECKPOINTS = "checkpoints"
ZERO = "zero,zero_settings,zero_refusals,on_device_deepspeed,nonfinite_deepspeed"
ZERO_CHECKPOINTS = "zero_checkpoints"
MEGATRON = ",".join(f"megatron{name}" for name in ("_on_device", "", "_parallel", "_program", "_overlap", "_offload"))
MEGATRON_MORE = "megatron_precision,nonfinite_megatron,agreement_megatron,megatron_checkpoints,megatron_adoption"

exhaustive = pytest.mark.skipif(not EXHAUSTIVE, reason="a variation: EXHAUSTIVE=1 runs it")


def pretended(modules, *world_sizes, **more):
    return every_case(modules, *world_sizes, device="pretend", **more)


#: Cases that take long there, and meet the device no otherwise than those that run every day.
LONG = [
    "case_zero_init",
    "case_parameter_groups_are_kept_as_they_are",
    "case_lamb_is_ours_if_it_is_asked_for",
    "case_client_built_optimizers_get_the_same_treatment",
    "case_schedulers_from_the_json",
    "case_with_the_layouts_withheld_the_comparison_fails",
    "case_sequence_parallelism_without_apex",
    "case_pipeline_variants",
    "case_context_parallel",
    "case_what_the_program_once_saved_is_mended_when_it_is_loaded",
    "case_the_program_saves_and_loads_weights_of_one_step",
    "case_vectors_at_a_rate_of_their_own_and_embeddings_without_ratio",
    "case_tensor_parallel_variants",
    "case_lamb_by_its_name",
    "case_other_optimizers_are_left_alone",
    "case_the_reference_is_the_papers_algorithm",
    "case_without_the_reduction_of_norms_the_comparison_fails",
    "case_built_as_megatron_bridge_builds_it",
]


def everyday(modules, *world_sizes):
    """All but the long ones, unless the run is exhaustive."""
    return [one for one in pretended(modules, *world_sizes) if EXHAUSTIVE or one.values[0].function not in LONG]


def variations(modules, *world_sizes):
    """Those that exhaustive runs alone have."""
    return pretended(modules, *world_sizes) if EXHAUSTIVE else []


@pytest.mark.parametrize("case", pretended(CORE, 2))
def test_core(case, directory):
    check(case, directory)


@pytest.mark.parametrize("case", variations(CORE, 4))
def test_core_on_two_dimensional_meshes(case, directory):
    check(case, directory)


@pytest.mark.parametrize("case", pretended(CHECKPOINTS, 2, only="case_other_state_dicts"))
def test_state_dicts(case, directory):
    """The other checkpoints take longer; the training program's are below."""
    check(case, directory)


@pytest.mark.parametrize("case", variations(CHECKPOINTS, 4, 2))
def test_checkpoints(case, directory):
    check(case, directory)


@pytest.mark.parametrize("case", everyday(ZERO, 2))
def test_zero(case, directory):
    check(case, directory)


@pytest.mark.parametrize("case", variations(ZERO_CHECKPOINTS, 2))
def test_zero_checkpoints(case, directory):
    check(case, directory)


PROGRAM = "pretrain_deepspeed"


@pytest.mark.parametrize("case", variations(PROGRAM, 2))
def test_the_training_programs_deepspeed_engine(case, directory):
    check(case, directory)


SET_FIRST = "case_the_device_is_set_before_the_first_collective"


@pytest.mark.parametrize("case", pretended(PROGRAM, 2, only=SET_FIRST, PRETEND_DEVICES="1"))
def test_one_visible_device_for_each_rank(case, directory):
    """As some schedulers have it: LOCAL_RANK is not the number of the device then."""
    check(case, directory)


IN_FLOAT32 = (
    "case_fsdp2_in_float32_stays_within_rounding",
    "case_gradients_that_only_some_ranks_have",
    "case_gradients_that_no_rank_has",
)


@pytest.mark.parametrize(
    "case", [case for name in IN_FLOAT32 for case in pretended("sharded", 2, only=name, PRETEND_NO_FLOAT64="1")]
)
def test_a_backend_without_float64(case, directory):
    check(case, directory)


@pytest.mark.parametrize("case", everyday(MEGATRON, 2))
def test_megatron(case, directory):
    check(case, directory)


@pytest.mark.parametrize("case", variations(MEGATRON, 4))
def test_megatron_on_four_ranks(case, directory):
    check(case, directory)


@pytest.mark.parametrize("case", variations(MEGATRON_MORE, 2, 1, 4))
def test_more_of_megatron(case, directory):
    check(case, directory)


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
def test_the_training_program(engine, tokens, tmp_path):
    """Stopped and resumed on two devices, it has the losses of two CPU ranks that nothing happened to."""
    run([*torchrun(2), *arguments(engine, tokens, tmp_path / "cpu", *SETTINGS)])
    job = arguments(engine, tokens, tmp_path / "device", *SETTINGS)[len(ENTRIES[engine]) :]
    command = [*torchrun(2), str(REPO / "tests" / "distributed" / "programs" / "pretrain_on_pretend.py"), *job]
    # Some schedulers show each rank its own device only. DeepSpeed takes the local rank for the device's number.
    visible = {"PRETEND_DEVICES": "1"} if engine == "megatron" else {}
    run([*command, "--stop-at", str(STOP)], device="pretend")
    assert list(losses(tmp_path / "device")) == list(range(1, STOP + 1))
    run(command, device="pretend", **visible)
    expected = losses(tmp_path / "cpu")
    assert list(expected) == list(range(1, STEPS + 1))
    assert losses(tmp_path / "device") == pytest.approx(expected, rel=1e-5)
