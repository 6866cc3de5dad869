"""How often a job that has done its work ends with an exit code other than 0, on a busy machine.

    python scripts/stress_exits.py --engine deepspeed megatron --launcher mpirun --exits 200 --load 4
    python scripts/stress_exits.py --engine plain --without-shutdown        # how it was: SIGABRT

The launcher starts two ranks, which import the framework once and fork a child for each exit. The children of a round
join a process group, build the engine, take a step, start a burst of collectives and end. Each exit is a whole end of
an interpreter. The burst makes the fault likely: its tensors have no reference but those of gloo's threads.

Under mpirun the children do not initialize MPI, which a process can do only once; a run of the training program does.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from alto_distributed.sharding.shutdown import leave, shutdown, worker_threads

REPO = Path(__file__).resolve().parent.parent
WORLD = 2
ENGINES = ("plain", "fsdp2", "deepspeed", "deepspeed-stage3", "megatron")
PATIENCE = 120  # seconds for one round


def main() -> None:
    options = _options()
    if options.notes is None:
        _launch(options)
        return
    rank = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
    for engine in options.engine:
        _import(engine)
        outcomes = options.notes / f"{engine}-{rank}.jsonl"
        for count in range(options.exits // WORLD):
            threads = options.notes / f"{engine}-{rank}-{count}-threads"
            child = os.fork()
            if child == 0:
                _job(engine, rank, options.notes / f"{engine}-{count}", options.burst)
                if not options.without_shutdown:
                    shutdown()
                threads.write_text(str(worker_threads()))
                if not options.without_shutdown:
                    leave()
                return  # to the end of this file, and of the interpreter
            code = _wait(child)
            with outcomes.open("a") as file:
                left = int(threads.read_text()) if threads.exists() else None
                file.write(json.dumps({"code": code, "threads": left}) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=["plain"])
    parser.add_argument("--launcher", choices=("torchrun", "mpirun", "deepspeed"), default="torchrun")
    parser.add_argument("--exits", type=int, default=200, help="of each engine, over both ranks (default: 200)")
    parser.add_argument("--load", type=int, default=4, help="busy processes beside the job (default: 4)")
    parser.add_argument("--burst", type=int, default=8, help="collectives that nobody waits for (default: 8)")
    parser.add_argument("--without-shutdown", action="store_true", help="end as if there were nothing to do")
    parser.add_argument("--notes", type=Path, help=argparse.SUPPRESS)  # the ranks'
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # DeepSpeed's launcher gives it
    return parser.parse_args()


# -- the process that was started by hand ------------------------------------------------------------------


def _launch(options: argparse.Namespace) -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.load)]
    try:
        with tempfile.TemporaryDirectory() as directory:
            job = [str(Path(__file__)), *sys.argv[1:], "--notes", directory]
            done = subprocess.run([*_launcher(options.launcher), *job], env=_environment(), check=False)
            if done.returncode:
                raise SystemExit(f"{options.launcher} ended with {done.returncode}: its ranks failed, not their exits")
            _report(options, Path(directory))
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _launcher(name: str) -> list[str]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    program, ranks = shutil.which(name, path=path) or name, str(WORLD)
    if name == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    if name == "mpirun":
        return [program, "--oversubscribe", "--bind-to", "none", "-n", ranks, sys.executable]
    return [program, "--num_gpus", ranks, "--master_port", port]


def _environment() -> dict[str, str]:
    names = "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMP_NUM_THREADS"
    ours = {**dict.fromkeys(names, "1"), "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    ours["PYTHONPATH"] = f"{REPO}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    ours["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **ours}


def _report(options: argparse.Namespace, notes: Path) -> None:
    print("| engine | launcher | load | shutdown | exits | red | exit codes | threads left |")
    print("|---|---|---|---|---|---|---|---|")
    for engine in options.engine:
        lines = [line for path in notes.glob(f"{engine}-?.jsonl") for line in path.read_text().splitlines()]
        outcomes = [json.loads(line) for line in lines]
        codes = collections.Counter(str(outcome["code"]) for outcome in outcomes)
        threads = {outcome["threads"] for outcome in outcomes}
        row = [engine, options.launcher, options.load, "no" if options.without_shutdown else "yes", len(outcomes)]
        row += [len(outcomes) - codes["0"], dict(codes), ", ".join(sorted(map(str, threads)))]
        print("| " + " | ".join(map(str, row)) + " |")


# -- the ranks ---------------------------------------------------------------------------------------------


def _import(engine: str) -> None:
    """What is slow, once for all children."""
    if engine == "megatron":
        from scripts.megatron_on_cpu import install

        install()
        import alto_distributed.pretrain.engines.megatron.engine
    elif engine.startswith("deepspeed"):
        import alto_distributed.pretrain.engines.deepspeed.engine  # noqa: F401


def _wait(child: int) -> int | None:
    """The child's exit code; None if it hangs."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _job(engine: str, rank: int, meeting: Path, burst: int) -> None:
    # DeepSpeed and Megatron ask for these; the ranks meet in a file.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD)
    if engine == "fsdp2":
        _fsdp2_step()
    elif engine != "plain":
        _engine_step(engine)
    for _ in range(burst):
        dist.all_reduce(torch.ones(10_000), async_op=True)


def _fsdp2_step() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from alto_distributed import ALTO, param_groups

    model = torch.nn.Sequential(torch.nn.Linear(15, 37), torch.nn.Linear(37, 5))
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    optimizer = ALTO(param_groups(model))
    model(torch.ones(3, 15)).sum().backward()
    optimizer.step()


def _engine_step(name: str) -> None:
    from alto_distributed.pretrain.config.settings import parse
    from alto_distributed.pretrain.engines.base import build

    model = {"layers": 1, "hidden": 16, "heads": 2, "sequence": 8, "vocabulary": 64, "dropout": 0.0}
    stage = 3 if name == "deepspeed-stage3" else 2
    settings: dict[str, Any] = {
        "engine": name.partition("-")[0],
        "model": model,
        "training": {"global_batch": 8, "micro_batch": 4, "precision": "fp32"},
        "deepspeed": {"config": str(REPO / f"configs/deepspeed/pretrain-stage{stage}.json")},
    }
    engine = build(parse(settings))
    engine.train([torch.randint(0, 64, (4, 9))], 0.01)
    engine.close()


if __name__ == "__main__":
    main()
