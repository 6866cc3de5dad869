"""What a page of the study is made of, and how its differences are counted and told."""

from __future__ import annotations

import csv
import math
import statistics
import textwrap
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..paired import LEAST_EFFECT, Difference, paired
from ..study import markdown_table
from .queue import Judged
from .trials import JUDGED_SEEDS, Trial

WIDTH = 120

REPEAT = (
    "`python -m scripts.evidence.recipes run` goes on where it stopped: runs that are in "
    "[recipes.jsonl](../../scripts/evidence/results/recipes.jsonl) are not run again. "
    "`python -m scripts.evidence page` makes this page. "
)
METHOD = (
    "A GPT-2 on Python sources, with a warm-up and a cosine. All choices are made by the loss on the validation text, "
    "on one seed. Rates are tuned over half-octaves until the best is inside the grid. Losses are those of "
    f"{len(JUDGED_SEEDS)} other seeds on the test text, in nats. Differences are paired by seed, with 95% intervals "
    f"widened for all comparisons of the page. One counts (*) if that excludes 0 and it is over {LEAST_EFFECT} nats."
)
MACHINES = (
    "The runs are from two machines, whose last digits differ. Of ten that ran on both, five were equal to six digits; "
    "the others differ by up to 0.0004 nats at tuned rates, and by up to 0.06 where training is unstable."
)


@dataclass(frozen=True)
class Part:
    """One page."""

    name: str
    title: str
    topic: str
    """Of its answer on the first page."""
    question: str
    summary: str
    """The answer in a few sentences, for the first page as well."""
    findings: Sequence[str]
    """A sentence or two each."""
    rows: list[dict[str, Any]]
    """All there is to know, for the CSV file."""
    table: list[dict[str, Any]]
    """Of the page: few rows with short cells."""
    notes: Sequence[str]
    draw: Callable[[Path], None]
    has_larger: bool = False
    """Whether the larger model is part of it."""

    def markdown(self, link: str) -> str:
        parts = [
            f"# {self.title}",
            wrapped(f"**Question.** {self.question}"),
            wrapped(f"**Answer.** {self.summary}"),
            f"![{self.title}]({link}/recipes/{self.name}.png)",
            markdown_table(self.table, list(self.table[0])).rstrip(),
            wrapped(
                f"**Repeat it.** {REPEAT}[{self.name}.csv]({link}/recipes/{self.name}.csv) has the settings of each "
                f"row, and the losses of every seed."
            ),
            "## What was found\n\n" + "\n".join(bullet(finding) for finding in self.findings),
            "## How\n\n" + wrapped(METHOD) + "\n\n" + "\n".join(bullet(note) for note in (*self.notes, MACHINES)),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def write(self, into: Path) -> None:
        """Figure and CSV file."""
        into.mkdir(parents=True, exist_ok=True)
        self.draw(into)
        with open(into / f"{self.name}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, list(self.rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)


def wrapped(text: str, indent: str = "") -> str:
    """In lines of a page. None begins with a dash, which would be an item of a list."""
    text = text.replace(" - ", "\0-\0")
    filled = textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return filled.replace("\0", " ")


def bullet(text: str) -> str:
    return wrapped(f"- {text}", "  ")


@dataclass
class Comparisons:
    """All differences that a page tells. Each widens the intervals of all, so all are added before one is read."""

    _pairs: dict[Hashable, tuple[Judged, Judged]] = field(default_factory=dict)
    _is_read: bool = False

    def add(self, name: Hashable, one: Judged, other: Judged) -> None:
        """``one`` less ``other``.

        Raises:
            ValueError: a difference was read already, so its interval would be too narrow.
        """
        if self._is_read:
            raise ValueError(f"{name} is compared after a difference was read: add all of them first")
        self._pairs[name] = one, other

    def __len__(self) -> int:
        """The same two trials are one comparison, whatever they are called."""
        pairs: set[frozenset[Trial]] = {frozenset((one.trial, other.trial)) for one, other in self._pairs.values()}
        return sum(len(pair) == 2 for pair in pairs)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._pairs

    def is_worse_with_every_seed(self, name: Hashable) -> bool:
        """Which is no verdict: of five seeds one in 32 does so by chance."""
        one, other = self._pairs[name]
        return all(a > b for a, b in zip(one.losses, other.losses, strict=True))

    def __getitem__(self, name: Hashable) -> Difference:
        self._is_read = True
        one, other = self._pairs[name]
        return paired(one.losses, other.losses, least=LEAST_EFFECT, comparisons=max(len(self), 1))


def told(difference: Difference) -> str:
    return f"{difference}{' *' if difference.counts else ''}"


def effect(difference: Difference) -> str:
    """The end of a sentence whose subject is a change."""
    if not difference.counts:
        return f"makes no difference that counts ({difference} nats)"
    return f"{'lowers' if difference.lower else 'raises'} the loss by {distance(difference)} nats"


def distance(difference: Difference) -> str:
    return f"{abs(difference.mean):.3f} +- {difference.half_width:.3f}"


def place(difference: Difference) -> str:
    """The middle of a sentence: where the first is beside the second."""
    return "ahead of" if difference.lower else "behind" if difference.higher else "level with"


def listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def mean(judged: Judged) -> float:
    return statistics.fmean(judged.losses) if all(map(math.isfinite, judged.losses)) else math.inf


def settings_of(trial: Trial) -> dict[str, Any]:
    """Columns with which a row can be run again."""
    return {
        "lr": trial.lr,
        "vector_lr": trial.vectors,
        "embeddings": trial.embeddings,
        "numbers": " ".join(f"{name}={value:g}" for name, value in trial.own),
    }


def losses_of(judged: Judged) -> dict[str, Any]:
    return {
        "test loss": round(mean(judged), 4),
        "test loss by seed": " ".join(f"{loss:.4f}" for loss in judged.losses),
    }


def axis_of_gaps(axis: Any, gaps: Sequence[Difference], names: Sequence[str], xlabel: str) -> None:
    """Differences with their intervals, the first on top."""
    at = range(len(gaps))[::-1]
    axis.errorbar([d.mean for d in gaps], at, xerr=[d.half_width for d in gaps], fmt="o", capsize=3)
    axis.axvline(0, color="gray", lw=1)
    axis.set_yticks(at, names, fontsize=8)
    axis.set_xlabel(xlabel)
