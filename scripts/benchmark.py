"""How long an optimizer step takes, and what memory: ALTO's kernels beside their peers, in one run on one machine.

    python scripts/benchmark.py                     64M parameters, a minute or two
    python scripts/benchmark.py --model 345m        GPT-2 345M's true shapes; needs 16 GiB
    python scripts/benchmark.py --only alto,adamw   names that begin so

Writes benchmark.md, benchmark.json and benchmark.png into --into. Times are of this machine: only their ratios travel.
Each optimizer starts afresh on the same weights and gradients, and AdamW is timed before every other one, so that a
machine that changes its speed on the way is noticed, and each ratio is to the AdamW beside it.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from alto_distributed import ALTO

#: Hidden size and layers.
MODELS = {"tiny": (64, 2), "64m": (1024, 1), "345m": (1024, 24)}
#: Bytes a parameter that a step must at least move in float32, by what it reads and writes.
TRAFFIC = {"alto": 48, "lamb": 40, "adamw": 28}
BASELINE = "AdamW (torch fused)"

Groups = list[dict[str, Any]]


def shapes(model: str) -> list[tuple[int, ...]]:
    """A GPT-2's parameters, tied embedding once."""
    h, layers = MODELS[model]
    layer = [(h,), (h,), (3 * h, h), (3 * h,), (h, h), (h,), (h,), (h,), (4 * h, h), (4 * h,), (h, 4 * h), (h,)]
    return [(50304, h), (1024, h), *layer * layers, (h,), (h,)]


def peers(device: torch.device) -> Iterator[tuple[str, str, Callable[[Groups], Any]]]:
    """(name, key of its traffic, how to build it) of everything that is installed here; a line about what is not."""
    alto = {"lr": 1e-5}
    kernels = {"cpu": ("native", "torch"), "cuda": ("triton", "torch")}[device.type]
    labels = {"native": "C", "triton": "Triton", "torch": "torch"}
    first = labels[kernels[0]]
    for kernel in kernels:
        yield f"ALTO ({labels[kernel]})", "alto", lambda groups, k=kernel: ALTO(groups, **alto, kernel=k)
    yield (
        f"ALTO ({first}, bf16 grad_ema)",
        "alto",
        lambda groups: ALTO(groups, **alto, kernel=kernels[0], grad_ema_dtype="bfloat16"),
    )
    yield f"LAMB (ALTO with alpha=0, {first})", "lamb", lambda groups: ALTO(groups, **alto, alpha=0, kernel=kernels[0])
    try:
        import ALTO as official

        yield (
            "ALTO (official)",
            "alto",
            lambda groups: official.ALTO(groups, lr=1e-5, betas=(0.99, 0.9, 0.99), alp=-5, eps=1e-6),
        )
    except ImportError:
        print("left out: the official ALTO (pip install e-optimizer-adaptor)")
    yield "AdamW (torch foreach)", "adamw", lambda groups: torch.optim.AdamW(groups, lr=1e-5, foreach=True)
    try:
        from pytorch_optimizer import Lamb

        yield "LAMB (pytorch_optimizer)", "lamb", lambda groups: Lamb(groups, lr=1e-5)
    except ImportError:
        print("left out: pytorch_optimizer's LAMB (pip install pytorch_optimizer)")
    if device.type == "cpu":
        try:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            yield "AdamW (DeepSpeedCPUAdam)", "adamw", lambda groups: DeepSpeedCPUAdam(groups, lr=1e-5)
        except ImportError:
            print("left out: DeepSpeedCPUAdam (pip install deepspeed)")
    try:
        import apex.multi_tensor_apply  # noqa: F401  # the "apex" of PyPI has none
        from apex.optimizers import FusedLAMB

        yield "LAMB (apex FusedLAMB)", "lamb", lambda groups: FusedLAMB(groups, lr=1e-5)
    except ImportError:
        print("left out: apex's FusedLAMB (NVIDIA's apex is not installed)")


def seconds(step: Callable[[], Any], rounds: int, device: torch.device) -> list[float]:
    taken = []
    for _ in range(rounds):
        _wait(device)
        began = time.perf_counter()
        step()
        _wait(device)
        taken.append(time.perf_counter() - began)
    return taken


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bandwidth(device: torch.device, rounds: int) -> dict[str, float]:
    """Bytes a second of torch's own copy (8 bytes an element) and triad a = b + s c (12 bytes), in float32.

    A CPU reads a line before it writes to it unless it is told otherwise, so the memory moves more than is counted
    here; that holds for every optimizer as well.
    """
    n = 1 << 26
    a, b, c = (torch.ones(n, device=device) for _ in range(3))
    copy = min(seconds(lambda: a.copy_(b), rounds, device))
    triad = min(seconds(lambda: torch.add(b, c, alpha=3.0, out=a), rounds, device))
    return {"copy": 8 * n / copy, "triad": 12 * n / triad}


