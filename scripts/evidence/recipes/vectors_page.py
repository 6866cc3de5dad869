"""The page on the rate of vectors and the rule for embeddings."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from ..figures import new_figure, plain_ticks, save
from .ledger import Ledger, OutOfTime
from .parts import Comparisons, Part, effect, losses_of, settings_of, told
from .queue import EMBEDDINGS, RECOMMENDED, SHIPPED, SMALL, VECTORS, Cell, Judged, each_cell, vector_rates
from .trials import Trial

NAME = "vectors"
TITLE = "At which rate should vectors and embeddings move?"


class _Model:
    """What there is of one model: its cells, and those that are judged once all cells are there."""

    def __init__(self, model: str, ledger: Ledger) -> None:
        self.name, self.setting = model, SMALL[model]
        self.judged: dict[Cell, Judged] = {}
        tuned: dict[Cell, Trial] = {}
        try:
            for key, trial, _ in each_cell(self.setting, ledger.loss):
                tuned[key] = trial
            self.judged = vector_rates(self.setting, ledger)
        except OutOfTime:
            pass
        keys: list[Cell] = [(vectors, rule) for rule in EMBEDDINGS for vectors in VECTORS]
        self.trials = {key: tuned[key] for key in keys if key in tuned}
        self.valid = {key: ledger.loss(trial) for key, trial in self.trials.items()}

    def best(self, *rules: str) -> Cell:
        """The validation text's choice."""
        return min((key for key in self.valid if key[1] in (rules or EMBEDDINGS)), key=self.valid.__getitem__)

    def compare(self, found: Comparisons) -> None:
        for key, judged in self.judged.items():
            if key != SHIPPED:
                found.add((self.name, key), judged, self.judged[SHIPPED])
        if self.judged:
            found.add((self.name, "rules"), self.judged[self.best("adam")], self.judged[self.best("ratio")])
        if {(0.3, "adam"), (1.0, "adam")} <= set(self.judged):
            found.add((self.name, "slower under adam"), self.judged[0.3, "adam"], self.judged[1.0, "adam"])

    def rows(self, found: Comparisons) -> list[dict[str, Any]]:
        return [
            {
                "model": self.name,
                **settings_of(trial),
                "validation loss": round(self.valid[key], 4),
                **(losses_of(self.judged[key]) if key in self.judged else {"test loss": None, "test loss by seed": ""}),
                "less one rate for all": told(found[self.name, key]) if (self.name, key) in found else "",
            }
            for key, trial in self.trials.items()
        ]

    def sentences(self, found: Comparisons) -> list[str]:
        if not self.judged:
            all_of_them = len(VECTORS) * len(EMBEDDINGS)
            vectors, rule = best = self.best()
            return [
                f"{self.name} GPT: not finished, {len(self.trials)} of {all_of_them} rows are tuned. Of these, "
                f'`vector_lr={vectors:g}` with `embeddings="{rule}"` has the lowest validation loss, '
                f"{self.valid[best]:.3f}. None is judged."
            ]
        best = self.best()
        told_of = [
            f'{self.name} GPT: the validation text chooses `vector_lr={best[0]:g}` with `embeddings="{best[1]}"`.'
        ]
        if best != SHIPPED:
            told_of[0] += f" Beside one rate for all, that {effect(found[self.name, best])}."
        told_of.append(
            f"{self.name} GPT, embeddings with the ratio: `vector_lr=0.3` instead of 1 "
            f"{effect(found[self.name, RECOMMENDED])}."
        )
        if (self.name, "slower under adam") in found:
            gap = found[self.name, "slower under adam"]
            told_of.append(
                f"{self.name} GPT, embeddings without the ratio: `vector_lr=0.3` instead of 1 {effect(gap)}."
            )
        told_of.append(
            f"{self.name} GPT: taking the ratio from embeddings {effect(found[self.name, 'rules'])}. Each has the "
            f"`vector_lr` that the validation text chooses, {self.best('adam')[0]:g} without the ratio and "
            f"{self.best('ratio')[0]:g} with it."
        )
        return told_of

    def summary(self, found: Comparisons) -> str:
        if not self.judged:
            vectors, rule = self.best()
            lowest = f'`vector_lr={vectors:g}` with `embeddings="{rule}"`'
            return f"The {self.name} GPT is not finished; its lowest validation loss so far is that of {lowest}."
        slower, rules = found[self.name, RECOMMENDED], found[self.name, "rules"]
        return (
            f"On the {self.name} GPT, moving norms and biases at 0.3 of the rate {effect(slower)}. Taking the ratio "
            f"from embeddings {effect(rules)}, each at its best `vector_lr`."
        )


def make(ledger: Ledger) -> Part:
    """The page, as soon as the small model is finished.

    Raises:
        OutOfTime: it is not.
    """
    models = [model for model in (_Model(name, ledger) for name in SMALL) if model.trials]
    if not models or not models[0].judged:
        raise OutOfTime(NAME)
    found = Comparisons()
    for model in models:
        model.compare(found)
    rows = [row for model in models for row in model.rows(found)]

    def draw(into: Path) -> None:
        judged = [model for model in models if model.judged]
        figure, axes = new_figure(1, len(judged))
        for axis, model in zip(axes[0], judged, strict=True):
            for rule, color in (("ratio", "tab:orange"), ("adam", "tab:blue")):
                at = [v for v in VECTORS if (v, rule) in model.judged]
                losses = [model.judged[v, rule].losses for v in at]
                middle = [statistics.fmean(some) for some in losses]
                ends = [[m - min(x) for m, x in zip(middle, losses, strict=True)]]
                ends.append([max(x) - m for m, x in zip(middle, losses, strict=True)])
                axis.errorbar(at, middle, ends, color=color, marker="o", capsize=3, label=f"embeddings: {rule}")
            axis.set(xscale="log", xlabel="vector_lr", ylabel="test loss, nats", title=f"{model.setting}")
            plain_ticks(axis.xaxis)
            axis.legend()
        save(figure, into, f"{NAME}.png")

    columns = ("model", "vector_lr", "embeddings", "lr", "validation loss", "test loss", "less one rate for all")
    return Part(
        NAME,
        TITLE,
        "Rates of vectors and embeddings",
        "Norms and biases have no layer-wise ratio, and take Adam steps of lr, which is the relative step of a matrix. "
        "How much smaller should theirs be, and should embeddings have the ratio?",
        " ".join(model.summary(found) for model in models),
        [sentence for model in models for sentence in model.sentences(found)],
        rows,
        [{name: row[name] for name in columns} for row in rows],
        [
            "LAMB with beta2 0.8, each row at its best lr.",
            'Embeddings under "adam" move at lr times `vector_lr`.',
            "Of the larger model, only the rows that decide are judged on the test text.",
            f"{len(found)} comparisons.",
        ],
        draw,
        any(model.name == "1M" and model.judged for model in models),
    )
