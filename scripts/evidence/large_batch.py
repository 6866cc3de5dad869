"""The large-batch challenge: sin(x) by regression, small batches against all data at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from alto_distributed import ALTO, param_groups, recipe

from .figures import COLOURS, new_figure, plain_ticks, save
from .paired import LEAST_SEEDS
from .study import Claim, Result, mean_and_spread, verdict

TITLE = "The large-batch challenge: the same epochs, far fewer updates"
TRAIN, VALIDATION = 32768, 8192
SMALL = 256
HIDDEN = 32
NOISE = 0.1
LR = 1e-2
#: Good enough: the noise alone gives NOISE**2 = 0.01.
TARGET = 0.03
STRONG = -50.0
INTRO = f"""\
The paper's appendix: a network of three layers learns y = sin(x) for x in [-10, 10] with noise, at a constant rate,
with batches of {SMALL} and with all {TRAIN:,} samples at once. The paper gives no widths, noise or rate: here {HIDDEN}
hidden units, noise {NOISE}, rate {LR:g} for all. ALTO has the paper's settings for the batch size; a second ALTO at
full batch has alpha {STRONG:g} (rho = {-STRONG * 0.01:g}). "Solved" means a validation error below {TARGET}."""


@dataclass(frozen=True)
class Trial:
    optimizer: str
    batch: int
    seed: int
    alpha: float = 0.0

    @property
    def label(self) -> str:
        return f"ALTO alpha {self.alpha:g}" if self.optimizer == "ALTO" and self.batch > SMALL else self.optimizer


def samples(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 1, generator=generator) * 20 - 10
    return x, x.sin() + NOISE * torch.randn(count, 1, generator=generator)


def optimizer_for(trial: Trial, model: nn.Module) -> torch.optim.Optimizer:
    groups = param_groups(model, weight_decay=1e-4)
    if trial.optimizer == "AdamW":
        return torch.optim.AdamW(groups, lr=LR)
    settings = recipe(trial.batch)
    return ALTO(groups, **{**settings, "lr": LR, "alpha": trial.alpha})


def train(trial: Trial, epochs: int, train_size: int = TRAIN) -> list[tuple[float, float]]:
    """(epoch, validation error) along the way: after every epoch of small batches, every fifth of full ones."""
    x, y = samples(trial.seed, train_size)
    held_x, held_y = samples(trial.seed + 1000, VALIDATION)
    torch.manual_seed(trial.seed)
    model = nn.Sequential(nn.Linear(1, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
    optimizer = optimizer_for(trial, model)
    full = trial.batch >= train_size
    curve = []
    for epoch in range(1, epochs + 1):
        order = None if full else torch.randperm(train_size)
        for start in range(0, train_size, trial.batch):
            chosen = slice(None) if order is None else order[start : start + trial.batch]
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
        if not full or epoch % 5 == 0:
            with torch.no_grad():
                curve.append((float(epoch), nn.functional.mse_loss(model(held_x), held_y).item()))
    return curve


def solved_at(curve: list[tuple[float, float]]) -> float:
    """The first epoch below the target, or infinity."""
    return next((epoch for epoch, error in curve if error < TARGET), math.inf)


def has_stair(curve: list[tuple[float, float]]) -> bool:
    """A sudden drop after a plateau: over a fifth of the time to solve (or of the run) the error falls by less than a
    fifth, and over the next fifth to less than a half."""
    errors = [error for _, error in curve]
    solved = next((i for i, error in enumerate(errors) if error < TARGET), len(errors) - 1)
    fifth = max(1, (solved + 1) // 5)
    # The lowest so far: at a constant rate single values jump.
    lowest = [min(errors[: i + 1]) for i in range(len(errors))]
    return any(
        lowest[i] > 0.8 * lowest[i - fifth] and lowest[i + fifth] < 0.5 * lowest[i]
        for i in range(fifth, len(lowest) - fifth)
    )


def run(quick: bool, into: Path) -> Result:
    # The quick form is smaller in every way: it shows that small batches need fewer epochs, and little more.
    seeds = [0] if quick else [0, 1, 2]
    size, full_epochs, small_epochs = (4096, 60, 12) if quick else (TRAIN, 750, 30)
    kinds = [("AdamW", 0.0), ("LAMB", 0.0), ("ALTO", recipe(TRAIN)["alpha"]), ("ALTO", STRONG)]
    trials = [Trial(name, size, seed, alpha) for name, alpha in kinds for seed in seeds]
    small_kinds = [*kinds[:2], ("ALTO", recipe(SMALL)["alpha"])]
    trials += [Trial(name, SMALL, seed, alpha) for name, alpha in small_kinds for seed in seeds]
    curves = {t: train(t, small_epochs if t.batch == SMALL else full_epochs, size) for t in trials}
    rows = [_row(group, size) for group in _grouped(curves)]
    return Result(
        study="large_batch",
        title=TITLE,
        form="quick" if quick else "full",
        settings={
            "samples": size,
            "epochs": {"full batch": full_epochs, f"batch {SMALL}": small_epochs},
            "lr": LR,
            "hidden": HIDDEN,
            "noise": NOISE,
            "target": TARGET,
        },
        seeds=seeds,
        rows=rows,
        figures=[_draw(curves, into)],
        claims=[_more_epochs(rows), _stairs(rows), _faster(rows)],
        guidance=[] if quick else _guidance(rows),
        intro=INTRO,
    )


Curves = dict[Trial, list[tuple[float, float]]]


def _grouped(curves: Curves) -> list[Curves]:
    """Curves that differ in their seed alone."""
    groups: dict[tuple[str, int], Curves] = {}
    for trial, curve in curves.items():
        groups.setdefault((trial.label, trial.batch), {})[trial] = curve
    return list(groups.values())


def _row(group: Curves, size: int) -> dict[str, Any]:
    trial = next(iter(group))
    best, spread = mean_and_spread([min(error for _, error in curve) for curve in group.values()])
    by_seed = [solved_at(curve) for curve in group.values()]
    median = sorted(by_seed)[len(by_seed) // 2]
    return {
        "optimizer": trial.label,
        "batch": trial.batch,
        "alpha": trial.alpha,
        "epochs run": int(next(iter(group.values()))[-1][0]),
        "best error": best,
        "spread": spread,
        "solved": f"{sum(map(math.isfinite, by_seed))} of {len(by_seed)}",
        "epochs to solve, by seed": ", ".join(f"{epoch:g}" if math.isfinite(epoch) else "-" for epoch in by_seed),
        "epochs to solve (median)": median,
        "updates to solve (median)": median * math.ceil(size / trial.batch),
        "runs with a stair": sum(has_stair(curve) for curve in group.values()),
    }


def _split(rows: list[dict[str, Any]]) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """(small batch, full batch) by optimizer."""
    return (
        {row["optimizer"]: row for row in rows if row["batch"] == SMALL},
        {row["optimizer"]: row for row in rows if row["batch"] != SMALL},
    )


def _epochs(row: dict[str, Any]) -> str:
    epochs = row["epochs to solve (median)"]
    return f"{epochs:.0f}" if math.isfinite(epochs) else f"more than {row['epochs run']}"


def _more_epochs(rows: list[dict[str, Any]]) -> Claim:
    small, full = _split(rows)
    pairs = [(small[row["optimizer"].split()[0]], row) for row in full.values()]
    # A run that was not solved in the epochs it had counts as solved just then: the factor is a lower bound.
    factors = [
        min(b["epochs to solve (median)"], b["epochs run"]) / min(a["epochs to solve (median)"], a["epochs run"])
        for a, b in pairs
    ]
    told = "; ".join(f"{b['optimizer']} {_epochs(a)} and {_epochs(b)}" for a, b in pairs)
    return Claim(
        "At full batch the same task needs many times the epochs of small batches, about as many times as the batch is "
        "larger (128).",
        "appendix, the challenge in large-batch training",
        verdict([factor >= 10 for factor in factors if _has_seeds(rows)]),
        f"Epochs to solve it with batches of {SMALL} and at full batch, median of seeds: {told}. To hold, it takes ten "
        f"times as many, with {LEAST_SEEDS} seeds.",
    )


def _stairs(rows: list[dict[str, Any]]) -> Claim:
    small, full = _split(rows)
    counts = [
        sum(row["runs with a stair"] for row in part.values()) / sum(_runs(row) for row in part.values())
        for part in (full, small)
    ]
    return Claim(
        "At full batch the loss falls in stairs, with a sudden drop after a plateau; with small batches it does not.",
        "appendix, the challenge in large-batch training",
        verdict([counts[0] > 0.5 > counts[1]] if _has_seeds(rows) else []),
        f"Runs with such a stair: {counts[0]:.0%} at full batch, {counts[1]:.0%} with batches of {SMALL} (over a "
        "fifth of the time to solve less than a fifth off, over the next fifth more than a half).",
    )


def _has_seeds(rows: list[dict[str, Any]]) -> bool:
    """Whether there are as many as a difference needs."""
    return min(map(_runs, rows)) >= LEAST_SEEDS


def _runs(row: dict[str, Any]) -> int:
    return int(row["solved"].split()[-1])


def _faster(rows: list[dict[str, Any]]) -> Claim:
    _, full = _split(rows)
    adapted = [row for name, row in full.items() if name.startswith("ALTO")]
    told = "; ".join(f"{row['optimizer']} {row['epochs to solve, by seed']}" for row in full.values())
    ends = ", ".join(f"{row['optimizer']} {row['best error']:.4f}" for row in full.values())
    pairs = [pair for row in adapted for pair in zip(_by_seed(row), _by_seed(full["LAMB"]), strict=True)]
    return Claim(
        "At the same rate the adapted optimizer trains faster at full batch.",
        "method, why large-batch training is important",
        verdict([ours < theirs for ours, theirs in pairs if _has_seeds(rows)]),
        f"Updates to solve it at full batch, by seed: {told}. ALTO against LAMB, seed by seed. Best error: {ends}.",
    )


def _by_seed(row: dict[str, Any]) -> list[float]:
    return [math.inf if told == "-" else float(told) for told in row["epochs to solve, by seed"].split(", ")]


def _guidance(rows: list[dict[str, Any]]) -> list[str]:
    small, full = _split(rows)
    best, quickest = (
        min(part.values(), key=lambda row: (row["epochs to solve (median)"], row["best error"]))
        for part in (full, small)
    )
    return [
        f"On sin(x), lr {LR:g} for all, the fewest epochs at full batch were those of {best['optimizer']} "
        f"({_epochs(best)}), with batches of {SMALL} those of {quickest['optimizer']} ({_epochs(quickest)})."
    ]


def _draw(curves: Curves, into: Path) -> str:
    figure, axes = new_figure(1, 2, width=5.4, height=3.7)
    styles = {"AdamW": COLOURS["AdamW"], "LAMB": COLOURS["LAMB"], "ALTO": COLOURS["ALTO"]}
    for axis, small in zip(axes[0], (True, False), strict=True):
        named = set()
        for trial, curve in curves.items():
            if (trial.batch == SMALL) != small:
                continue
            strong = trial.alpha == STRONG
            label = None if trial.label in named else trial.label
            named.add(trial.label)
            epochs, errors = zip(*curve, strict=True)
            lowest = [min(errors[: i + 1]) for i in range(len(errors))]
            colour = "tab:pink" if strong else styles[trial.optimizer]
            axis.plot(epochs, lowest, color=colour, lw=1.3, label=label)
        axis.axhline(TARGET, color="black", lw=0.8, ls=":")
        axis.set(yscale="log", xlabel="epoch", ylabel="validation error, lowest so far")
        axis.set_title(f"batches of {SMALL}" if small else "all samples at once")
        plain_ticks(axis.yaxis)
        axis.legend(fontsize=8)
    return save(figure, into, "curves.png")
