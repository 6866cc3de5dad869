"""Run many cases over real process groups with one launch of ranks.

Starting ranks costs seconds, so a module of cases (functions named ``case_*`` in tests/distributed/cases) is started
once per world size, and every case becomes a pytest test of its own that looks up how it
went. Each rank notes the outcome of each case in a file of its own; a case has passed when all of them
say so. If some ranks fail and others do not come out of a case (they wait in a collective), the launch is
stopped, and the cases after it count as failed too.

    python -m tests.helpers.launcher MODULE[,MODULE...] WORLD DIRECTORY

imports the modules and forks the ranks, each with the variables and the store that torchrun would give it: importing a
framework takes seconds, and is done once and not by every rank. What torchrun itself does is for the tests that start
whole programs. Modules that are named together share the ranks.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]

#: The package of the modules of cases, which are named without it.
CASES = "tests.distributed.cases"


#: Also what two cores have no time for in everyday runs: variations of what is tested anyway.
EXHAUSTIVE = bool(os.environ.get("EXHAUSTIVE"))


def worlds(*sizes, exhaustive=()):
    """Mark a case for some world sizes, given as plain numbers, and some more for exhaustive runs."""
    del sizes, exhaustive  # read by cases_of
    return lambda case: case


def some(cases, world):
    """All of a case's variations at two ranks on the CPU and in exhaustive runs; else every fourth."""
    usual = world == 2 and os.environ.get("DEVICE", "cpu") == "cpu"
    return cases if usual or EXHAUSTIVE else dict(list(cases.items())[::4])


@functools.cache
def cases_of(modules, world):
    """Modules' cases for a world size, (module, name) each, read from their source: importing may import DeepSpeed."""
    cases = []
    for module in modules.split(","):
        source = (REPO / CASES.replace(".", "/") / f"{module}.py").read_text()
        for node in ast.parse(source).body:
            for mark in getattr(node, "decorator_list", ()):
                if not isinstance(mark, ast.Call) or ast.unparse(mark.func) != "worlds":
                    continue
                sizes = [ast.literal_eval(size) for size in mark.args]
                for keyword in mark.keywords if EXHAUSTIVE else ():
                    sizes += ast.literal_eval(keyword.value)
                if world in sizes:
                    cases.append((module, node.name))
    names = [name for _, name in cases]
    if len(set(names)) < len(names):
        raise ValueError(f"two cases of {modules} have one name")
    return cases


def environment(device=None, **more):
    """Variables for the processes that tests start."""
    device = device or os.environ.get("DEVICE", "cpu")
    others = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    return {
        **others,
        "OMP_NUM_THREADS": "1",
        "DEVICE": device,
        **({"DS_ACCELERATOR": "cpu"} if device == "cpu" else {}),
        # DeepSpeed compiles its shared-memory collectives on first use, with the ninja beside our python.
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(REPO / ".cache" / "torch_extensions")),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        # ALTO_OVERLAY: a folder with another release of a framework (scripts/matrix.py).
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("ALTO_OVERLAY"), str(REPO)])),
        **more,
    }


def without_compiling():
    """DeepSpeed compiles its shared-memory all-reduce when ranks connect on CPUs, for a minute of both cores, and uses
    it for inference and AutoTP alone. Everyday runs take gloo instead, as on systems other than Linux."""
    import deepspeed

    if not EXHAUSTIVE:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def launch(module, world, directory, timeout=1200, device=None, **more):
    """Start the ranks once; returns {case: None or what went wrong}.

    Args:
        module: whose cases; several with commas between them.
        world: how many ranks.
        directory: where they leave their files.
        timeout: seconds.
        device: overrides DEVICE (tests/helpers/devices.py).
        **more: variables for the ranks.
    """
    key = module, world, str(directory), device, *sorted(more.items())
    if key not in _launched:  # whatever the timeout
        _launched[key] = _launch(module, world, directory, timeout, environment(device, **more))
    return _launched[key]


_launched = {}


