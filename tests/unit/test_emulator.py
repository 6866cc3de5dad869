"""The Triton kernels as compiled for AMD's GPUs, run on the CPU by an emulator (tests/helpers/amd).

Triton compiles and launches as it does on such a GPU, in a process of its own (unit/programs/triton_emulate.py).
What the emulator makes of each instruction is tested in test_emulator_instructions.py.
"""

import importlib.util
import itertools
import json
import os
import subprocess
import sys

import pytest

from tests.helpers.launcher import EXHAUSTIVE, REPO

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="tinygrad needs Python 3.11"),
    *(
        pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
        for name in ("tinygrad", "triton", "msgpack")
    ),
]

ALL_DTYPES = [
    "-".join(names)
    for names in itertools.product(
        ("float32", "bfloat16", "float16"),
        ("float32", "bfloat16", "float16"),
        ("float32", "bfloat16"),
        ("float32", "bfloat16", "None"),
    )
]
# Of weights, gradients, exp_avg and grad_ema. Every day one on each GPU.
DTYPES = {
    "gfx942": ["bfloat16-bfloat16-bfloat16-bfloat16"],
    "gfx1100": ["float32-float32-float32-float32"],
}
CHECKS = ("check_proof", "check_weights", "check_sums")
CASES = [f"{target}-{dtypes}" for target in DTYPES for dtypes in (ALL_DTYPES if EXHAUSTIVE else DTYPES[target])]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    directory = tmp_path_factory.mktemp("emulator")
    output = directory / "found.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.programs.triton_emulate", str(output), *CASES],
        cwd=REPO,
        env={
            **os.environ,
            "PYTHONPATH": str(REPO),
            "TRITON_INTERPRET": "0",
            "TRITON_CACHE_DIR": str(directory / "cache"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text())


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES)
def test_the_compiled_code_is_right(found, case, check):
    """States to the bit, weights to the bit over all magnitudes, sums to rounding, in whatever order programs run."""
    failure = found["outcomes"][f"{check} {case}"]
    assert failure == "", failure


@pytest.mark.parametrize("target", DTYPES)
def test_every_instruction_of_the_kernels_has_a_test_of_its_own(found, target):
    from tests.helpers.amd.samples import SAMPLES

    used = found["used"][target]
    assert len(used) > 90  # the instrument sees what is there
    missing = [f"{label}: {code}" for label, code in sorted(used.items()) if label not in SAMPLES]
    assert not missing, "add to tests/helpers/amd/samples.txt:\n" + "\n".join(missing)
