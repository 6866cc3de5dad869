"""The end of programs that have process groups: gloo's threads are joined, and no exit is an abort."""

import subprocess
import sys

import pytest

from tests.helpers.launcher import REPO, environment
from tests.helpers.processes import run

#: Engines, and whether all threads are joined. Where a framework never lets go of a group, leave() ends the process.
ENGINES = {"plain": True, "fsdp2": False, "deepspeed": True, "deepspeed-stage3": False, "megatron": True}


@pytest.mark.slow
def test_ranks_that_succeed_exit_with_0_whatever_is_under_way():
    """They have trained a step, and have collectives under way. Without leave() about a third of them abort."""
    said = run([sys.executable, "scripts/stress_exits.py", "--engine", *ENGINES, "--exits", "2", "--load", "0"])
    rows = [line.strip("| ").split(" | ") for line in said.splitlines() if "| torchrun |" in line]
    assert [row[0] for row in rows] == list(ENGINES), said
    assert {row[0]: (row[4], row[5]) for row in rows} == dict.fromkeys(ENGINES, ("2", "0")), said
    assert {row[0]: row[-1] == "0" for row in rows} == ENGINES, said


PROGRAM = """
import atexit, sys, tempfile, threading
import torch
import torch.distributed as dist
from alto_distributed.sharding.shutdown import leave, worker_threads

with tempfile.TemporaryDirectory() as directory:
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
group, groups, held = dist.group.WORLD, {"a": dist.group.WORLD}, HELD
atexit.register(print, "exit handler")
threading.Timer(2.0, print, ["thread"]).start()
leave()
print("threads", worker_threads())
"""


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ("[dist.group.WORLD]", "threads 0\nthread\nexit handler\n"),
        ("[(dist.group.WORLD,)]", "thread\nexit handler\n"),  # not found in there, so leave() does not return
    ],
)
def test_a_program_ends_in_order_and_with_0(held, said):
    command = [sys.executable, "-c", PROGRAM.replace("HELD", held)]
    done = subprocess.run(command, cwd=REPO, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, said), done.stderr


def test_a_rank_that_lost_the_others_ends_in_order_and_with_its_code():
    """Groups are alive then, and the interpreter's own end was a SIGABRT once in a while."""
    program = PROGRAM.replace("HELD", "[(dist.group.WORLD,)]").replace("leave", "end").replace("end()", "end(3)")
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=REPO, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "thread\nexit handler\n"), done.stderr
