"""Ablation: what each part of ALTO is worth, on handwritten digits at full batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from alto_distributed import param_groups

from .ablated import AblatedALTO
from .figures import new_figure, save
from .image_data import Images, digits
from .image_training import Outcome, train
from .images import EPOCHS, RATES, TRAIN
from .networks import DigitsNet
from .study import Claim, Result, mean_and_spread, verdict

TITLE = "Ablation: what each part is worth"
#: In the paper's order, with the paper's difference to ALTO on CIFAR-10 at batch 16384, in points.
VARIANTS: dict[str, tuple[dict[str, bool], float]] = {
    "ALTO": ({}, 0.0),
    "- a in m": ({"in_m": False}, -1.77),
    "- a in v": ({"in_v": False}, -1.75),
    "- bias correction": ({"bias_correction": False}, -1.32),
    "- layer-wise ratio": ({"ratio": False}, -2.61),
    "- a (LAMB)": ({"in_m": False, "in_v": False}, -0.72),
    "- a, bias correction": ({"in_m": False, "in_v": False, "bias_correction": False}, -3.92),
    "- all": ({"in_m": False, "in_v": False, "bias_correction": False, "ratio": False}, -11.28),
}
#: Variants without one part.
SINGLE = ("- a in m", "- a in v", "- bias correction")
ALPHAS = (-5.0, -50.0)
INTRO = f"""\
The digits, network and schedule of the study of images, at full batch ({TRAIN:,} samples, {EPOCHS[TRAIN]} updates).
Each variant has the best of three rates by mean test loss; without the layer-wise ratio the rates are those of Adam,
for they mean something else. Once with the paper's alpha (-5, rho = 0.05), and once with ten times as much, where the
acceleration has a weight that could be seen."""


def rates_of(parts: dict[str, bool]) -> tuple[float, ...]:
    return RATES["ALTO" if parts.get("ratio", True) else "AdamW"][TRAIN]


def run_variant(parts: dict[str, bool], alpha: float, lr: float, seed: int, sets: Any, epochs: int) -> Outcome:
    train_set: Images
    train_set, test_set = sets
    torch.manual_seed(seed)
    model = DigitsNet()
    optimizer = AblatedALTO(param_groups(model, 1e-4), lr, alpha, **parts)
    return train(model, optimizer, train_set, test_set, TRAIN, epochs, seed)


def run(quick: bool, into: Path) -> Result:
    seeds = [0] if quick else [0, 1, 2]
    epochs = 12 if quick else EPOCHS[TRAIN]
    sets = digits(TRAIN)
    rows: list[dict[str, Any]] = []
    for alpha in ALPHAS[1:] if quick else ALPHAS:
        for name, (parts, paper) in VARIANTS.items():
            accelerated = parts.get("in_m", True) or parts.get("in_v", True)
            if rows and alpha != rows[0]["alpha"] and not accelerated:
                continue  # it would be the same run again
            choices = rates_of(parts)[1:2] if quick else rates_of(parts)
            tried = [(lr, [run_variant(parts, alpha, lr, seed, sets, epochs) for seed in seeds]) for lr in choices]
            lr, found = min(tried, key=lambda pair: mean_and_spread([one.loss for one in pair[1]])[0])
            rows.append(_row(name, alpha, lr, found, paper))
    for row in rows:
        whole = next(r for r in rows if r["variant"] == "ALTO" and r["alpha"] == row["alpha"])
        row["difference"] = row["test accuracy (%)"] - whole["test accuracy (%)"]
    return Result(
        study="ablation",
        title=TITLE,
        form="quick" if quick else "full",
        settings={"train": TRAIN, "epochs": epochs, "rates": {name: rates_of(p) for name, (p, _) in VARIANTS.items()}},
        seeds=seeds,
        rows=rows,
        figures=[_draw(rows, into)],
        claims=_claims(rows),
        guidance=[] if quick else _guidance(rows),
        intro=INTRO,
    )


def _row(name: str, alpha: float, lr: float, found: list[Outcome], paper: float) -> dict[str, Any]:
    accuracy, accuracy_spread = mean_and_spread([one.accuracy for one in found])
    loss, loss_spread = mean_and_spread([one.loss for one in found])
    return {
        "variant": name,
        "alpha": alpha,
        "lr": lr,
        "test accuracy (%)": accuracy,
        "accuracy spread": accuracy_spread,
        "difference": 0.0,
        "paper's difference": paper,
        "test loss": loss,
        "loss spread": loss_spread,
    }


def _clearly_worse(row: dict[str, Any], whole: dict[str, Any]) -> bool:
    """By the loss, which tells more than 597 images' accuracy, and by more than either's spread."""
    return bool(row["test loss"] - whole["test loss"] > max(row["loss spread"], whole["loss spread"]))


def _claims(rows: list[dict[str, Any]]) -> list[Claim]:
    claims = []
    for alpha in sorted({row["alpha"] for row in rows}, reverse=True):
        here = {row["variant"]: row for row in rows if row["alpha"] == alpha}
        whole = here.pop("ALTO")
        told = ", ".join(f"{name} {row['difference']:+.2f} ({row['test loss']:.4f})" for name, row in here.items())
        claims.append(
            Claim(
                f"Every part of ALTO is indispensable (here with alpha {alpha:g}).",
                "ablation study, table",
                verdict([_clearly_worse(row, whole) for row in here.values()]),
                f"Difference in points of accuracy (test loss; the whole {whole['test loss']:.4f}"
                f"±{whole['loss spread']:.4f}): {told}. Indispensable means a loss higher by more than the spread.",
            )
        )
    by_name = {(row["variant"], row["alpha"]): row for row in rows}
    first = max(alpha for _, alpha in by_name)
    ratio, plain = by_name["- layer-wise ratio", first], by_name["ALTO", first]
    acceleration = by_name["- a in m", first]
    worth = [row["test loss"] - plain["test loss"] for row in (ratio, acceleration)]
    claims.append(
        Claim(
            "Of the single parts, the layer-wise ratio is worth the most.",
            "ablation study, table (CIFAR-10)",
            verdict([ratio["test loss"] >= by_name[name, first]["test loss"] for name in SINGLE]),
            f"Test loss without the ratio {worth[0]:+.4f}, without the acceleration in m {worth[1]:+.4f}.",
        )
    )
    return claims


def _guidance(rows: list[dict[str, Any]]) -> list[str]:
    first = [row for row in rows if row["alpha"] == ALPHAS[0] and row["variant"] != "ALTO"]
    worst = max(first, key=lambda row: row["test loss"])
    least = min(first, key=lambda row: abs(row["difference"]))
    return [
        f'At full batch on digits, what cost most to leave out was "{worst["variant"][2:]}" (test loss '
        f'{worst["test loss"]:.4f}); what mattered least was "{least["variant"][2:]}".'
    ]


def _draw(rows: list[dict[str, Any]], into: Path) -> str:
    figure, axes = new_figure(1, 1, width=7.5, height=3.8)
    axis = axes[0][0]
    names = list(VARIANTS)
    for alpha, colour, offset in zip(ALPHAS, ("tab:red", "tab:pink"), (0.15, -0.15), strict=True):
        here = [row for row in rows if row["alpha"] == alpha]
        if here:
            axis.errorbar(
                [row["test loss"] for row in here],
                [len(names) - names.index(row["variant"]) + offset for row in here],
                xerr=[row["loss spread"] for row in here],
                fmt="o",
                color=colour,
                capsize=3,
                label=f"alpha {alpha:g}",
            )
    axis.set_yticks(range(1, len(names) + 1), names[::-1])
    axis.set(xlabel="test loss (mean and range over the seeds)")
    axis.grid(axis="x", which="both", alpha=0.3)
    axis.legend()
    return save(figure, into, "ablation.png")
