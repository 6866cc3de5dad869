"""Steps under ``torch.amp.GradScaler``, as the fused optimizers of ``torch.optim`` take them.

An optimizer that says ``_step_supports_amp_scaling`` is stepped always. The scaler sets ``found_inf`` and, unless the
gradients are unscaled already, ``grad_scale`` on it. So the host waits for neither, and ranks whose scalers disagree
still take part in the same collectives. Kernels unscale gradients in float32 as they read them; ``p.grad`` stays as it
is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from .sharding.collective import reduce_on_group_device

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ScaledStep:
    """What a scaler says about one step.

    Args:
        optimizer: on which the scaler has set its attributes.
    """

    def __init__(self, optimizer: Any) -> None:
        found = optimizer.found_inf
        if not isinstance(found, torch.Tensor):  # a plain 0 on a rank without gradients
            found = torch.tensor(found, dtype=torch.float32, device="cpu")
        self._found_inf = (found != 0).float().reshape(1)
        self._scale: torch.Tensor | None = optimizer.grad_scale
        self._inverse: dict[torch.device, torch.Tensor] = {}

    @classmethod
    def of(cls, optimizer: Any) -> ScaledStep | None:
        """None unless a scaler is stepping ``optimizer``."""
        return cls(optimizer) if getattr(optimizer, "found_inf", None) is not None else None

    def flags(self, groups: Iterable[ProcessGroup]) -> torch.Tensor:
        """[whether any rank of ``groups`` skips, whether their scalers disagree], each 0.0 or 1.0."""
        device = self._found_inf.device
        scale = self._scale if self._scale is not None else torch.zeros(1, dtype=torch.float32, device=device)
        seen = torch.cat([self._found_inf, scale.reshape(1).to(device, torch.float32)])
        largest = torch.cat([seen, -seen])  # so that one MAX gives both ends
        for group in groups:
            largest = reduce_on_group_device(largest, group, "MAX")
        disagree = (largest[:2] != -largest[2:]).any()
        return torch.stack([largest[0], disagree.float()])

    def inverse_scale(self, device: torch.device) -> torch.Tensor | None:
        """What kernels on ``device`` multiply gradients by as they read them; None if these are unscaled already."""
        if self._scale is None:
            return None
        if device not in self._inverse:
            self._inverse[device] = self._scale.double().reciprocal().float().reshape(()).to(device)
        return self._inverse[device]


def refuse_disagreement() -> None:
    """Raise for ranks whose scalers go separate ways from here: a gradient would mix their scales."""
    raise RuntimeError(
        "the GradScalers of the ranks disagree: not all of them saw the infinity or NaN of a step, or their scales are "
        "different. The step was skipped on all ranks, but the scales drift apart. Use "
        "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler and call scaler.unscale_(optimizer) before "
        "scaler.step(optimizer): that agrees over all ranks"
    )
