"""Images: six optimizers at small and at full batch, on handwritten digits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from .figures import COLOURS, new_figure, plain_ticks, save
from .image_data import Images, digits
from .image_training import OPTIMIZERS, Outcome, make_optimizer, train
from .networks import DigitsNet
from .study import Claim, Result, mean_and_spread, verdict

TITLE = "Images: small batches and full batch"
TRAIN = 1200
SMALL = 32
STRONG = "ALTO, rho 0.5"
_ADAM = {SMALL: (3e-3, 1e-2, 3e-2), TRAIN: (0.01, 0.03, 0.1)}
_LAMB = {SMALL: (0.01, 0.03, 0.1), TRAIN: (0.05, 0.1, 0.2)}
#: Rates by optimizer and batch size, around the best of a first look.
RATES: dict[str, dict[int, tuple[float, ...]]] = {
    "SGD": {SMALL: (0.02, 0.1, 0.5), TRAIN: (0.2, 0.5, 1.0)},
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "AdaBelief": _ADAM,
    "LAMB": _LAMB,
    "ALTO": _LAMB,
    STRONG: {TRAIN: _LAMB[TRAIN]},
}
EPOCHS = {SMALL: 10, TRAIN: 60}
INTRO = f"""\
A small CNN (two convolutions with batch norm, one linear layer) on scikit-learn's handwritten digits: {TRAIN:,} images
to train on, 597 to test, no augmentation. The six optimizers of the paper's table, three rates each, the rate divided
by ten after every quarter of the epochs as in the paper: {EPOCHS[SMALL]} epochs in batches of {SMALL} (380 updates) and
{EPOCHS[TRAIN]} epochs at full batch ({EPOCHS[TRAIN]} updates). LAMB and ALTO have the paper's settings for the batch
size; "{STRONG}" is alpha -50 instead of -5. The table has the rate with the lowest mean test loss for each; mean and
half of the range over the seeds."""


@dataclass(frozen=True)
class Trial:
    optimizer: str
    batch: int
    lr: float
    seed: int


def run_trial(trial: Trial, train_set: Images, test_set: Images, epochs: int) -> Outcome:
    torch.manual_seed(trial.seed)
    model = DigitsNet()
    name, options = (trial.optimizer, {}) if trial.optimizer != STRONG else ("ALTO", {"alpha": -50.0})
    optimizer = make_optimizer(name, model, trial.lr, trial.batch, **options)
    return train(model, optimizer, train_set, test_set, trial.batch, epochs, trial.seed)


def run(quick: bool, into: Path) -> Result:
    seeds = [0] if quick else [0, 1, 2]
    epochs = {SMALL: 2, TRAIN: 16} if quick else EPOCHS
    sets = digits(TRAIN)
    trials = [
        Trial(optimizer, batch, lr, seed)
        for optimizer, rates in RATES.items()
        for batch, choices in rates.items()
        # The quick form takes the middle one.
        for lr in (choices[1:2] if quick else choices)
        for seed in seeds
    ]
    outcomes = {trial: run_trial(trial, *sets, epochs[trial.batch]) for trial in trials}
    everything = _table(outcomes)
    rows = _best(everything)
    return Result(
        study="images",
        title=TITLE,
        form="quick" if quick else "full",
        settings={
            "train": TRAIN,
            "epochs": {str(batch): count for batch, count in epochs.items()},
            "weight decay": 1e-4,
            "schedule": "a tenth of the rate after every quarter of the epochs",
            "every rate": everything,
        },
        seeds=seeds,
        rows=rows,
        figures=[_draw(everything, into)],
        claims=[_best_of_six(rows), _above_lamb(rows), _marginal(rows), _grows(rows), *_out_of_reach()],
        notes=_notes(rows),
        guidance=[] if quick else _guidance(rows),
        intro=INTRO,
    )


def _table(outcomes: dict[Trial, Outcome]) -> list[dict[str, Any]]:
    """A row for every optimizer, batch and rate."""
    groups: dict[tuple[str, int, float], list[Outcome]] = {}
    for trial, outcome in outcomes.items():
        groups.setdefault((trial.optimizer, trial.batch, trial.lr), []).append(outcome)
    rows = []
    for (optimizer, batch, lr), found in groups.items():
        accuracy, accuracy_spread = mean_and_spread([one.accuracy for one in found])
        loss, loss_spread = mean_and_spread([one.loss for one in found])
        rows.append(
            {
                "optimizer": optimizer,
                "batch": batch,
                "lr": lr,
                "test accuracy (%)": accuracy,
                "accuracy spread": accuracy_spread,
                "test loss": loss,
                "loss spread": loss_spread,
                "train loss": fmean(one.train_loss for one in found),
            }
        )
    return rows


def _best(everything: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each optimizer and batch, the rate with the lowest mean test loss."""
    best: dict[tuple[int, str], dict[str, Any]] = {}
    for row in everything:
        key = (row["batch"], row["optimizer"])
        # A loss that is not a number is smaller than nothing.
        if key not in best or not best[key]["test loss"] <= row["test loss"]:
            best[key] = row
    return [best[key] for key in sorted(best, key=lambda key: key[0])]


def _of(rows: list[dict[str, Any]], batch: int) -> dict[str, dict[str, Any]]:
    return {row["optimizer"]: row for row in rows if row["batch"] == batch}


def clearly(better: dict[str, Any], worse: dict[str, Any]) -> bool:
    """More accurate by more than either's spread."""
    difference = better["test accuracy (%)"] - worse["test accuracy (%)"]
    return bool(difference > max(better["accuracy spread"], worse["accuracy spread"]))


def _told(row: dict[str, Any]) -> str:
    return f"{row['optimizer']} {row['test accuracy (%)']:.2f}±{row['accuracy spread']:.2f}"


