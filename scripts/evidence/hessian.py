"""The top eigenvalue of a loss's Hessian, by power iteration on Hessian-vector products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def top_eigenvalue(
    loss: Callable[[], torch.Tensor],
    params: Sequence[torch.Tensor],
    *,
    iterations: int = 100,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> float:
    """The eigenvalue that is largest in size, with its sign.

    Args:
        loss: of the same data at every call; called once.
        params: with respect to which the Hessian is taken.
        iterations: at most so many products.
        tolerance: stop when the estimate changes by less than this share, twice in a row.
        seed: of the first direction.
    """
    params = list(params)
    generator = torch.Generator().manual_seed(seed)
    with sdpa_kernel(SDPBackend.MATH):  # the fused attention has no second derivative
        slopes = torch.autograd.grad(loss(), params, create_graph=True)
        vector = _unit([torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in params])
        estimate, calm = 0.0, 0
        for _ in range(iterations):
            product = torch.autograd.grad(slopes, params, vector, retain_graph=True, materialize_grads=True)
            before, estimate = estimate, sum(float((a * b).sum()) for a, b in zip(product, vector, strict=True))
            calm = calm + 1 if abs(estimate - before) <= tolerance * abs(estimate) else 0
            if calm == 2:
                break
            vector = _unit(product)
    return estimate


def _unit(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    norm = torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt().clamp_min(1e-30)
    return [tensor / norm for tensor in tensors]
