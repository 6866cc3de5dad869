"""In which order ALTO and Megatron may be imported.

Megatron is never imported here: without a GPU it needs stand-ins that a test process should not have.
"""

import subprocess
import sys

from .launcher import REPO, environment

IMPORTS = """
import sys

import torch

import alto_distributed

alto_distributed.register()
alto_distributed.ALTO([torch.ones(2, 2, requires_grad=True)])
loaded = [name for name in sys.modules if name.split(".")[0] in ("megatron", "deepspeed")]
assert not loaded, f"importing, registering and using ALTO imported {loaded}"

from scripts.megatron_on_cpu import install

install()
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

assert get_megatron_optimizer.knows_alto
assert "alto_distributed.megatron" in sys.modules
assert "megatron.training" not in sys.modules, "a library user has no Megatron-LM"
"""


def test_nothing_is_imported_before_its_time_and_then_registered():
    """register(), then Megatron; the other order is the one of tests/megatron_gpt.py."""
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, cwd=REPO, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
