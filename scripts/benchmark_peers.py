"""The optimizers that scripts/benchmark.py compares: ours, and whatever of their peers is installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from alto_distributed.doctor.benchmark import (
    BASELINE,
    C_KERNEL,
    LR,
    TORCH_KERNEL,
    TRAFFIC,
    Groups,
    Peer,
    apex_lamb,
    baseline,
    own,
)

__all__ = ["BASELINE", "C_KERNEL", "OFFICIAL", "TORCH_KERNEL", "TRAFFIC", "Groups", "Peer", "baseline", "peers"]

OFFICIAL = "ALTO (official)"


def peers(device: torch.device) -> Iterator[Peer]:
    """All that can be compared on such a device, installed or not."""
    yield from own(device)
    yield Peer(OFFICIAL, "alto", official_alto)
    yield Peer("AdamW (torch foreach)", "adamw", lambda groups: torch.optim.AdamW(groups, lr=LR, foreach=True))
    yield Peer("LAMB (pytorch_optimizer)", "lamb", pytorch_optimizer_lamb)
    if device.type == "cpu":
        yield Peer("AdamW (DeepSpeedCPUAdam)", "adamw", deepspeed_adam)
    yield Peer("LAMB (apex FusedLAMB)", "lamb", apex_lamb)


def official_alto(groups: Groups) -> Any:
    import ALTO as official  # e-optimizer-adaptor

    return official.ALTO(groups, lr=LR, betas=(0.99, 0.9, 0.99), alp=-5, eps=1e-6)


def pytorch_optimizer_lamb(groups: Groups) -> Any:
    from pytorch_optimizer import Lamb

    return Lamb(groups, lr=LR)


def deepspeed_adam(groups: Groups) -> Any:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    # It is compiled on first use, in a minute or two, by the ninja that pip put beside this Python.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return DeepSpeedCPUAdam(groups, lr=LR)
