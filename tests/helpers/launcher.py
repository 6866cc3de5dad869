"""Run many cases over real process groups with one launch of ranks.

Starting ranks costs seconds, so modules of cases (tests/helpers/cases.py) are started once per world size, and every
case becomes a pytest test of its own that looks up how it went. Only those run that pytest has selected, and what they
need. Each rank notes the outcome of each case in a file of its own; a case has passed when all of them say so. If some
ranks fail and others do not come out of a case (they wait in a collective), the launch is stopped, and the cases after
it count as failed too.

    python -m tests.helpers.launcher MODULE[,MODULE...] WORLD DIRECTORY [CASE...]

imports the modules and forks the ranks, each with the variables and the store that torchrun would give it: importing a
framework takes seconds, and is done once and not by every rank. What torchrun itself does is for the tests that start
whole programs. Modules that are named together share the ranks. CASE is the id of a case or a part of several.
"""

import contextlib
import gc
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
import zlib
from pathlib import Path

from .cases import CASES, EXHAUSTIVE, REPO, Launch, functions_in, with_all_before


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
        # ALTO_OVERLAY: a folder with another release of a framework (scripts/matrix.py). ALTO_MEGATRON_LM: a tree of
        # Megatron-LM, whose megatron/ comes before the installed one; it has a tests/ too, which comes after ours.
        "PYTHONPATH": os.pathsep.join(
            filter(None, [os.environ.get("ALTO_OVERLAY"), str(REPO), os.environ.get("ALTO_MEGATRON_LM")])
        ),
        **more,
    }


def without_compiling():
    """DeepSpeed compiles its shared-memory all-reduce when ranks connect on CPUs, for a minute of both cores, and uses
    it for inference and AutoTP alone. Everyday runs take gloo instead, as on systems other than Linux."""
    import deepspeed

    if not EXHAUSTIVE or os.environ.get("ALTO_OVERLAY"):
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


#: Launch -> ids of the cases that this pytest session runs, and of what they need.
_selected = {}
#: (launch, directory, variables) -> case -> what went wrong.
_launched = {}


def select(cases):
    """Say which cases the tests will ask for, before the first of them does."""
    _selected.update(with_all_before(cases))


def check(case, directory, **variables):
    """Fail the test if the case did, with what its ranks said.

    Args:
        case: a parameter of ``every_case``.
        directory: where ranks leave their files.
        **variables: more of them for the ranks.
    """
    import pytest

    from . import devices

    if not devices.enough(case.launch.world):
        pytest.skip(f"there are fewer than {case.launch.world} GPUs")
    problem = _outcomes(case.launch, Path(directory), **variables)[case.id]
    if problem and problem.startswith(SKIPPED):
        pytest.skip(problem.removeprefix(SKIPPED))
    if problem:
        pytest.fail(problem, pytrace=False)


def _outcomes(launch, directory, **variables):
    """Start the ranks once, after those that save what they load; returns {case: None or what went wrong}."""
    key = launch, directory, *sorted(variables.items())
    if key not in _launched:
        chosen = [case for case in launch.cases().values() if case.id in _selected[launch]]
        for earlier in dict.fromkeys(before.launch for case in chosen for before in case.before()):
            if earlier != launch:
                _outcomes(earlier, directory, **variables)
        _launched[key] = run(launch, [case.id for case in chosen], directory, **variables)
    return _launched[key]


def run(launch, ids, directory, timeout=1200, **variables):
    """Start ranks for some cases; returns {case: None or what went wrong}."""
    variables = environment(launch.device, **dict(launch.variables), **variables)
    command = [sys.executable, "-m", "tests.helpers.launcher", launch.modules, str(launch.world), str(directory), *ids]
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
    outcomes = [_read(directory, launch.modules, launch.world, rank) for rank in range(launch.world)]
    return {case: _verdict(case, outcomes, log) for case in ids}


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
    if len(module) > 100:  # a file's name has at most 255 characters
        module = f"{module[:100]}.{zlib.crc32(module.encode()):08x}"
    return Path(directory) / f"{module}.{world}.{rank}.jsonl"


