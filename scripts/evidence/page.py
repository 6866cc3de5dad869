"""docs/results.md and a page a study in docs/results, composed of the results that are there."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import STUDIES, first_look
from .paired import LEAST_EFFECT, LEAST_SEEDS
from .places import DOCS, RESULTS
from .recipes import report
from .recipes.ledger import Ledger
from .recipes.parts import Part, bullet, wrapped
from .recipes.report import unfinished
from .review import ANSWERS, CAVEATS, SPREADS, reviewed
from .study import VERDICTS, markdown_table

HEAD = """\
# Results

After this page you know what was measured with this code, what we conclude from it, and what nobody has tried.

Everything ran on CPU cores with text and images that ship with Python packages; **nothing ran on a GPU**. Runs are
short and models small: a GPT of 43 thousand parameters{larger}.
None of it shows what happens at 345 million.

## Conclusions
"""

#: What does not come from the newest study. Each sentence names the page that shows it.
CONCLUSIONS = (
    "**The paper's claims** about large batches and flat minima are not shown here, and not refuted. Most of our "
    "earlier studies have three seeds, too few to tell ([gpt](results/gpt.md), [images](results/images.md), "
    "[flatness](results/flatness.md)).",
    "**What alpha does** can be said exactly: it moves the lag of the momentum ([What alpha does](alpha.md)).",
    "**Memory.** ALTO keeps one tensor more than LAMB, 4 bytes a parameter; the authors' code keeps four more "
    "([memory](results/memory.md)).",
)

RULE = f"""\
## When a difference counts

With {LEAST_SEEDS} seeds or more, paired by seed, if its 95% interval excludes 0 and it is over {LEAST_EFFECT} nats.
The interval is widened for the number of comparisons on a page (Bonferroni). The newest study chooses no rate on the
seeds or the text that it reports.
With three seeds, "all agree and more than two standard errors" is wrong by chance in 18% of comparisons; several of our
earlier verdicts were made so. They are withdrawn on their pages, with the reason.
"""

NOT_LOOKED_AT = """\
## Not looked at

