"""Test functions with valleys, paths of optimizers on them, and measures of what a path saw."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Function = Callable[[torch.Tensor], torch.Tensor]
#: Given parameter groups, an optimizer over them.
Maker = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

#: Length of valley that counts as one piece: a valley is explored piece by piece.
PIECE = 0.05


def squared_cardioid(p: torch.Tensor) -> torch.Tensor:
    """Zero on the cardioid r = 1 + cos(angle), whose cusp at the origin is flat in every direction."""
    x, y = p[..., 0], p[..., 1]
    s = x**2 + y**2
    return ((s - x) ** 2 - s) ** 2


def rosenbrock(p: torch.Tensor) -> torch.Tensor:
    x, y = p[..., 0], p[..., 1]
    return (1 - x) ** 2 + 100 * (y - x**2) ** 2


def f1(p: torch.Tensor) -> torch.Tensor:
    """A slope with ever more small minima."""
    x = p[..., 0]
    return 1 / (0.05 * x * torch.sin(2 * x) ** 2 + torch.log(x + 1))


def f2(p: torch.Tensor) -> torch.Tensor:
    """Three minima equally deep: sharp ones at -0.6 and 0.6, a flat one at 0."""
    x = p[..., 0]
    return 1 - torch.exp(-900 * (x - 0.6) ** 2) - torch.exp(-900 * (x + 0.6) ** 2) - torch.exp(-25 * x**2)


@dataclass(frozen=True)
class Valley:
    """A function of the plane with a valley along a curve."""

    name: str
    function: Function
    curve: torch.Tensor
    """Points along the floor, PIECE/5 apart or closer."""
    threshold: float
    """In the valley means: near the curve, and the function below this."""
    starts: tuple[tuple[float, float], ...]
    window: tuple[float, float, float, float]
    """left, right, bottom, top of a picture."""
    marks: tuple[tuple[float, float], ...]
    """Points of interest: flattest, lowest."""


def _cardioid() -> torch.Tensor:
    angle = torch.linspace(-math.pi, math.pi, 4001, dtype=torch.float64)
    return torch.stack([(1 + angle.cos()) * angle.cos(), (1 + angle.cos()) * angle.sin()], -1)


def _parabola() -> torch.Tensor:
    x = torch.linspace(-2.5, 2.5, 4001, dtype=torch.float64)
    return torch.stack([x, x**2], -1)


def _around(radius: float, centre: float, count: int) -> tuple[tuple[float, float], ...]:
    angles = [math.pi / count + 2 * math.pi * i / count for i in range(count)]
    return tuple((centre + radius * math.cos(t), radius * math.sin(t)) for t in angles)


CARDIOID = Valley(
    "squared cardioid",
    squared_cardioid,
    _cardioid(),
    threshold=0.05,
    starts=_around(2.3, 0.6, 8),
    window=(-1.3, 2.9, -2.2, 2.2),
    marks=((0.0, 0.0),),
)
ROSENBROCK = Valley(
    "Rosenbrock",
    rosenbrock,
    _parabola(),
    threshold=1.0,
    starts=((-1.5, 2.0), (1.8, 1.0), (-1.0, -0.5), (0.5, -1.0), (-1.8, 0.5), (-0.5, 2.0), (0.0, 2.0), (1.5, -0.5)),
    window=(-2.1, 2.1, -1.2, 3.4),
    marks=((1.0, 1.0),),
)


def follow(
    function: Function,
    starts: Sequence[Sequence[float]],
    maker: Maker,
    steps: int,
    rates: Sequence[float],
    shift: float,
) -> torch.Tensor:
    """Paths from all starts at once, each a parameter ("layer") of its own, in float64.

    Args:
        function: of points in the last dimension.
        starts: one path each.
        maker: given the groups, an optimizer.
        steps: of the optimizer.
        rates: learning rate of each path.
        shift: what is added to every coordinate of the parameter. The layer-wise ratio makes a step proportional to
            the parameter's norm, so that in the plane the origin would hold LAMB and ALTO wherever the valley lies.

    Returns:
        Points, (steps + 1) x paths x dimensions.
    """
    params = [torch.tensor(start, dtype=torch.float64).add_(shift).requires_grad_() for start in starts]
    groups: dict[float, dict[str, Any]] = {}
    for param, rate in zip(params, rates, strict=True):
        groups.setdefault(rate, {"params": [], "lr": rate})["params"].append(param)
    optimizer = maker(list(groups.values()))
    points = [torch.stack(params).detach() - shift]
    for _ in range(steps):
        here = torch.stack(params)
        gradients = torch.autograd.grad(function(here - shift).sum(), params)
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        optimizer.step()
        points.append(torch.stack(params).detach() - shift)
    return torch.stack(points)


@dataclass(frozen=True)
class Exploration:
    """What one path saw of a valley."""

    entered: int | None
    """Step at which it was first in the valley, if ever."""
    path: float
    """Length of the path inside the valley, back and forth counted each time."""
    explored: float
    """Length of the valley's curve that was visited, each piece counted once."""
    inside: float
    """Share of the steps after entering at which it was in the valley."""
    flattest: float
    """Smallest top eigenvalue of the Hessian met in the valley."""
    lowest: float
    """Smallest value met."""
    last: float
    """Value at the end."""


def explore(valley: Valley, points: torch.Tensor) -> Exploration:
    """Measure one path (steps x 2)."""
    values = valley.function(points)
    low = values < valley.threshold
    lowest = values[values.isfinite()].min().item()
    if not low.any():
        return Exploration(None, 0.0, 0.0, 0.0, math.nan, lowest, values[-1].item())
    entered = int(low.nonzero()[0])
    after, low = points[entered:], low[entered:]
    steps = (after[1:] - after[:-1]).norm(dim=-1)
    path = steps[low[1:] & low[:-1]].sum().item()
    # The nearest point of the curve, and not an angle or an abscissa: near a cusp those jump.
    along = torch.cat([torch.zeros(1), (valley.curve[1:] - valley.curve[:-1]).norm(dim=-1).cumsum(0)])
    nearest = torch.cdist(after[low], valley.curve).argmin(dim=-1)
    pieces = (along[nearest] / PIECE).floor().unique()
    return Exploration(
        entered,
        path,
        len(pieces) * PIECE,
        low.double().mean().item(),
        top_eigenvalues(valley.function, after[low]).min().item(),
        lowest,
        values[-1].item(),
    )


def top_eigenvalues(function: Function, points: torch.Tensor) -> torch.Tensor:
    """Largest absolute eigenvalue of the Hessian at each point."""
    hessians = torch.func.vmap(torch.func.hessian(function))(points)
    return torch.linalg.eigvalsh(hessians).abs().max(dim=-1).values
