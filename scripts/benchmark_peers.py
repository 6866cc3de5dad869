"""The optimizers that scripts/benchmark.py compares: ours, and whatever of their peers is installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from alto_distributed import ALTO

#: Bytes a parameter that a step must at least move, by what it reads and writes; in float32 but for one.
TRAFFIC = {"alto": 48, "alto bf16": 44, "lamb": 40, "adamw": 28}
BASELINE = "AdamW (torch fused)"
OFFICIAL = "ALTO (official)"
C_KERNEL, TORCH_KERNEL = "ALTO (C)", "ALTO (torch)"

Groups = list[dict[str, Any]]


class Peer(NamedTuple):
    name: str
    traffic: str
    """Key of TRAFFIC."""
    build: Callable[[Groups], Any]
    """Raises ImportError where what it needs is not installed."""


def baseline(groups: Groups) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-5, fused=True)


def peers(device: torch.device) -> Iterator[Peer]:
    """All that can be compared on such a device, installed or not."""
    first = {"cpu": "native", "cuda": "triton"}[device.type]
    label = {"native": "C", "triton": "Triton"}[first]

    def alto(**options: Any) -> Callable[[Groups], Any]:
        return lambda groups: ALTO(groups, lr=1e-5, **options)

    yield Peer(f"ALTO ({label})", "alto", alto(kernel=first))
    yield Peer(TORCH_KERNEL, "alto", alto(kernel="torch"))
    yield Peer(f"ALTO ({label}, bf16 grad_ema)", "alto bf16", alto(kernel=first, grad_ema_dtype="bfloat16"))
    yield Peer(f"LAMB (ALTO with alpha=0, {label})", "lamb", alto(kernel=first, alpha=0))
    yield Peer(OFFICIAL, "alto", official_alto)
    yield Peer("AdamW (torch foreach)", "adamw", lambda groups: torch.optim.AdamW(groups, lr=1e-5, foreach=True))
    yield Peer("LAMB (pytorch_optimizer)", "lamb", pytorch_optimizer_lamb)
    if device.type == "cpu":
        yield Peer("AdamW (DeepSpeedCPUAdam)", "adamw", deepspeed_adam)
    yield Peer("LAMB (apex FusedLAMB)", "lamb", apex_lamb)


def official_alto(groups: Groups) -> Any:
    import ALTO as official  # e-optimizer-adaptor

    return official.ALTO(groups, lr=1e-5, betas=(0.99, 0.9, 0.99), alp=-5, eps=1e-6)


def pytorch_optimizer_lamb(groups: Groups) -> Any:
    from pytorch_optimizer import Lamb

    return Lamb(groups, lr=1e-5)


def deepspeed_adam(groups: Groups) -> Any:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    # It is compiled on first use, in a minute or two, by the ninja that pip put beside this Python.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return DeepSpeedCPUAdam(groups, lr=1e-5)


def apex_lamb(groups: Groups) -> Any:
    import apex.multi_tensor_apply  # noqa: F401  # the "apex" of PyPI has none
    from apex.optimizers import FusedLAMB

    return FusedLAMB(groups, lr=1e-5)
