"""Python overhead of a step with many small parameters, beside fused AdamW's, for the table in docs/benchmarks.md.

    python scripts/overhead.py

CPU times of this process on one thread, the fastest of steps that take turns. The Triton kernel is stepped without its
launches, on CPU tensors; what it prepares for them is timed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from alto_distributed import ALTO
from alto_distributed.kernels.triton import step

COUNTS = (292, 1000, 18000)
ELEMENTS = 10


@contextlib.contextmanager
def triton_stubbed() -> Iterator[None]:
    """kernel="triton" on CPU tensors, without launches."""
    stubs: dict[str, Any] = {
        "available": lambda device: True,
        "launch_phase_one": lambda *_: None,
        "launch_phase_two": lambda *_: None,
    }
    before = {name: getattr(step, name) for name in stubs}
    try:
        for name, stub in stubs.items():
            setattr(step, name, stub)
        yield
    finally:
        for name, original in before.items():
            setattr(step, name, original)


def times(count: int, rounds: int) -> dict[str, float]:
    """Milliseconds of a step over ``count`` parameters, by optimizer."""
    optimizers = {}
    for name in ("C", "Triton, without its launches", "fused AdamW"):
        params = [torch.nn.Parameter(torch.randn(ELEMENTS)) for _ in range(count)]
        for param in params:
            param.grad = torch.randn(ELEMENTS)
        if name == "fused AdamW":
            optimizers[name] = torch.optim.AdamW(params, fused=True)
        else:
            optimizers[name] = ALTO(params, kernel="native" if name == "C" else "triton")
    fastest = dict.fromkeys(optimizers, float("inf"))
    with triton_stubbed():
        for k in range(rounds + 2):  # the first makes states, the second gets to know where they are
            for name, optimizer in optimizers.items():
                began = time.process_time()
                optimizer.step()
                if k > 1:
                    fastest[name] = min(fastest[name], 1e3 * (time.process_time() - began))
    return fastest


def markdown() -> str:
    """The table in docs/benchmarks.md."""
    lines = ["| parameters | kernel | ALTO, ms | fused AdamW, ms | ratio |", "|--:|---|--:|--:|--:|"]
    for count in COUNTS:
        found = times(count, max(10, 60_000 // count))
        adamw = found.pop("fused AdamW")
        lines += [f"| {count:,} | {name} | {ms:.3g} | {adamw:.3g} | {ms / adamw:.1f} |" for name, ms in found.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(markdown())
