"""What came of a sweep: a table with mean and spread, all trials in a second one, and a figure."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import metrics
from ..report import palette, table
from .halving import Found, Trial
from .trials import Outcome

_STYLES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Winner:
    """An optimizer at its best rate."""

    optimizer: str
    found: Found
    seeds: Mapping[int, Outcome]
    directories: Sequence[Path]
    """Of the runs with these seeds."""

    @property
    def valid_losses(self) -> list[float]:
        return [outcome.valid_loss for outcome in self.seeds.values()]

    @property
    def rank(self) -> float:
        return statistics.fmean(self.valid_losses)


def write(winners: Sequence[Winner], losses: Mapping[Trial, float], into: Path) -> tuple[str, Path]:
    """The tables (returned, and kept as sweep.md and sweep.json) and the figure (sweep.png and sweep.svg)."""
    ranked = sorted(winners, key=lambda winner: winner.rank)
    text = f"{table([_row(winner) for winner in ranked])}\n{_notes(ranked)}"
    into.mkdir(parents=True, exist_ok=True)
    (into / "sweep.md").write_text(f"{text}\n\nValidation loss by rate and length:\n\n{_trials(losses)}\n")
    (into / "sweep.json").write_text(json.dumps(_as_json(ranked, losses), indent=1))
    return text, figure(ranked, losses, into / "sweep.png")


def _row(winner: Winner) -> dict[str, Any]:
    return {
        "optimizer": winner.optimizer,
        "rate": winner.found.rate,
        "rates tried": len(winner.found.rates),
        "valid loss": _mean(winner.valid_losses),
        "valid ±": _spread(winner.valid_losses),
        "test loss": _mean([outcome.test_loss for outcome in winner.seeds.values()]),
        "test ±": _spread([outcome.test_loss for outcome in winner.seeds.values()]),
        "seeds": len(winner.seeds),
    }


def _mean(values: Sequence[float]) -> str:
    mean = statistics.fmean(values)
    return "diverged" if math.isinf(mean) else "-" if math.isnan(mean) else f"{mean:.4f}"


def _spread(values: Sequence[float]) -> str:
    """The standard deviation over the seeds."""
    return f"{statistics.stdev(values):.4f}" if len(values) > 1 and all(map(math.isfinite, values)) else "-"


def _notes(ranked: Sequence[Winner]) -> str:
    lines = ["± is the standard deviation over seeds; the seed that chose the rate is none of them."]
    for winner in ranked:
        if not winner.found.is_inside:
            lines.append(
                f"The rate of {winner.optimizer}, {winner.found.rate:g}, is at the edge of its grid: a better one may "
                "lie beyond. Sweep again with a larger --budget; what was tried is not repeated."
            )
    return "\n" + "\n".join(lines)


def _trials(losses: Mapping[Trial, float]) -> str:
    lengths = sorted({trial.steps for trial in losses})
    rows = [
        {"optimizer": name, "rate": rate}
        | {f"{steps} steps": _loss(losses.get(Trial(name, rate, steps))) for steps in lengths}
        for name, rate in sorted({(trial.optimizer, trial.rate) for trial in losses})
    ]
    return table(rows)


def _loss(value: float | None) -> str:
    return "-" if value is None else "diverged" if math.isinf(value) else f"{value:.4f}"


def _as_json(ranked: Sequence[Winner], losses: Mapping[Trial, float]) -> dict[str, Any]:
    return {
        "winners": [
            {
                "optimizer": winner.optimizer,
                "rate": winner.found.rate,
                "is_inside": winner.found.is_inside,
                "rates": list(winner.found.rates),
                "seeds": {seed: _finite(outcome.valid_loss) for seed, outcome in winner.seeds.items()},
                "test": {seed: _finite(outcome.test_loss) for seed, outcome in winner.seeds.items()},
            }
            for winner in ranked
        ],
        "trials": [{**vars(trial), "valid_loss": _finite(loss)} for trial, loss in losses.items()],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def figure(ranked: Sequence[Winner], losses: Mapping[Trial, float], path: Path) -> Path:
    """Loss against rate, one curve for each length, and the winners' curves with the range of their seeds."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed, or asked for
    from ..report.figures import label_ends, new

    drawing, (left, right) = new(2, width=5.6, height=3.8)
    lengths = sorted({trial.steps for trial in losses}, reverse=True)
    dashes = dict(zip(lengths, _STYLES * len(lengths), strict=False))
    finite = [loss for loss in losses.values() if math.isfinite(loss)]
    rates, seeds = [], []
    left.set(xscale="log", xlabel="learning rate", ylabel="validation loss (nats a token)")
    for winner in sorted(ranked, key=lambda winner: winner.optimizer):
        style = {"color": palette.color(winner.optimizer.partition(":")[0])}
        drawn = {steps: _by_rate(winner.optimizer, steps, losses) for steps in lengths}
        for steps, points in drawn.items():
            if points:
                left.plot(*zip(*points, strict=True), linestyle=dashes[steps], marker=".", linewidth=1.3, **style)
        ends = [points[-1][1] for points in drawn.values() if points]
        if ends:  # beside the longest runs that there are
            rates.append((winner.optimizer, ends[0], style))
        curves = [_curve(directory) for directory in winner.directories]
        common = sorted(set.intersection(*map(set, curves))) if curves else []
        if common:
            columns = [[curve[step] for curve in curves] for step in common]
            middle = [statistics.fmean(column) for column in columns]
            right.plot(common, middle, linewidth=1.5, **style)
            right.fill_between(common, list(map(min, columns)), list(map(max, columns)), alpha=0.2, lw=0, **style)
            seeds.append((winner.optimizer, middle[-1], style))
    named = ("solid", "dashed", "dotted", "dash-dotted") * len(lengths)
    left.set_title(", ".join(f"{dash}: {steps} steps" for steps, dash in zip(lengths, named, strict=False)), fontsize=9)
    right.set(xlabel="step", ylabel="validation loss")
    right.set_title("mean and range of seeds, each at its best rate", fontsize=9)
    if finite:  # a rate that all but diverged must not flatten the rest
        low, high = min(finite), min(max(finite), 2 * statistics.median(finite) - min(finite) + 0.1)
        left.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    drawing.canvas.draw()  # the layout, by which labels are placed
    for ax, labels in ((left, rates), (right, seeds)):
        low, high = ax.get_ylim()
        label_ends(ax, [(name, min(max(end, low), high), style) for name, end, style in labels])
    path.parent.mkdir(parents=True, exist_ok=True)
    for end in (".png", ".svg"):
        drawing.savefig(path.with_suffix(end), dpi=150)
    return path


def _by_rate(optimizer: str, steps: int, losses: Mapping[Trial, float]) -> list[tuple[float, float]]:
    """Rates and losses of an optimizer's runs of one length."""
    return sorted(
        (trial.rate, loss)
        for trial, loss in losses.items()
        if trial.optimizer == optimizer and trial.steps == steps and math.isfinite(loss)
    )


def _curve(directory: Path) -> dict[int, float]:
    records = metrics.read(directory)
    return {r["step"]: r["valid_loss"] for r in records if math.isfinite(r.get("valid_loss", math.nan))}
