"""How long an optimizer step takes, and what memory: ALTO's kernels beside their peers, in one run on one machine.

    python scripts/benchmark.py                     64M parameters, a minute or two
    python scripts/benchmark.py --model 345m        GPT-2 345M's true shapes, in about five minutes; needs 18 GiB
    python scripts/benchmark.py --only alto,adamw   names that begin so

Writes benchmark.md, benchmark.json and benchmark.png into --into. Times are of this machine: only their ratios travel.
A machine changes its speed from one second to the next, so nothing is compared with what was measured at another time:
each round is a triad, a step of torch's fused AdamW and a step of the peer, on the same weights and gradients, and a
ratio is the median over the rounds of the ratios within a round. Rounds in which other processes took more than 2% of
the cores are done again, up to three times as many in all; what remains is said in the report.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmark_peers import BASELINE, TRAFFIC, Groups, Peer, baseline, peers
from benchmark_report import draw, table

#: Hidden size and layers.
MODELS = {"tiny": (64, 2), "64m": (1024, 1), "345m": (1024, 24)}
#: Elements of each of the triad's three tensors: far more than a cache holds.
TRIAD = 1 << 26
#: Share of all cores that others may take in a round.
QUIET = 0.02


def shapes(model: str) -> list[tuple[int, ...]]:
    """A GPT-2's parameters, tied embedding once."""
    h, layers = MODELS[model]
    layer = [(h,), (h,), (3 * h, h), (3 * h,), (h, h), (h,), (h,), (h,), (4 * h, h), (4 * h,), (h, 4 * h), (h,)]
    return [(50304, h), (1024, h), *layer * layers, (h,), (h,)]


class Machine:
    """Times what is to be timed, and knows how fast memory is at the moment.

    The triad is torch's own a = b + s c in float32, counted as 12 bytes an element, and the copy as 8. A CPU reads a
    line before it writes to it unless it is told otherwise, so its memory moves more than is counted here.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._a, self._b, self._c = (torch.ones(TRIAD, device=device) for _ in range(3))

    def seconds(self, step: Callable[[], Any]) -> float:
        self._wait()
        began = time.perf_counter()
        step()
        self._wait()
        return time.perf_counter() - began

    def triad(self) -> float:
        """Bytes a second."""
        return 12 * TRIAD / self.seconds(lambda: torch.add(self._b, self._c, alpha=3.0, out=self._a))

    def copy(self) -> float:
        """Bytes a second."""
        return 8 * TRIAD / self.seconds(lambda: self._a.copy_(self._b))

    def round(self, parts: dict[str, Callable[[], float]]) -> dict[str, float]:
        """Each part's figure, and which share of all cores other processes took meanwhile."""
        others, began = _others(), time.perf_counter()
        figures = {name: part() for name, part in parts.items()}
        cores = (time.perf_counter() - began) * (os.cpu_count() or 1)
        return {**figures, "others": max(0.0, _others() - others) / cores}

    def quiet_rounds(self, parts: dict[str, Callable[[], float]], wanted: int) -> list[dict[str, float]]:
        """So many rounds: quiet ones, or else the quietest of three times as many. Their figures have no say in it."""
        done: list[dict[str, float]] = []
        while len(done) < 3 * wanted and sum(each["others"] <= QUIET for each in done) < wanted:
            done.append(self.round(parts))
        return sorted(done, key=lambda each: each["others"])[:wanted]

    def extra_memory(self, step: Callable[[], Any]) -> int:
        """Bytes that a step needs at its peak, beyond what there is before it."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            step()
            return torch.cuda.max_memory_allocated(self.device) - before
        Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is used now
        before = _kilobytes("VmRSS")
        step()
        return (_kilobytes("VmHWM") - before) * 1024

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def __str__(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "CPU")
        return f"{name}, {os.cpu_count()} cores"


def _others() -> float:
    """Seconds of the cores' time that went to other processes than this one (and to the host of a virtual machine)."""
    ticks = os.sysconf("SC_CLK_TCK")
    user, nice, system, _, _, *interrupts = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    own = os.times()
    return sum(map(int, (user, nice, system, *interrupts))) / ticks - own.user - own.system


