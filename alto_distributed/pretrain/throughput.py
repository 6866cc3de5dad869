"""How much of a GPU's arithmetic a training speed makes use of."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .config.settings import Model

#: Dense bf16/fp16 peak by a part of the device's name, from NVIDIA's data sheets.
_PEAK = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "V100": 125e12}


def flops_per_token(model: Model) -> float:
    """Forward and backward: 6 for each weight in a matrix product, and attention's two products over the sequence."""
    hidden, per_head = model.hidden, model.hidden // model.heads
    attention_weights = (2 * model.heads + 2 * model.groups) * per_head * hidden
    in_layers = model.layers * (attention_weights + (2 if model.kind == "gpt2" else 3) * model.inner * hidden)
    in_output = model.vocabulary * model.hidden
    attention = 12 * model.layers * model.hidden * model.sequence
    return 6.0 * (in_layers + in_output) + attention


def utilisation(model: Model, tokens_per_second: float, device: torch.device) -> float | None:
    """Model FLOPs utilisation over all GPUs; None on other devices and for GPUs whose peak is not known here."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peak = next((value for part, value in _PEAK.items() if part in name), None)
    if peak is None:
        return None
    return flops_per_token(model) * tokens_per_second / (peak * dist.get_world_size())
