"""torchrun's restarts, on one machine and on two: the ranks find each other and not their dead predecessors.

The whole program, killed and restarted, is in tests/end_to_end/test_pretrain_runs.py.
"""

import subprocess
import sys
import time

import pytest

from tests.helpers.cases import EXHAUSTIVE
from tests.helpers.launcher import REPO, environment
from tests.helpers.processes import free_port

PROGRAMS = "tests/end_to_end/programs"


def agents(notes, count):
    """As many torchruns as there are machines, sharing two ranks; how each ended, and what they said."""
    notes.mkdir()
    meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=a", f"--nnodes={count}"]
    command = [sys.executable, "-m", "torch.distributed.run", *meet, f"--nproc-per-node={2 // count}"]
    command += ["--max-restarts=1", "--monitor-interval=0.3", f"{PROGRAMS}/restarts.py", str(notes)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [subprocess.Popen(command, cwd=REPO, env=environment(), **pipes) for _ in range(count)]
    said = [agent.communicate(timeout=120)[0] for agent in started]
    return [agent.returncode for agent in started], "\n".join(said)


ONE = pytest.mark.skipif(not EXHAUSTIVE, reason="test_pretrain_runs.py has it every day; EXHAUSTIVE=1 runs it")


@pytest.mark.parametrize("machines", [pytest.param(1, marks=ONE), 2])
def test_ranks_of_a_restart_meet_anew(machines, tmp_path):
    notes = tmp_path / "notes"
    codes, said = agents(notes, machines)
    assert codes == [0] * machines, said[-3000:]
    assert {path.name: path.read_text() for path in notes.glob("ended-*")} == {
        "ended-1-rank-0": "4.0",
        "ended-1-rank-1": "4.0",
    }
    counts = {(notes / f"start-1-rank-{rank}").read_text() for rank in (0, 1)}
    # Each agent counts its own restarts: the count would be no name for a start of all of them.
    assert counts == ({"1"} if machines == 1 else {"0", "1"})


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not tell a process of it")
def test_ranks_are_asked_to_end_when_torchrun_is_killed(tmp_path):
    """They went on alone, and held the lock of their run."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with subprocess.Popen([*command, f"{PROGRAMS}/orphan.py", str(tmp_path)], cwd=REPO, env=environment()) as agent:
        wait_for(tmp_path, "began")
        agent.kill()
    wait_for(tmp_path, "ended")


def wait_for(notes, what):
    until = time.monotonic() + 60
    while len(list(notes.glob(f"{what}-*"))) < 2:
        assert time.monotonic() < until, f"no rank has {what}"
        time.sleep(0.05)


STORE = """
import socket
import torch.distributed as dist
from alto_distributed.pretrain.runtime import own_store

for address, one_machine in (("127.0.0.1", True), ("localhost", False)):
    port = own_store.hold(address, one_machine=one_machine)
    own_store._held[-1].set("secret name", "value")
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    try:
        socket.create_connection(("127.0.0.2", port), timeout=5).close()
        print("open elsewhere")
    except ConnectionRefusedError:
        print("refused elsewhere")
print(dist.TCPStore("127.0.0.1", port, is_master=False).list_keys())
try:
    own_store.hold("127.0.0.1", port)
except OSError as error:
    print(error.strerror[:22])
"""


def test_the_store_of_the_ranks_listens_at_one_address():
    """torch's own listens on all interfaces, at a port that was free a moment before. On several machines it must not
    be the loopback address: many hosts give that to their own name. And what torch's store cannot do: keep a secret."""
    done = subprocess.run([sys.executable, "-c", STORE], cwd=REPO, env=environment(), capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "refused elsewhere",
        "open elsewhere",
        "['secret name']",  # to anyone who connects
        "Address already in use",  # another job's: not joined
    ], done.stderr
