"""What a kernel is: two phases, with the norms between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from .shards import FlatShard


class Kernel(Protocol):
    """What every kernel provides."""

    def phase_one(self, shards: Sequence[FlatShard], sums: torch.Tensor) -> Any:
        """Update grad_ema, exp_avg and exp_avg_sq in place, and add to ``sums`` what every span has in its slot.

        The rows of ``sums`` are |theta|^2, |r|^2, and a positive number if an element of the gradient is not 0.

        Returns:
            What it has prepared for phase two, or None.
        """

    def phase_two(self, shards: Sequence[FlatShard], step_sizes: torch.Tensor, prepared: Any = None) -> None:
        """Recompute r and do theta -= step_sizes[slot] * r. A step size of 0 leaves theta as it is.

        Args:
            shards: those of phase one, not changed in between (their tensors' contents may be).
            step_sizes: lr times the ratio, by slot.
            prepared: what phase one returned for them.
        """


@runtime_checkable
class SkippingKernel(Kernel, Protocol):
    """One that can leave everything as it is by itself. :class:`.skip.SkipIf` does it for the others."""

    def unless(self, skip: torch.Tensor) -> Kernel:
        """This kernel, but nothing changes if ``skip``, on its device, is not 0. The host does not read it."""
