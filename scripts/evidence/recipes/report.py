"""What the finished runs show: a page a question, each with one figure and one short table."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..figures import new_figure, plain_ticks, save
from ..paired import LEAST_EFFECT, Difference, paired
from ..study import markdown_table
from .candidates import CANDIDATES, FAMILY, PEERS
from .ledger import Ledger, OutOfTime
from .queue import EMBEDDINGS, LARGE, LONG, SMALL, VECTORS, Judged, judged_norms, tuned, vector_rates, wrong_norms
from .trials import JUDGED_SEEDS, Setting
from .wrong_norms import KINDS

#: A column of the CSV files alone.
_SEEDS = "test loss by seed"

REPEAT = (
    "Repeat it with `python -m scripts.evidence.recipes run`, which goes on where it stopped; runs that are in "
    "[recipes.jsonl](../../scripts/evidence/results/recipes.jsonl) are not run again. "
    "`python -m scripts.evidence page` makes this page."
)
METHOD = (
    f"A GPT-2 on Python sources, with warm-up and a cosine. Rates are tuned on one seed and the validation text, over "
    f"half-octaves, until the best is inside the grid. Losses are those of {len(JUDGED_SEEDS)} other seeds on the test "
    f"text, in nats. A difference is paired by seed and has a 95% interval, widened for the number of comparisons on "
    f"the page. It counts if that excludes 0 and it is more than {LEAST_EFFECT} nats."
)


@dataclass(frozen=True)
class Part:
    """One page."""

    name: str
    title: str
    question: str
    answer: str
    """One or two sentences, for the first page as well."""
    rows: list[dict[str, Any]]
    notes: Sequence[str]
    draw: Callable[[Path], None]

    def markdown(self, link: str) -> str:
        parts = [
            f"# {self.title}",
            f"**Question.** {self.question}",
            f"**Answer.** {self.answer}",
            f"![{self.title}]({link}/recipes/{self.name}.png)",
            markdown_table(self.rows, [name for name in self.rows[0] if name != _SEEDS]).rstrip(),
            "\n".join(f"- {note}" for note in self.notes),
            f"**Method.** {METHOD} [{self.name}.csv]({link}/recipes/{self.name}.csv) has the losses of every seed.",
            REPEAT,
        ]
        return "\n\n".join(part for part in parts if part) + "\n"


#: Name -> title of every page.
TITLES = {
    "vectors": "At which rate should vectors and embeddings move?",
    "presets": "Which preset, and how far are other optimizers?",
    "norms": "What do wrong norms cost?",
}

UNFINISHED = """\
# {title}

