"""Steps under ``torch.amp.GradScaler``, as the fused optimizers of ``torch.optim`` take them.

An optimizer that says ``_step_supports_amp_scaling`` is stepped always. The scaler sets ``found_inf`` and, unless the
gradients are unscaled already, ``grad_scale`` on it. So the host waits for neither, and ranks whose scalers disagree
still take part in the same collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        found = torch.as_tensor(optimizer.found_inf, dtype=torch.float32)  # a plain 0 on a rank without gradients
        self._found_inf = (found != 0).float().reshape(1)
        self._scale: torch.Tensor | None = optimizer.grad_scale

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

    def unscaled(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients divided by the scale: in place, or in a float32 copy where float16 would lose small ones."""
        if self._scale is None:
            return list(gradients)
        inverse = self._scale.double().reciprocal().float()
        result = [g.float() if g.dtype == torch.float16 else g for g in gradients]
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for gradient in result:
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        for (device, _), some in by_kind.items():
            torch._foreach_mul_(some, inverse.to(device))
        return result


def refuse_disagreement() -> None:
    """Raise for ranks whose scalers go separate ways from here: a gradient would mix their scales."""
    raise RuntimeError(
        "the GradScalers of the ranks disagree: not all of them saw the infinity or NaN of a step, or their scales are "
        "different. The step was skipped on all ranks, but the scales drift apart. Use "
        "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler and call scaler.unscale_(optimizer) before "
        "scaler.step(optimizer): that agrees over all ranks"
    )
