"""The figures of a report, drawn without a display. Names stand beside the curves, so there are no boxes to match."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from ...diagnostics import Reading
from .palette import styles
from .runs import Curve, RunRecords, by_kind, grouped, place, with_ratio

#: From dark blue to yellow, even in lightness: it can be read in gray, and by those who do not see all colors.
SEQUENTIAL = "cividis"
_FAR = 5.0
_GRAY = "#555555"
_KIND_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00")


def new(columns: int, rows: int = 1, width: float = 4.6, height: float = 3.1) -> tuple[Figure, list[Any]]:
    """A figure and its axes, row by row; width and height are those of one, in inches."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes:
        ax.grid(alpha=0.25, linewidth=0.6)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    return figure, axes


def label_ends(ax: Any, ends: Sequence[tuple[str, float, Mapping[str, Any]]], size: float = 8) -> None:
    """Names at the right of an axes, with a piece of the curve, as near to its end as the others leave room for.

    Args:
        ax: with its limits set.
        ends: name, last value and style of each curve.
        size: of the letters.
    """
    to_axes = ax.transData + ax.transAxes.inverted()
    least = 1.25 * size / 72 / (ax.figure.get_size_inches()[1] * ax.get_position().height)
    right = ax.get_xlim()[1]
    wanted = sorted(
        ((float(to_axes.transform((right, y))[1]), text, style) for text, y, style in ends), key=lambda end: end[0]
    )
    heights = [height for height, _, _ in wanted]
    for _ in range(200):  # push neighbors apart until nobody moves
        moved = False
        for below in range(len(heights) - 1):
            short = least - (heights[below + 1] - heights[below])
            if short > 1e-4:
                heights[below] -= short / 2
                heights[below + 1] += short / 2
                moved = True
        if not moved:
            break
    for height, (_, text, style) in zip(heights, wanted, strict=True):
        ax.plot((1.015, 1.075), (height, height), transform=ax.transAxes, clip_on=False, linewidth=1.5, **style)
        ax.annotate(text, (1.09, height), xycoords="axes fraction", fontsize=size, va="center", color="#222222")


def curves(
    ax: Any,
    runs: Sequence[RunRecords],
    name: str,
    ylabel: str,
    *,
    log: bool = False,
    from_zero: bool = False,
    lowest: float = 0.0,
    marker: str = "",
) -> None:
    """One number of the records, a curve for each run; on a logarithmic axis not below ``lowest``."""
    drawn = []
    for run, style in zip(runs, styles([run.optimizer for run in runs]), strict=True):
        steps, values = run.curve(name)
        if steps:
            ax.plot(steps, values, marker=marker, markersize=3.5, linewidth=1.5, **style)
            drawn.append((run.name, values[-1], style))
    ax.set(xlabel="step", ylabel=ylabel)
    if log and all(value > 0 for _, value, _ in drawn) and drawn:
        ax.set_yscale("log")
        if lowest:
            ax.set_ylim(bottom=max(lowest, ax.get_ylim()[0]))
            drawn = [(run, max(value, lowest), style) for run, value, style in drawn]
        _plain(ax)
    if from_zero and drawn:
        ax.set_ylim(0, 1.1 * max(ax.dataLim.y1, 1e-9))
    if not drawn:
        ax.text(0.5, 0.5, "none recorded", transform=ax.transAxes, ha="center", color=_GRAY)
    else:
        label_ends(ax, drawn)


def overview(runs: Sequence[RunRecords]) -> Figure:
    """Training loss with the skipped steps, and validation perplexity."""
    figure, (losses, perplexities) = new(2, width=5.6, height=3.6)
    curves(losses, runs, "loss", "training loss (nats a token)")
    for run, style in zip(runs, styles([run.optimizer for run in runs]), strict=True):
        skipped = [r["step"] for r in run.records if r.get("skipped_steps", r.get("skipped"))]
        if skipped:
            where = [0.02] * len(skipped)
            losses.plot(skipped, where, "|", color=style["color"], markersize=9, transform=losses.get_xaxis_transform())
    curves(perplexities, runs, "valid_perplexity", "validation perplexity", log=True, marker="o")
    return figure


