"""In which order ALTO and Megatron may be imported.

Megatron is never imported here: without a GPU it needs stand-ins that a test process should not have.
"""

import os
import re
import subprocess
import sys

from tests.helpers.launcher import REPO, environment
from tests.helpers.processes import RUNNER, renumbered, run

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
    """register(), then Megatron; the other order is the one of tests/helpers/megatron_gpt.py."""
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, cwd=REPO, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


# A program under "-m alto_distributed" whose megatron-core calls itself 0.99.1.
OTHER_VERSION = """
import sys
import warnings
from scripts.megatron_on_cpu import install

install()
import megatron.core
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

assert megatron.core.__version__ == "0.99.1"
for config in (OptimizerConfig(optimizer="adam"), OptimizerConfig(optimizer="alto")):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            get_megatron_optimizer(config, [])
        except Exception as error:
            print(config.optimizer, type(error).__name__, error)
    print(*[f"warned {w.message}" for w in caught if "megatron-core" in str(w.message)], sep="\\n")
"""

LACKS_A_METHOD = """
__version__ = "0.99.1"
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
del DistributedOptimizer._get_model_param_range_map
"""


def said_by(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(OTHER_VERSION)
    output = run([sys.executable, *RUNNER, str(script)], PYTHONPATH=f"{tmp_path}{os.pathsep}{REPO}")
    return dict(line.split(" ", 1) for line in output.splitlines() if line.startswith(("adam ", "alto ", "warned ")))


def test_a_megatron_that_lacks_a_method_is_refused_when_alto_is_asked_for(tmp_path):
    """Not at its import: Megatron-DeepSpeed's own scripts, which bring another megatron.core, once died for it."""
    renumbered("megatron.core", tmp_path, "__init__.py", r"\Z", LACKS_A_METHOD)
    said = said_by(tmp_path)
    assert "UnsupportedVersion" not in said.get("adam", "")
    assert said["alto"].startswith("UnsupportedVersion ALTO does not work with megatron-core 0.99.1: Distributed")
    assert "no method _get_model_param_range_map" in said["alto"]
    assert "warned" not in said


def test_a_megatron_of_another_number_warns(tmp_path):
    renumbered("megatron.core", tmp_path, "package_info.py", r"MINOR = \d+\nPATCH = \d+", "MINOR = 99\nPATCH = 1")
    said = said_by(tmp_path)
    assert "UnsupportedVersion" not in said.get("alto", "")
    assert re.search(r"tests ran with megatron-core .*0\.16\.1, .* and 0\.99\.1 is installed", said["warned"])


WITHOUT_OPTIMIZERS = """
import megatron.core  # has no optimizers, like the one in Megatron-DeepSpeed
print("RUNS", megatron.core.__version__)
"""


def test_a_megatron_without_optimizers_can_be_imported(tmp_path):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("__version__ = '0.2.0'\n")
    (tmp_path / "train.py").write_text(WITHOUT_OPTIMIZERS)
    command = [sys.executable, *RUNNER, str(tmp_path / "train.py")]
    assert "RUNS 0.2.0" in run(command, PYTHONPATH=f"{tmp_path}{os.pathsep}{REPO}")