def _kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def state_bytes(optimizer: Any) -> int:
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def measure(model: str, rounds: int, only: tuple[str, ...], device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, device=device) * 0.02) for shape in shapes(model)]
    for p in params:
        p.grad = torch.randn(p.shape, device=device) * 1e-3
    count = sum(p.numel() for p in params)
    machine = Machine(device)

    def groups() -> Groups:
        split = [[p for p in params if p.ndim >= 2], [p for p in params if p.ndim < 2]]
        return [{"params": split[0], "weight_decay": 1e-4}, {"params": split[1], "weight_decay": 0.0}]

    def prepared(build: Callable[[Groups], Any]) -> tuple[Any, dict[str, int]]:
        optimizer = build(groups())
        optimizer.step()  # makes the states
        optimizer.step()
        return optimizer, {"extra": machine.extra_memory(optimizer.step), "state": state_bytes(optimizer)}

    adamw, memory_of_adamw = prepared(baseline)
    beside: list[dict[str, float]] = []

    def beside_adamw(peer: Peer) -> dict[str, Any]:
        gc.collect()
        optimizer, memory = prepared(peer.build)
        parts = {
            "triad": machine.triad,
            "adamw": lambda: machine.seconds(adamw.step),
            "peer": lambda: machine.seconds(optimizer.step),
        }
        taken = machine.quiet_rounds(parts, rounds)
        beside.extend(taken)
        return {**row_of(peer.name, TRAFFIC[peer.traffic], count, taken, "peer"), **memory}

    copies = [machine.copy() for _ in range(max(rounds, 10))]
    rows, left_out = [], {}
    for peer in peers(device):
        if only and not peer.name.lower().startswith(only):
            continue
        try:
            row = beside_adamw(peer)
        except Exception as error:  # a peer that does not work here must not end the run
            left_out[peer.name] = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"left out: {peer.name}: {left_out[peer.name]}")
            continue
        rows.append(row)
        print(f"{peer.name:32} {row['seconds'] * 1e3:9.1f} ms   {row['to_adamw']:5.2f} x AdamW fused", flush=True)
    if not rows:
        raise SystemExit(f"nothing to measure: {left_out or 'no name begins so'}")
    rows.insert(0, {**row_of(BASELINE, TRAFFIC["adamw"], count, beside, "adamw"), **memory_of_adamw})
    triads = [each["triad"] for each in beside]
    return {
        "model": model,
        "parameters": count,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "quiet": QUIET,
        "torch": torch.__version__,
        "device": str(machine),
        "bandwidth": {"copy": max(copies), "triad": statistics.median(triads), "best_triad": max(triads)},
        "rows": rows,
        "left_out": left_out,
    }


def row_of(name: str, least: int, count: int, taken: list[dict[str, float]], whose: str) -> dict[str, Any]:
    """The figures of one optimizer, whose times are the entries ``whose`` of the rounds."""
    seconds = sorted(each[whose] for each in taken)
    ratios = sorted(each[whose] / each["adamw"] for each in taken)
    return {
        "name": name,
        "bytes": least,
        "seconds": statistics.median(seconds),
        "slowest": seconds[-1],
        "fastest": seconds[0],
        "to_adamw": statistics.median(ratios),
        "to_adamw_least": ratios[0],
        "to_adamw_most": ratios[-1],
        "others": max(each["others"] for each in taken),
        "to_triad": statistics.median(each[whose] * each["triad"] / (least * count) for each in taken),
    }


def beside_this(script: str, *arguments: object, ranks: int = 0, threads: int) -> dict[str, Any]:
    """What a script in this folder reports, run alone or on so many ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    command = [sys.executable, *launcher, str(Path(__file__).with_name(script)), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="64m")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", default="", help="peers whose names begin so, separated by commas")
    parser.add_argument("--into", type=Path, default=Path("runs/benchmark"))
    parser.add_argument("--no-collectives", action="store_true", help="do not start ranks for the norm collective")
    parser.add_argument("--no-iteration", action="store_true", help="do not train the model for the optimizer's share")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    only = tuple(name.strip().lower() for name in options.only.split(",") if name.strip())
    result = measure(options.model, options.rounds, only, device)
    gc.collect()
    if not options.no_collectives:
        names = len(shapes(options.model))
        result["collectives"] = [
            beside_this("benchmark_collective.py", names, 200, ranks=ranks, threads=1) for ranks in (2, 4)
        ]
    if not options.no_iteration:
        hidden, layers = MODELS[options.model]
        result["iteration"] = beside_this("benchmark_iteration.py", hidden, layers, threads=torch.get_num_threads())
    options.into.mkdir(parents=True, exist_ok=True)
    (options.into / "benchmark.json").write_text(json.dumps(result, indent=1))
    (options.into / "benchmark.md").write_text(table(result) + "\n")
    draw(result, options.into / "benchmark.png")
    print(f"\n{table(result)}\n\nfigure: {options.into / 'benchmark.png'}")


if __name__ == "__main__":
    main()
