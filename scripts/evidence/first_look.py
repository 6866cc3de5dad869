"""The figure of docs/results/first-look.md, of runs that came before :mod:`.recipes` and are kept as they were."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from .figures import new_figure, save
from .places import RESULTS

RUNS = RESULTS / "first-look.jsonl"
SEEDS = (11, 12, 13)
BATCHES = (128, 32)
#: Label -> what its runs have; all others of 240 iterations with exact norms are left out.
SHOWN: dict[str, dict[str, Any]] = {
    "LAMB, beta2 0.9": {"alpha": None, "beta2": 0.9},
    "LAMB, beta2 0.8": {"alpha": None, "beta2": 0.8},
    "ALTO, alpha 9, beta1 0.9": {"alpha": 9.0, "beta1": 0.9, "beta2": 0.9},
    "ALTO, Nesterov": {"alpha": 0.9, "beta1": 0.0, "beta2": 0.9},
    "ALTO, paper": {"alpha": -5.0, "beta1": 0.99, "beta2": 0.9},
}
#: Runs with one of these are of other questions.
OTHERS = ("norms_of", "nesterov", "states", "embedding_ratio_replaced_by", "muon_lr")


def losses(label: str, batch: int, vectors: float, runs: list[dict[str, Any]]) -> list[float]:
    """By seed, at the best rate; empty if it was not judged there."""
    wanted = {**SHOWN[label], "optimizer": "LAMB/ALTO", "batch": batch, "iterations": 240}
    by_rate: dict[float, dict[int, float]] = {}
    for run in runs:
        settings = run["settings"]
        same = all(settings[name] == value for name, value in wanted.items())
        if same and settings.get("vector_lr_factor", 1.0) == vectors and not any(name in settings for name in OTHERS):
            by_rate.setdefault(settings["lr"], {})[run["seed"]] = run["final_validation_loss"]
    judged = [[at[seed] for seed in SEEDS] for at in by_rate.values() if set(SEEDS) <= set(at)]
    return min(judged, key=statistics.fmean, default=[])


def draw(into: Path) -> str:
    runs = [json.loads(line) for line in RUNS.read_text().splitlines()]
    figure, axes = new_figure(1, len(BATCHES), 4.8, 2.8)
    for axis, batch in zip(axes[0], BATCHES, strict=True):
        for vectors, color in ((1.0, "tab:orange"), (0.3, "tab:blue")):
            found = {i: losses(label, batch, vectors, runs) for i, label in enumerate(reversed(SHOWN))}
            points = [(loss, i) for i, some in found.items() for loss in some]
            axis.plot(*zip(*points, strict=True), "o", color=color, alpha=0.7, label=f"vectors x{vectors:g}")
        axis.set_yticks(range(len(SHOWN)), list(reversed(SHOWN)), fontsize=8)
        axis.set(xlabel="held-out loss, nats, by seed", title=f"{batch} x 240")
        axis.legend(fontsize=8, loc="center right")
    return save(figure, into, "first-look.png")