The runs for this page are not finished. `python -m scripts.evidence.recipes run` goes on with them,
`python -m scripts.evidence.recipes status` tells how far they are. `python -m scripts.evidence page` makes this page.
"""


def unfinished(parts: Sequence[Part]) -> dict[str, str]:
    """A page for each question that has no answer yet, by name."""
    there = {part.name for part in parts}
    return {name: UNFINISHED.format(title=title) for name, title in TITLES.items() if name not in there}


def finished(ledger: Ledger) -> list[Part]:
    """The pages for which there are runs enough."""
    found = []
    for make in (_vectors, _presets, _norms):
        try:
            found.append(make(ledger))
        except OutOfTime:
            continue
    return found


def write(parts: Sequence[Part], into: Path) -> None:
    """Figures and CSV files."""
    into.mkdir(parents=True, exist_ok=True)
    for part in parts:
        part.draw(into)
        with open(into / f"{part.name}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, list(part.rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(part.rows)


def _compare(one: Judged, other: Judged, comparisons: int) -> Difference:
    return paired(one.losses, other.losses, least=LEAST_EFFECT, comparisons=comparisons)


def _told(difference: Difference) -> str:
    return f"{difference}{' *' if difference.counts else ''}"


def _by_seed(judged: Judged) -> str:
    return " ".join(f"{loss:.4f}" for loss in judged.losses)


def _mean(judged: Judged) -> float:
    return statistics.fmean(judged.losses)


# -- the rate of vectors ---------------------------------------------------------------------------------


def _vectors(ledger: Ledger) -> Part:
    by_model = {model: found for model in SMALL if (found := _if_there(lambda m=model: vector_rates(SMALL[m], ledger)))}
    if not by_model:
        raise OutOfTime("vectors")
    rows, sentences = [], []
    for model, found in by_model.items():
        shipped, count = found[1.0, "ratio"], len(found) - 1
        best = min(found, key=lambda key: _mean(found[key]))
        for (vectors, embeddings), judged in found.items():
            difference = _compare(judged, shipped, count)
            rows.append(
                {
                    "model": model,
                    "vector_lr": vectors,
                    "embeddings": embeddings,
                    "best lr": judged.trial.lr,
                    "test loss": round(_mean(judged), 4),
                    "less one rate for all": "" if judged is shipped else _told(difference),
                    _SEEDS: _by_seed(judged),
                }
            )
        sentences.append(
            f"On the {model} GPT (batch {SMALL[model].batch}), `vector_lr={best[0]:g}` with embeddings by "
            f'"{best[1]}" changes LAMB\'s loss by {_compare(found[best], shipped, count)} nats'
        )
        for rule in EMBEDDINGS:
            if (0.3, rule) in found and (1.0, rule) in found:
                gap = _compare(found[0.3, rule], found[1.0, rule], count)
                sentences.append(f'With "{rule}", `vector_lr=0.3` less `1` is {gap} nats')

    def draw(into: Path) -> None:
        figure, axes = new_figure(1, len(by_model))
        for axis, (model, found) in zip(axes[0], by_model.items(), strict=True):
            for rule, color in (("ratio", "tab:orange"), ("adam", "tab:blue")):
                at = [v for v in VECTORS if (v, rule) in found]
                losses = [found[v, rule].losses for v in at]
                middle = [statistics.fmean(some) for some in losses]
                ends = [[m - min(x) for m, x in zip(middle, losses, strict=True)]]
                ends.append([max(x) - m for m, x in zip(middle, losses, strict=True)])
                axis.errorbar(at, middle, ends, color=color, marker="o", capsize=3, label=f"embeddings: {rule}")
            axis.set(xscale="log", xlabel="vector_lr", ylabel="test loss, nats", title=f"{SMALL[model]}")
            plain_ticks(axis.xaxis)
            axis.legend()
        save(figure, into, "vectors.png")

    return Part(
        "vectors",
        TITLES["vectors"],
        "Norms and biases have no layer-wise ratio, and take Adam steps of lr, which is the relative step of a matrix. "
        "How much smaller should theirs be, and should embeddings have the ratio?",
        ". ".join(sentences) + ".",
        rows,
        [
            "LAMB with beta2 0.8, the best lr for each row.",
            'Embeddings under "adam" move at lr times vector_lr.',
            "* counts.",
        ],
        draw,
    )


def _if_there(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except OutOfTime:
        return None


# -- presets and peers -----------------------------------------------------------------------------------


def _presets(ledger: Ledger) -> Part:
    settings = [*SMALL.values(), *LONG.values(), *LARGE.values()]
    found: dict[Setting, dict[str, Judged]] = {}
    for setting in settings:
        here = {name: _if_there(lambda n=name, s=setting: tuned(n, s, ledger)) for name in CANDIDATES}
        here = {name: judged for name, judged in here.items() if judged is not None}
        if set(FAMILY) <= set(here):
            found[setting] = here
    if not found:
        raise OutOfTime("presets")
    count = sum(len(here) - 1 for here in found.values())
    rows = []
    for name, candidate in CANDIDATES.items():
        for setting, here in found.items():
            if name in here:
                judged = here[name]
                difference = _compare(judged, here["lamb-0.8"], count)
                rows.append(
                    {
                        "optimizer": candidate.label,
                        "setting": str(setting),
                        "lr": judged.trial.lr,
                        "vector_lr": judged.trial.vectors,
                        "test loss": round(_mean(judged), 4),
                        "less LAMB 0.8": "" if name == "lamb-0.8" else _told(difference),
                        _SEEDS: _by_seed(judged),
                    }
                )
    first = next(iter(found.values()))
    gaps = {name: _compare(first[name], first["lamb-0.8"], count) for name in first if name != "lamb-0.8"}
    ahead = [f"{CANDIDATES[n].label} ({gaps[n]})" for n in gaps if gaps[n].lower]
    behind = [f"{CANDIDATES[n].label} ({gaps[n]})" for n in gaps if gaps[n].higher]
    level = [CANDIDATES[n].label for n in gaps if not gaps[n].counts]
    paper = _compare(first["paper"], first["lamb-0.9"], count)
    sentences = [
        f"The paper's setting is {'level with' if not paper.counts else 'ahead of' if paper.lower else 'behind'} LAMB "
        f"of the same momentum, beta2 0.9 ({paper} nats)"
    ]
    for names, how in ((ahead, "Ahead of"), (behind, "Behind"), (level, "Level with")):
        if names:
            sentences.append(f"{how} LAMB with beta2 0.8: {', '.join(names)}")

    def draw(into: Path) -> None:
        figure, axes = new_figure(1, 1, 7.0, 0.9 + 0.34 * len(gaps))
        axis, names = axes[0][0], list(gaps)[::-1]
        axis.errorbar(
            [gaps[n].mean for n in names],
            range(len(names)),
            xerr=[gaps[n].half_width for n in names],
            fmt="o",
            capsize=3,
        )
        axis.axvline(0, color="gray", lw=1)
        axis.set_yticks(range(len(names)), [CANDIDATES[n].label for n in names])
        axis.set(xlabel="test loss less that of LAMB beta2 0.8, nats", title=str(next(iter(found))))
        save(figure, into, "presets.png")

    missing = [CANDIDATES[n].label for n in PEERS if n not in first]
    notes = ["Vectors, embeddings and lr are tuned for each; the family starts from what LAMB's search found."]
    runs = [f"{CANDIDATES[n].label} {judged.tuning_runs}" for n, judged in first.items()]
    notes.append(f"Tuning runs, at {next(iter(found))}: {', '.join(runs)}.")
    if missing:
        notes.append(f"Not finished yet: {', '.join(missing)}.")
    notes.append("* counts.")
    return Part(
        "presets",
        TITLES["presets"],
        "Each with its own tuned rate: is there a difference between LAMB, the paper's ALTO, Nesterov's and zero-lag "
        "ALTO, and other optimizers?",
        ". ".join(sentences) + ".",
        rows,
        notes,
        draw,
    )


# -- wrong norms -----------------------------------------------------------------------------------------


def _norms(ledger: Ledger) -> Part:
    setting = SMALL["43k"]
    judged = {rule: judged_norms(setting, ledger, rule) for rule in EMBEDDINGS}
    count = sum(len(found) - 1 for found in judged.values())
    gaps: dict[tuple[str, str, int], Difference] = {}
    rows, sentences, notes = [], [], []
    for rule, found in judged.items():
        exact = found["exact", 1]
        for (kind, pieces), own in found.items():
            if kind != "exact":
                gaps[rule, kind, pieces] = _compare(own, exact, count)
                rows.append(
                    {
                        "norm of": KINDS[kind],
                        "ranks": pieces,
                        "embeddings": rule,
                        "best lr": own.trial.lr,
                        "test loss": round(_mean(own), 4),
                        "cost": _told(gaps[rule, kind, pieces]),
                        _SEEDS: _by_seed(own),
                    }
                )
        here = [gap for (r, *_), gap in gaps.items() if r == rule]
        low, high = min(gap.mean for gap in here), max(gap.mean for gap in here)
        sentences.append(
            f'With embeddings by "{rule}" they change the loss by {low:+.3f} to {high:+.3f} nats; '
            f"{sum(gap.higher for gap in here)} of {len(here)} such differences count"
        )
        notes.append(f'Exact norms with "{rule}": lr {exact.trial.lr:g}, loss {_mean(exact):.4f}.')
        everywhere = _if_there(lambda r=rule: wrong_norms(setting, ledger, r))
        if everywhere:
            moved = {octaves for (kind, _), (_, octaves) in everywhere.items() if kind != "exact"}
            ends = f"{2 ** min(moved):.3g} to {2 ** max(moved):.3g}"
            notes.append(f'Over 2 to 64 ranks the best lr with "{rule}" ranges from {ends}.')
    notes.append("* counts.")

    def draw(into: Path) -> None:
        figure, axes = new_figure(1, 1, 7.0, 0.9 + 0.34 * len(gaps))
        axis, keys = axes[0][0], list(gaps)[::-1]
        axis.barh(
            range(len(keys)),
            [gaps[k].mean for k in keys],
            xerr=[gaps[k].half_width for k in keys],
            capsize=3,
            color="tab:red",
            alpha=0.7,
        )
        axis.axvline(0, color="gray", lw=1)
        names = [f"{kind}, {pieces} ranks ({rule})" for rule, kind, pieces in keys]
        axis.set_yticks(range(len(keys)), names, fontsize=7)
        axis.set(xlabel="loss above that with exact norms, nats", title=str(setting))
        save(figure, into, "norms.png")

    return Part(
        "norms",
        TITLES["norms"],
        "An optimizer that knows nothing of sharding takes the norm of what a rank holds. How much worse does it "
        "train, with its own best rate?",
        ". ".join(sentences) + ".",
        rows,
        notes,
        draw,
    )
