"""CUDA graphs of steps, without CUDA: recorded and replayed on the pretend accelerator, in a process of its own."""

import ast
import importlib.util
import json
import subprocess
import sys

import pytest

from tests.helpers.launcher import REPO, environment

PROGRAM = "tests/unit/programs/capture_checks.py"
CHECKS = [
    node.name
    for node in ast.parse((REPO / PROGRAM).read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]


@pytest.fixture(scope="module")
def outcomes(directory):
    output = directory / "capture.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.programs.capture_checks", str(output)],
        cwd=REPO,
        env=environment(TRITON_INTERPRET="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text())


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("check", CHECKS)
def test_capture(outcomes, check):
    assert outcomes[check] == "", outcomes[check]