def progress(runs: Sequence[RunRecords]) -> Figure:
    """Learning rate, gradient norm, tokens a second and memory."""
    figure, (rate, norm, speed, memory) = new(2, 2, width=5.6)
    rates = [max(values) for _, values in (run.curve("lr") for run in runs) if values]
    are_far_apart = bool(rates) and max(rates) > _FAR * min(rates)
    # Where the schedules end is no news, and would flatten the rest.
    curves(rate, runs, "lr", "learning rate", log=are_far_apart, lowest=min(rates) / _FAR if are_far_apart else 0.0)
    curves(norm, runs, "grad_norm", "gradient norm, before clipping", log=True)
    curves(speed, runs, "tokens_per_second", "tokens a second", from_zero=True)
    curves(memory, runs, "peak_gib", "most memory on rank 0 (GiB)", from_zero=True)
    return figure


def ratio_map(run: RunRecords) -> Figure | None:
    """Trust ratios: a row for each parameter that has one, by kind and layer; a column for each step looked at."""
    steps, names = sorted(run.readings), grouped(with_ratio(run.readings))
    if not steps or not names:
        return None
    values = [[_ratio(run.readings[step].get(name)) for step in steps] for name in names]
    positive = [value for row in values for value in row if value > 0]
    if not positive:
        return None
    figure, (ax,) = new(1, width=8.6, height=max(2.4, 0.9 + 0.17 * min(len(names), 60)))
    ax.grid(False)
    low, high = min(positive), max(positive)
    norm = LogNorm(low, high) if high > low else Normalize(low, high * 1.01)
    mesh = ax.pcolormesh(
        range(len(steps) + 1),
        range(len(names) + 1),
        [[value if value > 0 else float("nan") for value in row] for row in values],
        norm=norm,
        cmap=SEQUENTIAL,
        rasterized=True,
    )
    ax.invert_yaxis()
    columns = range(0, len(steps), -(-len(steps) // 8))
    ax.set_xticks([column + 0.5 for column in columns], [str(steps[column]) for column in columns])
    rows = range(0, len(names), -(-len(names) // 60))
    ax.set_yticks([row + 0.5 for row in rows], [place(names[row]).name for row in rows], fontsize=7)
    for row in range(1, len(names)):
        if place(names[row]).kind != place(names[row - 1]).kind:
            ax.axhline(row, color="white", linewidth=2)
    ax.set(xlabel="step", title=f"{run.name}: trust ratio of each parameter", ylabel="")
    bar = figure.colorbar(mesh, ax=ax, pad=0.01, fraction=0.03, aspect=40)
    bar.outline.set_visible(False)
    if isinstance(norm, LogNorm):
        _plain(bar.ax)
    return figure


def layer_lines(run: RunRecords) -> Figure | None:
    """Trust ratios again, a curve for each layer, an axes for each kind of parameter."""
    kinds = by_kind(with_ratio(run.readings))
    steps = sorted(run.readings)
    if not kinds or not steps:
        return None
    columns = 2 if len(kinds) in (2, 4) else min(3, len(kinds))
    figure, axes = new(columns, -(-len(kinds) // columns), width=4.4, height=2.8)
    layers = sorted({place(name).layer or 0 for names in kinds.values() for name in names})
    shade = Normalize(layers[0], max(layers[-1], layers[0] + 1))
    for ax, (kind, names) in zip(axes, kinds.items(), strict=False):
        ends = []
        for name in names:
            layer, tint = place(name).layer or 0, colormaps[SEQUENTIAL](0.82 * shade(place(name).layer or 0))
            xs, ys = _over(run, name, lambda reading: reading.trust_ratio)
            if not xs:
                continue
            ax.plot(xs, ys, color=tint, linewidth=1.3)
            if layer in (layers[0], layers[-1]) or len(layers) <= 6:
                ends.append((f"layer {layer}" if layer == layers[0] else str(layer), ys[-1], {"color": tint}))
        ax.set(xlabel="step", title=kind)
        ax.set_yscale("log")
        _plain(ax)
        label_ends(ax, ends, size=7)
    for ax in axes[len(kinds) :]:
        ax.set_visible(False)
    figure.supylabel("trust ratio", fontsize=10)
    figure.suptitle(f"{run.name}: trust ratio by layer, dark is the first layer", fontsize=10)
    return figure


def norms(run: RunRecords) -> Figure | None:
    """Norms of weights and updates, and the share of acceleration: the middle of the layers, and their range."""
    kinds = by_kind(with_ratio(run.readings) or sorted({n for of_step in run.readings.values() for n in of_step}))
    if not kinds or not run.readings:
        return None
    pictures: list[tuple[str, Callable[[Reading], float], bool]] = [
        ("norm of the weights", lambda reading: reading.param_norm, True),
        ("norm of the update, before the ratio", lambda reading: reading.update_norm, True),
        ("acceleration against the gradient", lambda reading: reading.acceleration, False),
    ]
    figure, axes = new(3, width=4.4)
    for ax, (title, pick, log) in zip(axes, pictures, strict=True):
        ends = []
        for tint, (kind, names) in zip(_cycled(len(kinds)), kinds.items(), strict=True):
            steps, rows = _columns(run, names, pick)
            if not steps:
                continue
            middle = [statistics.median(row) for row in rows]
            ax.plot(steps, middle, color=tint, linewidth=1.5)
            if len(names) > 1:
                ax.fill_between(steps, list(map(min, rows)), list(map(max, rows)), color=tint, alpha=0.12, linewidth=0)
            ends.append((kind, middle[-1], {"color": tint}))
        ax.set(xlabel="step", title=title)
        if log and all(y > 0 for _, y, _ in ends):
            ax.set_yscale("log")
            _plain(ax)
        elif not log and not any(y for _, y, _ in ends):
            ax.set_ylim(0, 1)
            ax.text(0.5, 0.5, "none: alpha is 0", transform=ax.transAxes, ha="center", color=_GRAY)
            continue
        elif not log:
            ax.set_ylim(bottom=0)
        label_ends(ax, ends, size=7)
    figure.suptitle(f"{run.name}: middle of the layers, and their range", fontsize=10)
    return figure


def _ratio(reading: Reading | None) -> float:
    return reading.trust_ratio if reading is not None else 0.0


def _over(run: RunRecords, name: str, pick: Callable[[Reading], float]) -> Curve:
    found = [(step, pick(run.readings[step][name])) for step in sorted(run.readings) if name in run.readings[step]]
    kept = [(step, value) for step, value in found if 0 < value < float("inf")]
    return [step for step, _ in kept], [value for _, value in kept]


def _columns(
    run: RunRecords, names: Sequence[str], pick: Callable[[Reading], float]
) -> tuple[list[int], list[list[float]]]:
    steps, rows = [], []
    for step in sorted(run.readings):
        of_step: Mapping[str, Reading] = run.readings[step]
        row = [value for name in names if name in of_step and 0 <= (value := pick(of_step[name])) < float("inf")]
        if row:
            steps.append(step)
            rows.append(row)
    return steps, rows


def _cycled(count: int) -> Iterator[str]:
    return (_KIND_COLORS[place % len(_KIND_COLORS)] for place in range(count))


def _plain(ax: Any) -> None:
    """Ticks of a logarithmic axis as numbers; those between decades only where there is hardly a decade."""
    low, high = ax.get_ylim()
    if low > 0 and high / low < 30:
        from matplotlib.ticker import FuncFormatter, LogLocator

        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
