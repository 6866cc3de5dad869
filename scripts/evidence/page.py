"""docs/results.md, composed of the results that are there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import STUDIES
from .study import UNTESTABLE, VERDICTS, markdown_table

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
PAGE = ROOT / "docs" / "results.md"

HEAD = """\
# What held here

Does ALTO do with this code what its paper says? This page is made by `python -m scripts.evidence page` from
[scripts/evidence/results](../scripts/evidence/results); nothing in it is written by hand, and every verdict is computed
from the numbers beside it. Whoever doubts one can run it: `python -m scripts.evidence STUDY`, in a quick form with
`--quick`.

Everything ran on CPU cores with data that ships with Python packages. Models are small, runs are short, and **nothing
ran on a GPU**. A claim that did not hold at this scale may hold at the paper's, and the other way round.
"""

NOT_LOOKED_AT = """\
Of the paper's experiments, these have no study here: fine-tuning BERT, VGG-16 and DenseNet, LSTMs, reinforcement
learning, and time to a given accuracy on GPUs. The convergence theorems were not checked.
"""

GUIDANCE_HEAD = """\
## Choosing alpha, beta1 and lr

ALTO feeds its moments with d = (1 - rho) g + rho u, where u is the slow average of the gradient (decay beta1) and
rho = -alpha (1 - beta1). So rho says how much of the gradient is replaced by its average, and beta1 over how many steps
that average goes, about 1/(1 - beta1). The paper's large-batch setting (alpha -5, beta1 0.99) is rho = 0.05 over 100
steps; its small-batch setting (alpha 0.5, beta1 0.01) is rho = -0.495: a step that leans away from the previous
gradient. Under the layer-wise ratio `lr` is relative: the share of its own norm by which a weight matrix changes in a
step.

What the studies above add to that:
"""


def read_results(directory: Path = RESULTS) -> list[dict[str, Any]]:
    """The results that are there, in the order of STUDIES."""
    paths = [directory / study / "result.json" for study in STUDIES]
    return [json.loads(path.read_text()) for path in paths if path.is_file()]


def compose(results: list[dict[str, Any]], link: str = "../scripts/evidence/results") -> str:
    """The page's text.

    Args:
        results: as :func:`read_results` gives them.
        link: where their directories are, seen from the page.

    Raises:
        ValueError: there are no results.
    """
    if not results:
        raise ValueError("there are no results: run `python -m scripts.evidence all` first")
    parts = [HEAD, _tally(results), _claims(results, link), NOT_LOOKED_AT]
    parts += [_section(result, link) for result in results]
    guidance = [sentence for result in results for sentence in result["guidance"]]
    if guidance:
        parts.append(GUIDANCE_HEAD + "\n" + "\n".join(f"- {sentence}" for sentence in guidance) + "\n")
    return "\n".join(parts)


def make_page(directory: Path = RESULTS, page: Path = PAGE) -> Path:
    page.write_text(compose(read_results(directory)))
    return page


def _tally(results: list[dict[str, Any]]) -> str:
    verdicts = [claim["verdict"] for result in results for claim in result["claims"]]
    counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in VERDICTS)
    return f"Of the {len(verdicts)} claims below: {counts}.\n"


def _claims(results: list[dict[str, Any]], link: str) -> str:
    rows = []
    for result in results:
        place = f"{link}/{result['study']}"
        pictures = ", ".join(f"[figure]({place}/{name})" for name in result["figures"])
        for claim in result["claims"]:
            rows.append(
                {
                    "claim": f"{claim['paper']} ({claim['where']})",
                    "what ran here": f"[{result['study']}](#{_anchor(result)}): {claim['finding']}",
                    "figure": "" if claim["verdict"] == UNTESTABLE else pictures,
                    "verdict": f"**{claim['verdict']}**",
                }
            )
    return "## The claims\n\n" + markdown_table(rows, list(rows[0]) if rows else [])


def _section(result: dict[str, Any], link: str) -> str:
    place, made = f"{link}/{result['study']}", result["made"]
    form = "" if result["form"] == "full" else " **This is the quick form.**"
    seeds = ", ".join(map(str, result["seeds"])) or "none"
    columns = result["columns"] or list(result["rows"][0] if result["rows"] else {})
    facts = (
        f"Command: `python -m scripts.evidence {result['study']}`; seeds: {seeds}; {result['seconds']:.0f} seconds on "
        f"one {made['cpu']} with {made['threads']} thread(s), torch {made['torch']}, {made['date']}. Settings and all "
        f"figures: [result.json]({place}/result.json), [table.csv]({place}/table.csv).{form}"
    )
    parts = [f"## {result['title']}", result["intro"], facts]
    parts += [f"![{result['title']}]({place}/{name})" for name in result["figures"]]
    parts.append(markdown_table(result["rows"], columns).rstrip())
    if result["notes"]:
        parts.append("\n".join(f"- {note}" for note in result["notes"]))
    return "\n\n".join(part for part in parts if part) + "\n"


def _anchor(result: dict[str, Any]) -> str:
    """As GitHub makes them: lower case, no punctuation, spaces to hyphens."""
    kept = "".join(c for c in result["title"].lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")