def _launch(module, world, directory, timeout, variables):
    command = [sys.executable, "-m", "tests.helpers.launcher", module, str(world), str(directory)]
    with tempfile.TemporaryFile("w+") as output:  # no pipe: processes that ranks leave behind would keep it open
        streams = {"stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=REPO, env=variables, start_new_session=True, **streams)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        log = output.read()
    outcomes = [_read(directory, module, world, rank) for rank in range(world)]
    return {case: _verdict(case, outcomes, log) for _, case in cases_of(module, world)}


def every_case(module, *world_sizes):
    """Parameters (world, case) for a test of each."""
    import pytest

    return [
        pytest.param(world, case, id=f"{world} ranks-{case}")
        for world in world_sizes
        for _, case in cases_of(module, world)
    ]


def check(module, world, case, directory, device=None, **more):
    """Fail the test if the case did, with what its ranks said."""
    import pytest

    from . import devices

    if not devices.enough(world):
        pytest.skip(f"there are fewer than {world} GPUs")
    problem = launch(module, world, directory, device=device, **more)[case]
    if problem and problem.startswith(SKIPPED):
        pytest.skip(problem.removeprefix(SKIPPED))
    if problem:
        pytest.fail(problem, pytrace=False)


#: What a rank notes of a case that has called pytest.skip begins with it.
SKIPPED = "skipped: "


def _verdict(case, outcomes, log):
    reasons = {notes.get(case) for notes in outcomes}
    if len(reasons) == 1 and str(reason := reasons.pop()).startswith(SKIPPED):
        return reason
    failed = [f"rank {rank}:\n{notes[case]}" for rank, notes in enumerate(outcomes) if notes.get(case)]
    if failed:
        return "\n".join(failed)
    absent = [rank for rank, notes in enumerate(outcomes) if case not in notes]
    return f"ranks {absent} never finished it; end of the log:\n{log[-4000:]}" if absent else None


def _notes(directory, module, world, rank):

    return Path(directory) / f"{module}.{world}.{rank}.jsonl"


def _read(directory, module, world, rank):
    path = _notes(directory, module, world, rank)
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: problem for name, problem, _ in map(json.loads, lines)}


def _all_through(case, world, patience=60):
    """Whether every rank has come out of ``case``, well or not. If one fails alone, the others never will."""
    from torch.distributed.distributed_c10d import _get_default_store

    store, deadline = _get_default_store(), None
    store.add(case, 1)
    while store.add(case, 0) < world:
        deadline = deadline or time.monotonic() + patience
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _main(modules, world, directory):
    """Fork the ranks, and hold the store in which they meet until they have ended."""
    import torch.distributed as dist

    from . import devices

    start = _fork
    if devices.NAME == "cuda" or os.environ.get("SPAWN_RANKS"):
        start = _spawn  # CUDA does not live through a fork, and importing a framework may touch it
    else:
        _import(modules)
    meeting = socket.create_server(("127.0.0.1", 0))  # before the fork, so that ranks know where; the store comes after
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(meeting.getsockname()[1])}
    where.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), TORCHELASTIC_USE_AGENT_STORE="True")
    ranks = [start(modules, directory, {**where, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(world)]
    failed = True
    try:
        # Not libuv's: it cannot take over a socket in every torch that is supported.
        held = {"master_listen_fd": meeting.detach(), "use_libuv": False}
        port = int(where["MASTER_PORT"])
        _store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, **held)
        failed = False
        while ranks and not failed:
            ended, status = os.wait()
            ranks.remove(ended)
            failed = bool(status)
            if failed:
                print(f"a rank ended with {os.waitstatus_to_exitcode(status)}", flush=True)
        time.sleep(failed)  # for what the others have to say
    finally:
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
    sys.exit(failed)


def _fork(modules, directory, variables):
    """A rank; returns its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ.update(variables)
        _rank_main(modules, directory)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _import(modules):
    """What a rank needs before its cases."""
    from . import devices, releases

    devices.install(modules)
    for module in modules.split(","):
        importlib.import_module(f"{CASES}.{module}")
    if "deepspeed" in sys.modules:
        without_compiling()
        if releases.DEEPSPEED < (0, 19, 8):
            releases.wait_for_all_gathers()


def _spawn(modules, directory, variables):
    """The same, in a process that begins anew."""
    command = [sys.executable, "-m", "tests.helpers.launcher", modules, "rank", directory]
    return os.posix_spawn(sys.executable, command, {**os.environ, **variables})


def _rank_main(module, directory):
    import pytest
    import torch
    import torch.distributed as dist

    from alto_distributed.sharding.shutdown import shutdown

    from . import devices

    devices.connect()
    rank, world, failed = dist.get_rank(), dist.get_world_size(), False
    with _notes(directory, module, world, rank).open("w") as notes:
        for home, name in cases_of(module, world):
            if os.environ.get("ALTO_CASES", "") not in name:
                continue  # to try one case by hand
            case = getattr(importlib.import_module(f"{CASES}.{home}"), name)
            torch.manual_seed(1234)
            problem, began = None, time.monotonic()
            try:
                case(**({"directory": Path(directory)} if "directory" in inspect.signature(case).parameters else {}))
            except pytest.skip.Exception as reason:
                problem = f"{SKIPPED}{reason}"
            except BaseException:
                problem = traceback.format_exc()
            notes.write(json.dumps([name, problem, round(time.monotonic() - began, 1)]) + "\n")
            notes.flush()
            if not _all_through(name, world):
                os._exit(1)
            failed = failed or bool(problem and not problem.startswith(SKIPPED))
    if not failed:  # else a collective may still be waiting for another rank
        shutdown()


if __name__ == "__main__":
    if sys.argv[2] == "rank":
        _import(sys.argv[1])
        _rank_main(sys.argv[1], sys.argv[3])
    else:
        _main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
