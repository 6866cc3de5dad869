"""All-reduces of a few numbers, wherever these live and whatever memory the process group speaks of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def all_reduce(table: torch.Tensor, group: ProcessGroup, op: str = "SUM") -> torch.Tensor:
    """The sum (or "MAX") of ``table`` over ``group``, back on the table's device.

    With parameters offloaded to the CPU the table is there too, while NCCL only speaks of GPU memory:
    then it makes the trip, as the offloading engines' own norms do.
    """
    import torch.distributed as dist

    there = table.to(device_for(table.device, group))
    dist.all_reduce(there, op=getattr(dist.ReduceOp, op), group=group)
    return there.to(table.device)


def device_for(device: torch.device, group: ProcessGroup) -> torch.device:
    """``device`` itself if ``group`` communicates there, else the current device of a type where it does."""
    import torch.distributed as dist

    device_types = [entry.split(":")[0] for entry in dist.get_backend_config(group).split(",")]
    return device if device.type in device_types else torch.device(device_types[0])


def everyone(group: ProcessGroup | None = None) -> ProcessGroup | None:
    """``group``, or all ranks of the job; None where there is nobody to talk to."""
    import torch.distributed as dist

    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = dist.group.WORLD
    return group if group is not None and group.size() > 1 else None
