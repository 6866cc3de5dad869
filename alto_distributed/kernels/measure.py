"""What diagnostics ask besides the sums of phase one: how large the gradient is, and its acceleration.

In torch's foreach operations and their groups, so that a measured step has few launches more than another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .foreach import Found, add, gradients, groups_of, in_full, norms
from .shards import FlatShard, batch_of, flattened

#: Rows of the table of sums.
GRADIENT, ACCELERATION = range(2)


def measure(shards: Sequence[FlatShard], sums: torch.Tensor) -> None:
    """Add |g|^2 and |alpha a|^2 of every span to its slot. Call it before phase one, which changes grad_ema."""
    taken: list[Found] = []
    for group in groups_of(flattened(batch_of(shards))):
        c, g = group.coefficients, gradients(group)
        found: list[Found] = [(GRADIENT, part, x, 1.0) for part, x in zip(group.parts, g, strict=True)]
        if group.parts[0].shard.grad_ema is not None:
            u, _ = in_full(group.of("grad_ema"), g[0].dtype)
            weight = c.alpha * (1 - c.beta1)
            changes = torch._foreach_sub(g, u)
            found += [(ACCELERATION, part, x, weight) for part, x in zip(group.parts, changes, strict=True)]
        taken += norms(found, sums.dtype)
    add(sums, taken)
