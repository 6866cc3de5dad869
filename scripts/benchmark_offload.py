"""How long a step of offloaded states takes in DeepSpeed: ALTO beside DeepSpeedCPUAdam, in the same rounds.

    python scripts/benchmark_offload.py                       ZeRO-2 and 3, one thread and two, about ten minutes
    python scripts/benchmark_offload.py --stages 2 --threads 1 --rounds 5

One process, 61M parameters in bf16, optimizer states on the CPU. A round takes a step of each engine, on gradients of
their own; a ratio is the median over the rounds of the ratios within a round. "optimizer" is the inner optimizer's
``step()``, "engine" all of ``engine.step()``: DeepSpeed also finds the norm, clips, and copies weights back. Rounds in
which other processes took more than 2% of the cores are done again, up to three times as many in all.

On a machine with other work, --cpu-seconds counts the CPU seconds of this process instead of the clock's, and takes
every round. That tells less about several threads, which wait for memory together.

DeepSpeedCPUAdam is compiled on first use, which takes a minute or two.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HIDDEN, LAYERS = 1024, 14
PEER = "DeepSpeedCPUAdam"
SMALL = {"exp_avg_dtype": "bfloat16", "grad_ema_dtype": "bfloat16"}
ENGINES: dict[str, dict[str, Any]] = {
    PEER: {"type": "AdamW", "params": {"lr": 1e-4}},
    "ALTO": {"type": "ALTO", "params": {"lr": 1e-3}},
    "ALTO, bf16 states": {"type": "ALTO", "params": {"lr": 1e-3, **SMALL}},
}
#: Bytes that a step moves a parameter, and the ratio to the peer that is aimed at.
TARGETS = {"ALTO": (48, 1.8), "ALTO, bf16 states": (38, 1.4)}
BYTES_OF_PEER = 28
RANK_0 = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}


def child(stage: int, rounds: int, cpu_seconds: bool) -> None:
    """Measure one stage, with the threads that OMP_NUM_THREADS says, and print the rounds."""
    import contextlib

    import deepspeed
    import torch
    from benchmark import Machine

    import alto_distributed.deepspeed  # noqa: F401

    sizes = [(HIDDEN, 4 * HIDDEN) if i % 2 == 0 else (4 * HIDDEN, HIDDEN) for i in range(LAYERS)] + [
        (HIDDEN, 2 * HIDDEN)
    ]
    machine = Machine(torch.device("cpu"))
    clock = time.process_time if cpu_seconds else time.perf_counter
    parts: dict[str, Callable[[], float]] = {}
    engines = []

    def add(name: str, optimizer: dict[str, Any]) -> None:
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "optimizer": optimizer,
            "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
        }
        model = torch.nn.Sequential(*[torch.nn.Linear(*size) for size in sizes])
        engine, *_ = deepspeed.initialize(model=model, config=config)
        engines.append(engine)
        basic, within = engine.basic_optimizer, [0.0]
        if type(basic).__name__ not in (optimizer["type"], name):
            raise SystemExit(f"DeepSpeed steps {type(basic).__name__} for {name}")
        original = basic.step

        def step(*args: Any, **options: Any) -> Any:
            began = clock()
            result = original(*args, **options)
            within[0] += clock() - began
            return result

        basic.step = step
        x = torch.randn(1, HIDDEN).bfloat16()

        def whole() -> float:
            engine.backward(engine(x).float().square().mean())
            within[0] = 0.0
            began = clock()
            engine.step()
            return clock() - began

        parts[f"{name}: engine"] = whole
        parts[f"{name}: optimizer"] = lambda: within[0]

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a minute of compiling for a single rank
    with contextlib.redirect_stdout(sys.stderr):
        for name, optimizer in ENGINES.items():
            add(name, optimizer)
        machine.round(parts)
        machine.round(parts)
        taken = [machine.round(parts) for _ in range(rounds)] if cpu_seconds else machine.quiet_rounds(parts, rounds)
    count = sum(p.numel() if stage < 3 else p.ds_numel for p in engines[0].module.parameters())
    print(json.dumps({"rounds": taken, "parameters": count, "threads": torch.get_num_threads()}))
    sys.stdout.flush()
    os._exit(0)  # engines that were not destroyed may abort as the interpreter ends


def row(stage: int, threads: int, name: str, taken: list[dict[str, float]]) -> str:
    cells = [f"ZeRO-{stage}", str(threads), name]
    for part in ("optimizer", "engine"):
        seconds = [each[f"{name}: {part}"] for each in taken]
        ratios = sorted(each[f"{name}: {part}"] / each[f"{PEER}: {part}"] for each in taken)
        middle = statistics.median(ratios)
        cells += [f"{statistics.median(seconds) * 1e3:.0f}", f"{middle:.2f} ({ratios[0]:.2f} - {ratios[-1]:.2f})"]
    if name in TARGETS:
        least, aim = TARGETS[name]
        met = statistics.median(r[f"{name}: optimizer"] / r[f"{PEER}: optimizer"] for r in taken) <= aim
        cells.append(f"{least / BYTES_OF_PEER:.2f} by bytes, aim {aim}: {'met' if met else 'missed'}")
    else:
        cells.append("")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cpu-seconds", action="store_true", help="instead of the clock, on a busy machine")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.stages[0], options.rounds, options.cpu_seconds)
        return
    lines, notes = [], []
    for stage in options.stages:
        for threads in options.threads:
            variables = {
                "OMP_NUM_THREADS": str(threads),
                "DS_ACCELERATOR": "cpu",
                **RANK_0,
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)]),
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            }
            command = [sys.executable, __file__, "--child", "--stages", str(stage), "--rounds", str(options.rounds)]
            command += ["--cpu-seconds"] if options.cpu_seconds else []
            done = subprocess.run(
                command, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True, check=True
            )
            found = json.loads(done.stdout.splitlines()[-1])
            if found["threads"] != threads:
                raise SystemExit(f"{found['threads']} threads instead of {threads}")
            taken = found["rounds"]
            lines += [row(stage, threads, name, taken) for name in ENGINES]
            notes.append(f"ZeRO-{stage}, {threads}: {max(each['others'] for each in taken):.0%}")
            print("\n".join(lines[-len(ENGINES) :]), flush=True)
    print(f"\n{found['parameters'] / 1e6:.1f}M parameters in bf16, {options.rounds} rounds\n")
    print("| stage | threads | optimizer | its step, ms | x peer | engine.step, ms | x peer | |")
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(lines))
    print(f"\nOther processes took at most: {', '.join(notes)}")


if __name__ == "__main__":
    main()
