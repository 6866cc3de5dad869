"""What a kernel is: two phases, with the norms between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from .shards import FlatShard


class Kernel(Protocol):
    """What every kernel provides."""

    def phase_one(self, shards: Sequence[FlatShard], sums: torch.Tensor) -> Any:
        """Update grad_ema, exp_avg and exp_avg_sq in place, and add |theta|^2 and |r|^2 of every span to ``sums``.

        Returns:
            What it has prepared for phase two, or None.
        """

    def phase_two(self, shards: Sequence[FlatShard], step_sizes: torch.Tensor, prepared: Any = None) -> None:
        """Recompute r and do theta -= step_sizes[slot] * r.

        Args:
            shards: those of phase one, not changed in between (their tensors' contents may be).
            step_sizes: lr times the ratio, by slot.
            prepared: what phase one returned for them.
        """
