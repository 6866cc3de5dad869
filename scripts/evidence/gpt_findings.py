"""Runs of :mod:`.gpt` that are judged, and how two of them compare."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from .paired import LEAST_EFFECT, Difference, paired
from .tiny_gpt import Outcome, Trial

NAMES = {"alto": "ALTO", "lamb": "LAMB", "adamw": "AdamW", "adam": "Adam", "adabelief": "AdaBelief", "lion": "Lion"}
PAPER_ALPHA = -5.0
MOMENTUM = Trial.beta2


@dataclass
class Entry:
    """An optimizer in a setting at its rate, judged."""

    setting: str
    trial: Trial
    outcomes: list[Outcome]

    @property
    def losses(self) -> list[float]:
        return [outcome.final for outcome in self.outcomes]

    @property
    def perplexity(self) -> float:
        return math.exp(min(statistics.fmean(self.losses), 50.0))

    @property
    def name(self) -> str:
        trial = self.trial
        if trial.optimizer != "alto":
            return NAMES[trial.optimizer] + (f" (beta2 {trial.beta2:g})" if trial.beta2 != MOMENTUM else "")
        return f"ALTO (alpha {trial.alpha:g}, beta1 {trial.beta1:g})"

    @property
    def is_paper(self) -> bool:
        return self.trial.optimizer == "alto" and self.trial.alpha == PAPER_ALPHA


@dataclass
class Findings:
    entries: list[Entry]
    tuning: list[tuple[Trial, float]]
    """Trials that a choice was made of, with their validation losses."""

    def at(self, setting: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.setting == setting]

    def peers(self) -> dict[str, Entry]:
        """The six of the paper's table, by name."""
        usual = [entry for entry in self.at("once") if entry.trial.beta2 == MOMENTUM]
        return {e.trial.optimizer: e for e in usual if e.trial.optimizer != "alto" or e.is_paper}

    def calmer(self) -> Entry | None:
        """LAMB with less momentum."""
        return next((entry for entry in self.at("once") if entry.trial.beta2 != MOMENTUM), None)

    def by_rho(self) -> tuple[float, dict[tuple[float, float], float], float]:
        """(rate, losses by (alpha, beta1), LAMB's loss) on the tuning seed, at the rate that most alphas had."""
        share = self.peers()["lamb"].trial.share
        once = [(trial, loss) for trial, loss in self.tuning if trial.share == share and trial.beta2 == MOMENTUM]
        ours = [trial.lr for trial, _ in once if trial.optimizer == "alto"]
        rate = max(ours, key=ours.count)
        losses = {(t.alpha, t.beta1): loss for t, loss in once if t.optimizer == "alto" and t.lr == rate}
        return rate, losses, min(loss for t, loss in once if t.optimizer == "lamb" and t.lr == rate)

    def by_batch(self) -> Iterator[tuple[int, Entry, Entry, Entry]]:
        """(batch, LAMB, the paper's ALTO, the other ALTO) for the same number of epochs, small batches first."""
        for batch in sorted({entry.trial.batch for entry in self.at("epochs")}):
            here = [entry for entry in self.at("epochs") if entry.trial.batch == batch]
            lamb = next(entry for entry in here if entry.trial.optimizer == "lamb")
            paper = next(entry for entry in here if entry.is_paper)
            yield batch, lamb, paper, next(entry for entry in here if entry not in (lamb, paper))


def gap(one: Entry, other: Entry) -> Difference:
    """Nats a token of validation loss by which ``one`` is above ``other``."""
    return paired(one.losses, other.losses, least=LEAST_EFFECT)