def _best_of_six(rows: list[dict[str, Any]]) -> Claim:
    full = _of(rows, TRAIN)
    others = [full[name] for name in OPTIMIZERS if name != "ALTO"]
    return Claim(
        "With large batches ALTO has the best test accuracy of the six optimizers.",
        "image classification, table of top-1 accuracies",
        verdict([clearly(full["ALTO"], other) for other in others]),
        f"Test accuracy at full batch: {', '.join(_told(full[name]) for name in OPTIMIZERS)}. A difference counts if "
        "it is larger than the spread over seeds.",
    )


def _above_lamb(rows: list[dict[str, Any]]) -> Claim:
    full = _of(rows, TRAIN)
    ours, lamb = full["ALTO"], full["LAMB"]
    return Claim(
        "With large batches ALTO is more accurate than LAMB.",
        "image classification, tables of CIFAR and ImageNet",
        verdict([clearly(ours, lamb)]),
        f"At full batch {_told(ours)} (test loss {ours['test loss']:.4f}), {_told(lamb)} (test loss "
        f"{lamb['test loss']:.4f}); with ten times the alpha {_told(full[STRONG])} ({full[STRONG]['test loss']:.4f}).",
    )


def _marginal(rows: list[dict[str, Any]]) -> Claim:
    small = _of(rows, SMALL)
    ours, lamb = small["ALTO"], small["LAMB"]
    return Claim(
        "With small batches ALTO (alpha 0.5) improves on LAMB, but marginally.",
        "experiments; table of small-batch accuracies in the appendix",
        # Within the spread over seeds an improvement is no more than a hint.
        verdict([ours["test accuracy (%)"] > lamb["test accuracy (%)"], clearly(ours, lamb)]),
        f"With batches of {SMALL}: {', '.join(_told(small[name]) for name in OPTIMIZERS)}; test loss of ALTO "
        f"{ours['test loss']:.4f}, of LAMB {lamb['test loss']:.4f}.",
    )


def _grows(rows: list[dict[str, Any]]) -> Claim:
    gains = {b: _of(rows, b)["ALTO"]["test accuracy (%)"] - _of(rows, b)["LAMB"]["test accuracy (%)"] for b in EPOCHS}
    spread = max(row["accuracy spread"] for row in rows if row["optimizer"] in ("ALTO", "LAMB"))
    return Claim(
        "The larger the batch, the larger ALTO's advantage over LAMB.",
        "image classification",
        verdict([gains[TRAIN] - gains[SMALL] > spread]),
        f"ALTO minus LAMB, in points of accuracy: {gains[SMALL]:+.2f} with batches of {SMALL}, {gains[TRAIN]:+.2f} at "
        f"full batch (spread {spread:.2f}).",
    )


def _out_of_reach() -> list[Claim]:
    how = "Neither the data nor a GPU is here; the settings are in configs/images, and run with --data."
    return [
        Claim(
            "ResNet20 on CIFAR-10 and CIFAR-100 at batch 16384: ALTO 88.83% and 57.78%, LAMB 83.56% and 56.06%.",
            "image classification, table of top-1 accuracies",
            verdict([]),
            how,
        ),
        Claim(
            "ResNet34 and ResNet50 on ImageNet at batches of 1K to 32K: ALTO above LAMB by 0.1 to 0.5 points.",
            "image classification, tables of ImageNet",
            verdict([]),
            how,
        ),
    ]


def _notes(rows: list[dict[str, Any]]) -> list[str]:
    edges = [
        f"{row['optimizer']} at batch {row['batch']} ({row['lr']:g})"
        for row in rows
        if row["lr"] in (RATES[row["optimizer"]][row["batch"]][0], RATES[row["optimizer"]][row["batch"]][-1])
    ]
    return [f"The best rate was at the edge of the three that were tried for: {', '.join(edges)}."] if edges else []


def _guidance(rows: list[dict[str, Any]]) -> list[str]:
    small, full = _of(rows, SMALL), _of(rows, TRAIN)
    strong = full[STRONG]["test loss"] - full["LAMB"]["test loss"]
    return [
        f"The best rate of ALTO on digits was {small['ALTO']['lr']:g} in batches of {SMALL} and {full['ALTO']['lr']:g} "
        f"at full batch ({TRAIN:,}); LAMB's were {small['LAMB']['lr']:g} and {full['LAMB']['lr']:g}. Tune lr first.",
        f"At full batch on digits, against LAMB's test loss of {full['LAMB']['test loss']:.4f}, rho = 0.05 changed it "
        f"by {full['ALTO']['test loss'] - full['LAMB']['test loss']:+.4f} and rho = 0.5 by {strong:+.4f} "
        f"(spread over seeds {full['LAMB']['loss spread']:.4f}).",
    ]


def _draw(everything: list[dict[str, Any]], into: Path) -> str:
    figure, axes = new_figure(1, 2, width=5.4, height=3.8)
    for axis, batch in zip(axes[0], (SMALL, TRAIN), strict=True):
        for name, rates in RATES.items():
            rows = [row for row in everything if row["optimizer"] == name and row["batch"] == batch]
            if batch in rates and rows:
                colour = "tab:pink" if name == STRONG else COLOURS[name]
                style = "--" if name in ("Adam", STRONG) else "-"
                x, y, spread = zip(*((r["lr"], r["test loss"], r["loss spread"]) for r in rows), strict=True)
                axis.errorbar(x, y, yerr=spread, color=colour, ls=style, marker="o", ms=4, capsize=3, label=name)
        axis.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="test loss")
        axis.set_title(f"batches of {batch}" if batch == SMALL else f"full batch ({batch:,})")
        plain_ticks(axis.xaxis, axis.yaxis)
        axis.legend(fontsize=8)
    return save(figure, into, "rates.png")
