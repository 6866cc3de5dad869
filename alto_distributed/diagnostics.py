"""What each parameter's step looked like, at an interval: ratio, norms, and how much the acceleration weighs.

Off, it costs nothing. On, every ``every``-th step makes one more pass over the tensors and one more small
collective per process group; nothing is read back until somebody asks, and then by that rank alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from .errors import shown
from .kernels.chunked import chunks
from .kernels.reference import direction
from .kernels.shards import FlatShard, flattened
from .sharding.norms import NormTable, sums_dtype

# Rows of the table of sums of squares.
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
            for shard, here, slot in _chunks(on_device):
                g = shard.as_taken(shard.grad[here].to(shard.exp_avg_sq.dtype))
                self._sums[device][_GRADIENT, slot] += _squares(g)
                if shard.grad_ema is not None:
                    c = shard.coefficients
                    a = (c.alpha * (1 - c.beta1)) * (g - shard.grad_ema[here])
                    self._sums[device][_ACCELERATION, slot] += _squares(a)

    def after(
        self,
        shards: Mapping[torch.device, Sequence[FlatShard]],
        table: NormTable,
        labels: Mapping[str, str],
        ratios: torch.Tensor,
    ) -> None:
        """Parameter and direction, when the moments are those of this step and the weights not yet.

        The whole sums stay on their device until they are asked for. ``labels`` names the slots for users.
        """
        for device, on_device in shards.items():
            for shard, here, slot in _chunks(on_device):
                v = shard.exp_avg_sq[here]  # in full precision always
                m, theta = shard.exp_avg[here].to(v.dtype), shard.param[here].to(v.dtype)
                self._sums[device][_PARAMETER, slot] += _squares(theta)
                self._sums[device][_UPDATE, slot] += _squares(direction(theta, m, v, shard.coefficients))
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


def _squares(x: torch.Tensor) -> torch.Tensor:
    return x.to(sums_dtype(x.device)).square().sum()


def _chunks(shards: Sequence[FlatShard]) -> Iterator[tuple[FlatShard, slice, int]]:
    for shard in flattened(shards):
        for here, slot, _ in chunks(shard):
            yield shard, here, slot
