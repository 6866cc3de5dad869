"""What each parameter's step looked like, at an interval: ratio, norms, and how much the acceleration weighs.

Off, it costs nothing. On, every ``every``-th step makes one more pass over the gradients and grad_ema, and one more
small collective per process group; nothing is read back until somebody asks, and then by that rank alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from .errors import shown
from .kernels.measure import measure
from .kernels.shards import R_SQUARED, THETA_SQUARED, FlatShard
from .sharding.norms import NormTable

# Rows of the table of sums of squares; the first two are those of ``measure``.
_GRADIENT, _ACCELERATION, _PARAMETER, _UPDATE = range(_ROWS := 4)


class Reading(NamedTuple):
    """One logical parameter at one step. All norms are of the whole parameter, over all ranks."""

    trust_ratio: float
    """The layer-wise ratio; 1 where there is none, 0 in a step whose gradient was 0."""
    param_norm: float
    """|theta| before the step."""
    update_norm: float
    """|r|, the direction before the ratio."""
    acceleration: float
    """|alpha a| / |g|: the exploration term against the gradient; 0 for LAMB."""


class Diagnostics:
    """Collects readings over the calls of ``step()`` that make up one optimizer step."""

    def __init__(self, every: int) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ValueError(f"diagnostics_every={shown(every)} must be a whole number of steps, or 0 for never")
        self.every = every
        self._held: dict[str, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self._sums: dict[torch.device, torch.Tensor] = {}
        self.unread = False

    def fresh(self) -> Diagnostics:
        """The same interval without readings, for a copy of the optimizer."""
        return Diagnostics(self.every)

    def due(self, k: int) -> bool:
        return self.every > 0 and k > 0 and k % self.every == 0

    def before(self, shards: Mapping[torch.device, Sequence[FlatShard]], table: NormTable) -> None:
        """Gradient and acceleration, while grad_ema still is that of the last step."""
        self._sums = {device: table.zeros(device, _ROWS) for device in shards}
        for device, on_device in shards.items():
            measure(on_device, self._sums[device])

    def between(self, partial: Mapping[torch.device, torch.Tensor]) -> None:
        """Parameter and direction, from this rank's sums of phase one, which must be those of every parameter."""
        for device, measured in self._sums.items():
            measured[_PARAMETER] = partial[device][THETA_SQUARED]
            measured[_UPDATE] = partial[device][R_SQUARED]

    def after(self, table: NormTable, labels: Mapping[str, str], ratios: torch.Tensor) -> None:
        """Complete the sums, which stay on their device until they are asked for. ``labels`` names slots for users."""
        sums = table.complete(self._sums, _ROWS)
        self._sums = {}
        self.unread = True
        self._held.update({label: (sums, ratios, table.slots[name]) for name, label in labels.items()})

    def read(self) -> dict[str, Reading]:
        """The latest readings by name. This waits for the device."""
        self.unread = False
        readings = {}
        for name, (sums, ratios, slot) in self._held.items():
            g, a, theta, r = sums[:, slot].sqrt().tolist()
            readings[name] = Reading(ratios[slot].item(), theta, r, a / g if g else 0.0)
        return readings
