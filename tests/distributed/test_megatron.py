"""Megatron: each case of cases/megatron*.py a test. They share their ranks, for Megatron takes long to import."""

import pytest

from tests.helpers.cases import every_case
from tests.helpers.launcher import check

MODULES = ",".join(
    f"{name}"
    for name in (
        "megatron_refusals",
        "megatron_config",
        "megatron",
        "megatron_parallel",
        "megatron_precision",
        "nonfinite_megatron",
        "zero_gradients_megatron",
        "megatron_fsdp",
        "megatron_experts",
        "agreement_megatron",
        "megatron_checkpoints",
        "megatron_adoption",
        "megatron_async",
        "megatron_overlap",
        "megatron_offload",
        "megatron_fp8",
        "megatron_program",
        "engines",  # the last ones: DeepSpeed comes in here
        "program_engines",
    )
)


@pytest.mark.slow
@pytest.mark.parametrize("case", every_case(MODULES, 2, 1, 4))
def test_megatron(case, directory):
    check(case, directory)