def extra_memory(step: Callable[[], Any], device: torch.device) -> int:
    """Bytes that a step needs at its peak, beyond what there is before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is used now
    before = _kilobytes("VmRSS")
    step()
    return (_kilobytes("VmHWM") - before) * 1024


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

    def groups() -> Groups:
        split = [[p for p in params if p.ndim >= 2], [p for p in params if p.ndim < 2]]
        return [{"params": split[0], "weight_decay": 1e-4}, {"params": split[1], "weight_decay": 0.0}]

    def timed(build: Callable[[Groups], Any]) -> dict[str, Any]:
        gc.collect()
        optimizer = build(groups())
        optimizer.step()  # makes the states
        optimizer.step()
        extra = extra_memory(optimizer.step, device)
        taken = seconds(optimizer.step, rounds, device)
        return {
            "seconds": statistics.median(taken),
            "best": min(taken),
            "extra": extra,
            "state": state_bytes(optimizer),
        }

    def baseline() -> dict[str, Any]:
        return timed(lambda g: torch.optim.AdamW(g, lr=1e-5, fused=True))

    speeds = bandwidth(device, max(rounds, 10))
    rows = []
    for name, traffic, build in peers(device):
        if only and not name.lower().startswith(only):
            continue
        beside = baseline()
        try:
            row = timed(build)
        except Exception as error:  # a peer that does not work here must not end the run
            print(f"left out: {name}: {type(error).__name__}: {error}")
            continue
        rows.append({"name": name, "bytes": TRAFFIC[traffic], "to_adamw": row["seconds"] / beside["seconds"], **row})
        print(f"{name:32} {row['seconds'] * 1e3:9.1f} ms   {rows[-1]['to_adamw']:5.2f} x AdamW fused", flush=True)
    last = baseline()
    rows.insert(0, {"name": BASELINE, "bytes": TRAFFIC["adamw"], "to_adamw": 1.0, **last})
    return {
        "model": model,
        "parameters": count,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu(),
        "bandwidth": speeds,
        "rows": rows,
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{name}, {os.cpu_count()} cores"


def collectives(model: str, rounds: int) -> list[dict[str, float]]:
    """The norm collective at two and four gloo ranks on this machine."""
    script = str(Path(__file__).with_name("benchmark_collective.py"))
    results = []
    for ranks in (2, 4):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", script]
        command += [str(len(shapes(model))), str(rounds)]
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True
        )
        results.append(json.loads(done.stdout.splitlines()[-1]))
    return results


def table(result: dict[str, Any]) -> str:
    count, speeds = result["parameters"], result["bandwidth"]
    lines = [
        f"GPT-2 shapes, {count / 1e6:.0f}M parameters in float32; {result['device']}, {result['threads']} threads, "
        f"torch {result['torch']}. Copy {speeds['copy'] / 1e9:.1f} GB/s, triad {speeds['triad'] / 1e9:.1f} GB/s.",
        "",
        "| optimizer | ms a step | x AdamW fused | GB/s | x its bytes at triad speed | state, bytes a parameter | "
        "peak extra, MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        moved = row["bytes"] * count
        cells = [
            f"{row['seconds'] * 1e3:.0f}",
            f"{row['to_adamw']:.2f}",
            f"{moved / row['seconds'] / 1e9:.1f}",
            f"{row['seconds'] / (moved / speeds['triad']):.2f}",
            f"{row['state'] / count:.1f}",
            f"{row['extra'] / 2**20:.0f}",
        ]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    for entry in result.get("collectives", []):
        lines += [
            "",
            f"Norm collective, {entry['ranks']} gloo ranks: {entry['seconds'] * 1e6:.0f} us for {entry['parameters']} "
            f"parameters ({entry['bytes']} bytes).",
        ]
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = sorted(result["rows"], key=lambda row: row["seconds"], reverse=True)
    drawing, axes = pyplot.subplots(figsize=(9, 0.45 * len(rows) + 1.5), layout="constrained")
    ours = ["tab:blue" if "ALTO" in row["name"] and "official" not in row["name"] else "0.6" for row in rows]
    axes.barh([row["name"] for row in rows], [row["seconds"] * 1e3 for row in rows], color=ours)
    for position, row in enumerate(rows):
        least = row["bytes"] * result["parameters"] / result["bandwidth"]["triad"] * 1e3
        axes.plot([least, least], [position - 0.4, position + 0.4], color="black")
    axes.set(xlabel="ms a step (black: the bytes it must move, at triad speed)", xscale="log")
    drawing.savefig(path, dpi=120)
    pyplot.close(drawing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="64m")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", default="", help="peers whose names begin so, separated by commas")
    parser.add_argument("--into", type=Path, default=Path("runs/benchmark"))
    parser.add_argument("--no-collectives", action="store_true", help="do not start ranks for the norm collective")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    only = tuple(name.strip().lower() for name in options.only.split(",") if name.strip())
    result = measure(options.model, options.rounds, only, device)
    if not options.no_collectives:
        result["collectives"] = collectives(options.model, 200)
    options.into.mkdir(parents=True, exist_ok=True)
    (options.into / "benchmark.json").write_text(json.dumps(result, indent=1))
    (options.into / "benchmark.md").write_text(table(result) + "\n")
    draw(result, options.into / "benchmark.png")
    print(f"\n{table(result)}\n\nfigure: {options.into / 'benchmark.png'}")


if __name__ == "__main__":
    main()
