"""docs/results.md and a page a study in docs/results, composed of the results that are there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import STUDIES
from .paired import LEAST_EFFECT, LEAST_SEEDS
from .places import DOCS, RESULTS
from .recipes import report
from .recipes.ledger import Ledger
from .recipes.report import Part, unfinished
from .review import SPREADS, reviewed
from .study import VERDICTS, markdown_table

HEAD = """\
# Results

After this page you know what was measured with this code, what we conclude from it, and what nobody has tried.

Everything ran on CPU cores with text and images that ship with Python packages. Models have 43 thousand to a million
parameters, runs are short, and **nothing ran on a GPU**. None of it shows what happens at 345 million parameters.

## Conclusions
"""

#: What does not come from the newest study. Each sentence names the page that shows it.
CONCLUSIONS = (
    "The paper's own claims about large batches and flat minima are not shown here, and not refuted: most of our "
    "earlier studies have three seeds, too few to tell ([gpt](results/gpt.md), [images](results/images.md), "
    "[flatness](results/flatness.md)).",
    "What alpha does can be said exactly: it moves the lag of the momentum ([What alpha does](alpha.md)).",
    "ALTO keeps one tensor more than LAMB, 4 bytes a parameter; the authors' code keeps four more "
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
    pages = {"results.md": "\n".join([HEAD, _conclusions(parts), _studies(results, parts), RULE, NOT_LOOKED_AT])}
    pages.update({f"results/{part.name}.md": part.markdown(link) for part in parts})
    pages.update({f"results/{name}.md": text for name, text in unfinished(parts).items()})
    pages.update({f"results/{result['study']}.md": _study(result, link) for result in results})
    return pages


def make_pages(directory: Path = RESULTS, docs: Path = DOCS) -> list[Path]:
    """Write all pages, and the figures and tables of the newest study."""
    parts = report.finished(Ledger(directory / "recipes.jsonl"))
    report.write(parts, directory / "recipes")
    written = []
    for name, text in compose(read_results(directory), parts).items():
        (docs / name).parent.mkdir(parents=True, exist_ok=True)
        (docs / name).write_text(text)
        written.append(docs / name)
    return written


def _conclusions(parts: Sequence[Part]) -> str:
    found = [f"{part.answer} ([{part.name}](results/{part.name}.md))" for part in parts]
    return "\n".join(f"- {sentence}" for sentence in (*found, *CONCLUSIONS)) + "\n"


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
    place, made = f"{link}/{result['study']}", result["made"]
    columns, wanted = SHORT[result["study"]]
    rows = [row for row in result["rows"] if wanted(row)] or result["rows"]
    form = "" if result["form"] == "full" else " **This is the quick form.**"
    seeds = ", ".join(map(str, result["seeds"])) or "none"
    parts = [f"# {result['title']}", result["intro"]]
    parts += [f"![{result['title']}]({place}/{name})" for name in result["figures"][:1]]
    parts.append(markdown_table(rows, columns).rstrip())
    claims = "\n".join(_claim(result["study"], claim) for claim in result["claims"])
    spread = f"{SPREADS[result['study']]}\n\n" if result["study"] in SPREADS else ""
    parts.append(f"## Claims of the paper\n\n{spread}{claims}")
    parts.append(
        f"## Repeat it\n\n`python -m scripts.evidence {result['study']}`; seeds: {seeds}; "
        f"{result['seconds']:.0f} seconds on one {made['cpu']} with {made['threads']} thread(s), "
        f"torch {made['torch']}, {made['date']}. All rows: [table.csv]({place}/table.csv). "
        f"Settings and notes: [result.json]({place}/result.json).{form}"
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def _claim(study: str, claim: Mapping[str, str]) -> str:
    review = reviewed(study, claim["paper"], claim["verdict"])
    why = f"{review.why} " if review.why else ""
    return f"- {claim['paper']} ({claim['where']}) **{review.verdict.capitalize()}.** {why}{claim['finding']}"
