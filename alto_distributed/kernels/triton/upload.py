"""Small tables on their way to a device, without waiting for it."""

from __future__ import annotations

import torch


def upload(table: torch.Tensor, device: torch.device, into: torch.Tensor | None = None) -> torch.Tensor:
    """``table`` on ``device``: a new tensor, or the beginning of ``into``.

    It goes through pinned memory, pinned anew each time: the allocator hands out memory that no copy in flight still
    reads.
    """
    sent = table if device.type == "cpu" else table.pin_memory()
    if into is None:
        return sent.to(device, non_blocking=True)
    return into[: table.numel()].copy_(sent, non_blocking=True)
