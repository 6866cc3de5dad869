"""Pictures of paths: on contours in the plane, and along functions of one variable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from .figures import COLOURS, new_figure, save
from .landscapes import Valley
from .wells import Paths


def draw_valleys(
    valleys: Sequence[Valley],
    paths: Mapping[tuple[str, str, float], torch.Tensor],
    bases: Sequence[str],
    adapted: Mapping[str, str],
    alpha: float,
    into: Path,
) -> str:
    figure, axes = new_figure(len(valleys), len(bases), width=4.2, height=3.9)
    for row, valley in zip(axes, valleys, strict=True):
        left, right, bottom, top = valley.window
        x, y = torch.meshgrid(torch.linspace(left, right, 200), torch.linspace(bottom, top, 200), indexing="xy")
        height = valley.function(torch.stack([x, y], -1)).clamp_min(1e-6).log10()
        for axis, base in zip(row, bases, strict=True):
            axis.contourf(x, y, height, levels=8, cmap="Greys_r", alpha=0.5)
            axis.plot(*valley.curve.T, color="white", lw=1.5, ls="--")
            for name, at, colour in ((base, 0.0, "tab:blue"), (adapted[base], alpha, "tab:red")):
                points = paths[valley.name, base, at]
                # The plain path lies on top, for it is the shorter one.
                axis.plot(*points.T, color=colour, lw=1.1, label=name, zorder=3 if at == 0 else 2)
                axis.plot(*points[-1], "o", color=colour, ms=7, mec="black", zorder=4)
            axis.plot(*points[0], "s", color="black", ms=6)
            axis.plot(*torch.tensor(valley.marks).T, "x", color="black", ms=9, mew=2)
            axis.set(xlim=(left, right), ylim=(bottom, top), title=f"{valley.name}: {base} and {adapted[base]}")
            axis.legend(loc="lower right", fontsize=8)
    figure.supxlabel(
        "square: start; dots: ends; cross: flattest (cardioid) or lowest (Rosenbrock) point; dashed: the floor; "
        f"alpha = {alpha:g}",
        fontsize=9,
    )
    return save(figure, into, "paths.png")


def draw_wells(both: Sequence[Paths], into: Path) -> str:
    """Above, the function and where each optimizer ends; below, the way there at the middle rate."""
    figure, axes = new_figure(2, len(both), width=5.6, height=3.0)
    for (above, below), paths in zip(axes.T, both, strict=True):
        well, middle = paths.well, len(paths.rates) // 2
        x = torch.linspace(*well.window, 1000, dtype=torch.float64)
        above.plot(x, well.function(x[:, None]), color="black", lw=1)
        for offset, name in enumerate(("Adam", "EAdam", "LAMB", "ALTO")):
            end = paths.end(name)[middle]
            value = well.function(end[None])
            above.plot(end, value + 0.03 * offset, "o", color=COLOURS[name], ms=7, mec="black")
            below.plot(paths.points[name][:, middle].clamp(-1, 200), color=COLOURS[name], lw=1.2, label=name)
        above.plot(well.start, well.function(torch.tensor([well.start])), "s", color="black")
        above.set(title=f"{well.name}: where they end (lr {paths.rates[middle]:g}, alpha {well.alpha:g})", xlabel="x")
        below.set(xlabel="step", ylabel="x")
        if well.name == "f1":
            above.set_xscale("log")
            below.set_yscale("log")
        else:
            below.axhspan(-0.2, 0.2, color="tab:green", alpha=0.15, label="flat minimum")
        below.legend(fontsize=8, ncols=2, loc="center right")
    return save(figure, into, "wells.png")