def _read(directory, module, world, rank):
    path = _notes(directory, module, world, rank)
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: problem for name, problem, *_ in map(json.loads, lines)}


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


def _main(modules, world, directory, words):
    """Fork the ranks, and hold the store in which they meet until they have ended."""
    import torch.distributed as dist

    from . import devices

    start = _fork
    if devices.NAME == "cuda" or os.environ.get("SPAWN_RANKS"):
        start = _spawn  # CUDA does not live through a fork, and importing a framework may touch it
    else:
        _import(modules, world, words)
        gc.freeze()  # frameworks collect garbage at every save, and would walk all that was imported each time
    meeting = socket.create_server(("127.0.0.1", 0))  # before the fork, so that ranks know where; the store comes after
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(meeting.getsockname()[1])}
    where.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), TORCHELASTIC_USE_AGENT_STORE="True")
    numbers = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    ranks = [start(modules, directory, words, {**where, **number}) for number in numbers]
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


def _fork(modules, directory, words, variables):
    """A rank; returns its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ.update(variables)
        _rank_main(modules, directory, words)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _import(modules, world, words):
    """What a rank needs before its cases."""
    from . import devices, releases

    devices.install(modules)
    importlib.import_module("torch._dynamo")  # building any optimizer would, on each rank
    for module in dict.fromkeys(case.module for case in _chosen(modules, world, words)):
        functions = vars(importlib.import_module(f"{CASES}.{module}"))
        for name, _, settings, *_ in functions_in(module):
            if (there := (*getattr(functions[name], "settings", (None,)),)) != settings:
                raise ValueError(f"{module}.{name} has the settings {there}, and its source shows {settings}")
    if "deepspeed" in sys.modules:
        without_compiling()
        if releases.DEEPSPEED < (0, 19, 8):
            releases.wait_for_all_gathers()


def _spawn(modules, directory, words, variables):
    """The same, in a process that begins anew."""
    command = [sys.executable, "-m", "tests.helpers.launcher", modules, "rank", directory, *words]
    return os.posix_spawn(sys.executable, command, {**os.environ, **variables})


def _chosen(modules, world, words):
    """The cases to run: all without ``words``, which are ids of cases or parts of them."""
    cases = Launch(modules, world, os.environ.get("DEVICE", "cpu")).cases()
    parts = [word for word in words if word not in cases]
    return [case for name, case in cases.items() if not words or name in words or any(part in name for part in parts)]


def _rank_main(modules, directory, words):
    import pytest
    import torch
    import torch.distributed as dist

    from alto_distributed.sharding.shutdown import shutdown

    from . import devices
    from .process_state import restored

    devices.connect()
    rank, world, failed = dist.get_rank(), dist.get_world_size(), False
    with _notes(directory, modules, world, rank).open("w") as notes:
        for case in _chosen(modules, world, words):
            function = getattr(importlib.import_module(f"{CASES}.{case.module}"), case.function)
            given = {"directory": Path(directory), **getattr(function, "settings", {None: {}})[case.setting]}
            asked_for = {name: given[name] for name in inspect.signature(function).parameters}
            torch.manual_seed(1234)
            problem, began, spent = None, time.monotonic(), time.process_time()
            try:
                with restored():
                    function(**asked_for)
            except pytest.skip.Exception as reason:
                problem = f"{SKIPPED}{reason}"
            except BaseException:
                problem = traceback.format_exc()
            seconds = [round(time.monotonic() - began, 1), round(time.process_time() - spent, 1)]  # on the wall, of CPU
            notes.write(json.dumps([case.id, problem, *seconds]) + "\n")
            notes.flush()
            if not _all_through(case.id, world):
                os._exit(1)
            failed = failed or bool(problem and not problem.startswith(SKIPPED))
    if not failed:  # else a collective may still be waiting for another rank
        shutdown()


if __name__ == "__main__":
    _modules, _world, _directory, *_words = sys.argv[1:]
    if _world == "rank":
        _import(_modules, int(os.environ["WORLD_SIZE"]), _words)
        _rank_main(_modules, _directory, _words)
    else:
        _main(_modules, int(_world), _directory, _words)
