"""What the finished runs show: a page a question, each with one figure and one short table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from . import norms_page, optimizers_page, presets_page, vectors_page
from .ledger import Ledger, OutOfTime
from .parts import Part

PAGES = (vectors_page, presets_page, optimizers_page, norms_page)

UNFINISHED = """\
# {title}

The runs for this page are not finished. `python -m scripts.evidence.recipes run` goes on with them,
`python -m scripts.evidence.recipes status` tells how far they are. `python -m scripts.evidence page` makes this page.
"""


def unfinished(parts: Sequence[Part]) -> dict[str, str]:
    """A page for each question that has no answer yet, by name."""
    there = {part.name for part in parts}
    return {page.NAME: UNFINISHED.format(title=page.TITLE) for page in PAGES if page.NAME not in there}


def finished(ledger: Ledger) -> list[Part]:
    """The pages for which there are runs enough."""
    found = []
    for page in PAGES:
        try:
            found.append(page.make(ledger))
        except OutOfTime:
            continue
    return found


def write(parts: Sequence[Part], into: Path) -> None:
    """Figures and CSV files."""
    for part in parts:
        part.write(into)
