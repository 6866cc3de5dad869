"""What is wrong with a run is one line, and the exit code says whose it is: under real launchers, and before them."""

import json
import subprocess
import sys

import pytest

from tests.helpers.launcher import EXHAUSTIVE, REPO, environment
from tests.helpers.light_engine import settings
from tests.helpers.pretrain_runs import mpirun, prepare_bytes, records
from tests.helpers.processes import MPI_AS_ROOT, TORCHRUN, beside_python


def ours(stderr):
    return [line for line in stderr.splitlines() if line.startswith("alto_distributed pretrain: ")]


def test_a_launch_script_refuses_in_one_line_before_any_rank_is_started(tmp_path):
    """torchrun alone ends with 1, and with thirty lines of its own."""
    command = ["bash", "launch/torchrun.sh", "--config", "configs/gpt2-tiny.yaml", "traning.seed=3"]
    variables = environment(PY=sys.executable, GPUS="2")
    done = subprocess.run(command, cwd=REPO, env=variables, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert ours(done.stderr)[0].startswith("alto_distributed pretrain: there is no setting 'traning'; did you mean")


def test_a_run_that_diverges_says_so_once_for_all_ranks(tmp_path):
    """It was a traceback for each rank."""
    config = tmp_path / "run.yaml"
    run = settings(str(prepare_bytes(tmp_path))).as_dict()
    config.write_text(json.dumps({**run, "logs": {**run["logs"], "report": False}}))
    into = tmp_path / "run"
    words = ["pretrain", "--config", str(config), "--into", str(into)]
    program = str(REPO / "tests/end_to_end/programs/diverging.py")
    variables = environment(PYTHONPATH=str(REPO))
    done = subprocess.run(
        [*TORCHRUN, program, *words], cwd=REPO, env=variables, capture_output=True, text=True, timeout=200, check=False
    )
    assert ours(done.stderr) == ["alto_distributed pretrain: gradients overflow: lower optimizer.lr"], done.stderr[
        -4000:
    ]
    # What else there is comes from torchrun, which names the ranks with their exit codes, and ends with 1 itself.
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    codes = [line.split(":")[1].split()[0] for line in done.stderr.splitlines() if "exitcode  :" in line]
    assert codes
    assert set(codes) <= {"1", "-15"}  # the other one may have been ended by torchrun
    assert records(into)[-1] == {"step": 3, "diverged": True}


@pytest.mark.skipif(not EXHAUSTIVE, reason="test_command_line.py has it without launchers; EXHAUSTIVE=1 runs it")
@pytest.mark.parametrize("launcher", ["mpirun", "deepspeed"])
def test_other_launchers_end_with_the_code_of_a_rank_and_say_it_once(launcher):
    if launcher == "mpirun":
        start = [*mpirun(2), "-m"]
    else:
        start = [beside_python("deepspeed"), "--num_gpus", "2", "--module"]
    command = [*start, "alto_distributed", "pretrain", "--config", "configs/gpt2-tiny.yaml", "traning.seed=3"]
    variables = environment(**MPI_AS_ROOT)
    done = subprocess.run(command, cwd=REPO, env=variables, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    assert len(ours(done.stdout + done.stderr)) == 1, done.stdout + done.stderr