Fine-tuning BERT, VGG-16 and DenseNet, LSTMs, reinforcement learning, time to a given accuracy on GPUs, and the
convergence theorems. [scripts/track3](../scripts/track3/README.md) is ready for somebody with GPUs.
"""

#: The columns and rows of each study's short table.
SHORT: Mapping[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any]], bool]]] = {
    "valleys": (
        ("function", "optimizer", "alpha", "explored", "flattest", "last"),
        lambda row: row["function"] in ("squared cardioid", "Rosenbrock") and row["alpha"] in (0, -80),
    ),
    "large_batch": (("optimizer", "batch", "alpha", "best error", "solved", "updates to solve (median)"), bool),
    "images": (("optimizer", "batch", "lr", "test accuracy (%)", "test loss"), bool),
    "gpt": (
        ("optimizer", "alpha", "beta2", "lr", "validation loss", "perplexity"),
        lambda row: row["setting"] == "once",
    ),
    "ablation": (("variant", "alpha", "difference", "test loss", "loss spread"), bool),
    "flatness": (("setting", "alpha", "top eigenvalue at the end", "the same at equal loss", "drift"), bool),
    "memory": (
        ("batch", "LAMB, MiB", "ALTO, + %", "ALTO (official), + %"),
        lambda row: (row["layers"], row["hidden"]) == (4, 128),
    ),
}


def read_results(directory: Path = RESULTS) -> list[dict[str, Any]]:
    """The results that are there, in the order of STUDIES."""
    paths = [directory / study / "result.json" for study in STUDIES]
    return [json.loads(path.read_text()) for path in paths if path.is_file()]


def compose(results: Sequence[dict[str, Any]], parts: Sequence[Part] = ()) -> dict[str, str]:
    """The pages' texts by their paths in docs/.

    Args:
        results: as :func:`read_results` gives them.
        parts: of the newest study, as :func:`.recipes.report.finished` gives them.

    Raises:
        ValueError: there are no results.
    """
    if not results:
        raise ValueError("there are no results: run `python -m scripts.evidence all` first")
    link = "../../scripts/evidence/results"
    is_judged = any(part.has_larger for part in parts)
    larger = ", and in part one of a million" if is_judged else " (one of a million is not finished)"
    head = HEAD.format(larger=larger)
    pages = {"results.md": "\n".join([head, _conclusions(parts), _studies(results, parts), RULE, NOT_LOOKED_AT])}
    pages.update({f"results/{part.name}.md": part.markdown(link) for part in parts})
    pages.update({f"results/{name}.md": text for name, text in unfinished(parts).items()})
    pages.update({f"results/{result['study']}.md": _study(result, link) for result in results})
    return pages


def make_pages(directory: Path = RESULTS, docs: Path = DOCS) -> list[Path]:
    """Write all pages, the figures and tables of the newest study, and the claims of the others."""
    parts = report.finished(Ledger(directory / "recipes.jsonl"))
    report.write(parts, directory / "recipes")
    first_look.draw(directory / "recipes")
    results = read_results(directory)
    for result in results:
        _write_claims(result, directory / result["study"] / "claims.csv")
    written = []
    for name, text in compose(results, parts).items():
        (docs / name).parent.mkdir(parents=True, exist_ok=True)
        (docs / name).write_text(text)
        written.append(docs / name)
    return written


def _conclusions(parts: Sequence[Part]) -> str:
    found = [f"**{part.topic}.** {part.summary} ([{part.name}](results/{part.name}.md))" for part in parts]
    return "\n".join(bullet(sentence) for sentence in (*found, *CONCLUSIONS)) + "\n"


def _studies(results: Sequence[dict[str, Any]], parts: Sequence[Part]) -> str:
    rows = [{"study": f"[{part.name}](results/{part.name}.md)", "question": part.title} for part in parts]
    rows.append({"study": "[first look](results/first-look.md)", "question": "628 runs with three seeds, before that"})
    for result in results:
        verdicts = [reviewed(result["study"], c["paper"], c["verdict"]).verdict for c in result["claims"]]
        counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in VERDICTS if kind in verdicts)
        page = f"[{result['study']}](results/{result['study']}.md)"
        rows.append({"study": page, "question": f"claims of the paper: {counts}"})
    return "## Studies\n\n" + markdown_table(rows, list(rows[0]))


def _study(result: dict[str, Any], link: str) -> str:
    study, made = result["study"], result["made"]
    place = f"{link}/{study}"
    question, answer = ANSWERS[study]
    columns, wanted = SHORT[study]
    rows = [row for row in result["rows"] if wanted(row)] or result["rows"]
    seconds = result["settings"].get("processor seconds of all runs", result["seconds"])
    form = "" if result["form"] == "full" else " **This is the quick form.**"
    seeds = ", ".join(map(str, result["seeds"])) or "none"
    parts = [f"# {result['title']}", wrapped(f"**Question.** {question}"), wrapped(f"**Answer.** {answer}")]
    parts += [f"![{result['title']}]({place}/{name})" for name in result["figures"][:1]]
    parts.append(markdown_table(rows, columns).rstrip())
    parts.append(
        wrapped(
            f"**Repeat it.** `python -m scripts.evidence {study}`; seeds: {seeds}; {seconds:.0f} seconds on "
            f"one {made['cpu']} with {made['threads']} thread(s), torch {made['torch']}, {made['date']}. All rows: "
            f"[table.csv]({place}/table.csv). Settings and notes: [result.json]({place}/result.json).{form}"
        )
    )
    parts.append("## How\n\n" + wrapped(" ".join(result["intro"].split())))
    parts.append("\n".join(bullet(caveat) for caveat in CAVEATS.get(study, ())))
    claims = "\n".join(_claim(study, claim) for claim in result["claims"])
    spread = f"{SPREADS[study]} " if study in SPREADS else ""
    whole = wrapped(f"{spread}Figures that are cut here are whole in [claims.csv]({place}/claims.csv).")
    parts.append(f"## Claims of the paper\n\n{whole}\n\n{claims}")
    return "\n\n".join(part for part in parts if part) + "\n"


def _claim(study: str, claim: Mapping[str, str]) -> str:
    review = reviewed(study, claim["paper"], claim["verdict"])
    why = f" {review.why}" if review.why else ""
    return "\n".join(
        [
            bullet(f"**{review.verdict.capitalize()}:** {claim['paper']} ({claim['where']}){why}"),
            "  " + wrapped(_cut(claim["finding"]), "  "),
        ]
    )


def _cut(finding: str, longest: int = 240) -> str:
    """The parts of a finding that a page has room for."""
    if len(finding) <= longest:
        return finding
    ends = [found.start() for found in re.finditer(r"[;.,] ", finding) if found.start() < longest]
    return f"{finding[: ends[-1]]} ..."


def _write_claims(result: dict[str, Any], path: Path) -> None:
    """What the page says of the paper's claims, with all figures."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["claim", "where", "verdict", "why", "figures"])
        for claim in result["claims"]:
            review = reviewed(result["study"], claim["paper"], claim["verdict"])
            writer.writerow([claim["paper"], claim["where"], review.verdict, review.why, claim["finding"]])
