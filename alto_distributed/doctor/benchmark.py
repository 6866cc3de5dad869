"""``doctor --benchmark``: how fast a step is on this device, beside copying memory and torch's fused AdamW.

It takes seconds. ``scripts/benchmark.py`` of the repository measures more, with care for what else the machine does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from .. import apex
from ..errors import one_line
from ..optimizer import ALTO

#: Bytes a parameter that a step must at least move, by what it reads and writes; in float32 but for one.
TRAFFIC = {"alto": 48, "alto bf16": 44, "lamb": 40, "adamw": 28}
BASELINE = "AdamW (torch fused)"
C_KERNEL, TORCH_KERNEL = "ALTO (C)", "ALTO (torch)"
LR = 1e-5

#: Elements of all parameters together, on the CPU and on an accelerator.
_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 27}
_ROUNDS = 7

Groups = list[dict[str, Any]]


class Peer(NamedTuple):
    """An optimizer to be measured."""

    name: str
    traffic: str
    """Key of TRAFFIC."""
    build: Callable[[Groups], Any]
    """Raises ImportError where what it needs is not installed."""


def baseline(groups: Groups) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=LR, fused=True)


def own(device: torch.device) -> Iterator[Peer]:
    """Ours, with each kernel that such a device has."""
    first, label = ("native", "C") if device.type == "cpu" else ("triton", "Triton")

    def alto(**options: Any) -> Callable[[Groups], Any]:
        return lambda groups: ALTO(groups, lr=LR, **options)

    yield Peer(f"ALTO ({label})", "alto", alto(kernel=first))
    yield Peer(TORCH_KERNEL, "alto", alto(kernel="torch"))
    yield Peer(f"ALTO ({label}, bf16 grad_ema)", "alto bf16", alto(kernel=first, grad_ema_dtype="bfloat16"))
    yield Peer(f"LAMB (ALTO with alpha=0, {label})", "lamb", alto(kernel=first, alpha=0.0))


def apex_lamb(groups: Groups) -> Any:
    """NVIDIA's, if it is that package."""
    if apex.is_namesake():
        raise ImportError("the package apex here is not NVIDIA's")
    from apex.optimizers import FusedLAMB  # type: ignore[import-not-found,unused-ignore]

    return FusedLAMB(groups, lr=LR)


def device_here() -> torch.device:
    """The accelerator of this process, or the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else torch.device(found.type, torch.accelerator.current_device_index())


def rows(device: torch.device, elements: int | None = None, rounds: int = _ROUNDS) -> Iterator[dict[str, Any]]:
    """What is measured, one after the other: a name, milliseconds and GB/s, or why it is left out.

    Args:
        device: to measure on.
        elements: of all parameters; by default what suits the device.
        rounds: of each; the fastest counts.
    """
    elements = elements or _ELEMENTS.get(device.type, _ELEMENTS["cuda"])
    yield _row("copy", 8 * elements, _seconds(_copy(device, elements), device, rounds))

    def params(count: int, *shape: int) -> list[torch.nn.Parameter]:
        made = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float32, device=device) * 0.02) for _ in range(count)]
        for param in made:
            param.grad = torch.randn_like(param) * 1e-3
        return made

    part = elements // 16
    matrices, vectors = params(15, 64, part // 64), params(64, part // 64)
    groups = {"params": matrices, "weight_decay": 1e-4}, {"params": vectors, "weight_decay": 0.0}
    count = sum(param.numel() for param in (*matrices, *vectors))
    for peer in (Peer(BASELINE, "adamw", baseline), *own(device), Peer("LAMB (apex FusedLAMB)", "lamb", apex_lamb)):
        try:
            optimizer = peer.build([dict(group) for group in groups])
            optimizer.step()  # makes the states, and compiles
            yield _row(peer.name, TRAFFIC[peer.traffic] * count, _seconds(optimizer.step, device, rounds))
        except Exception as error:  # what does not work here must not end the rest
            yield {"name": peer.name, "left out": one_line(error)}


def _copy(device: torch.device, elements: int) -> Callable[[], Any]:
    source, target = (torch.ones(elements, dtype=torch.float32, device=device) for _ in range(2))
    return lambda: target.copy_(source)


def _seconds(step: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """The shortest of some rounds."""

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    taken = []
    for _ in range(rounds + 1):  # the first one warms up
        wait()
        began = time.perf_counter()
        step()
        wait()
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def _row(name: str, moved: int, seconds: float) -> dict[str, Any]:
    return {"name": name, "milliseconds": round(seconds * 1e3, 3), "GB/s": round(moved / seconds / 1e9, 1)}


def block(found: list[dict[str, Any]], machine: str) -> str:
    """What to paste into an issue."""
    copied = statistics.fmean([row["GB/s"] for row in found if row["name"] == "copy"] or [0.0])
    lines = ["```text", f"alto doctor --benchmark: {machine}, torch {torch.__version__}"]
    lines.append(f"{'':34}{'ms':>10}{'GB/s':>10}{'of copy':>10}")
    for row in found:
        if "left out" in row:
            lines.append(f"{row['name']:34}left out: {row['left out']}")
        else:
            share = f"{row['GB/s'] / copied:.0%}" if copied else ""
            lines.append(f"{row['name']:34}{row['milliseconds']:>10.3f}{row['GB/s']:>10.1f}{share:>10}")
    return "\n".join([*lines, "```"])
