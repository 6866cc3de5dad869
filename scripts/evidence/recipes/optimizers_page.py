"""The page on optimizers that are all tuned, within the same number of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..figures import new_figure, save
from .candidates import CANDIDATES, FAMILY, PEERS
from .ledger import Ledger, OutOfTime
from .parts import Comparisons, Part, axis_of_gaps, listed, losses_of, place, settings_of, told
from .queue import LARGE, LONG, SMALL, Judged, each_cell, tuned
from .trials import Setting, Trial
from .tuning import BUDGET

NAME = "optimizers"
TITLE = "How far apart are tuned optimizers?"
REFERENCE = "lamb-0.8"
PAPER, USUAL = "paper", "lamb-0.9"


def make(ledger: Ledger) -> Part:
    """The page, as soon as one setting has the reference and one more.

    Raises:
        OutOfTime: none has.
    """
    there: dict[Setting, dict[str, Judged]] = {}
    for setting in (*SMALL.values(), *LARGE.values(), *LONG.values()):
        here = _judged(setting, ledger)
        if REFERENCE in here and len(here) > 1:
            there[setting] = here
    if not there:
        raise OutOfTime(NAME)
    found = Comparisons()
    for setting, here in there.items():
        for name, judged in here.items():
            if name != REFERENCE:
                found.add((setting, name), judged, here[REFERENCE])
        if {PAPER, USUAL} <= set(here):
            found.add((setting, "paper less usual"), here[PAPER], here[USUAL])
    rows = [row for setting, here in there.items() for row in _rows(setting, here, found, ledger)]
    table = []
    for name, candidate in CANDIDATES.items():
        cells = {str(setting): _cell(here, setting, name, found) for setting, here in there.items()}
        if any(cells.values()):
            table.append({"optimizer": candidate.label, **cells})

    def draw(into: Path) -> None:
        most = max(len(here) for here in there.values())
        figure, axes = new_figure(1, len(there), 5.6, 0.9 + 0.34 * most)
        for axis, (setting, here) in zip(axes[0], there.items(), strict=True):
            names = [name for name in here if name != REFERENCE]
            gaps = [found[setting, name] for name in names]
            labels = [CANDIDATES[name].label for name in names]
            axis_of_gaps(axis, gaps, labels, f"test loss less that of {CANDIDATES[REFERENCE].label}, nats")
            axis.set_title(str(setting))
        save(figure, into, f"{NAME}.png")

    return Part(
        NAME,
        TITLE,
        "Other optimizers",
        "Each with lr and its own numbers tuned: is there a difference between LAMB, ALTO and other optimizers?",
        " ".join(_summary(setting, here, found) for setting, here in there.items()),
        [sentence for setting, here in there.items() for sentence in _sentences(setting, here, found)],
        rows,
        table,
        [*_notes(ledger, there), f"{len(found)} comparisons."],
        draw,
        any(setting.model == "1M" for setting in there),
    )


def _judged(setting: Setting, ledger: Ledger) -> dict[str, Judged]:
    """Those that are finished."""
    here = {}
    for name in CANDIDATES:
        try:
            here[name] = tuned(name, setting, ledger)
        except OutOfTime:
            continue
    return here


def _cell(here: dict[str, Judged], setting: Setting, name: str, found: Comparisons) -> str:
    if name not in here:
        return ""
    loss = losses_of(here[name])["test loss"]
    return f"{loss:.3f}" + ("" if name == REFERENCE else f": {told(found[setting, name])}")


def _rows(setting: Setting, here: dict[str, Judged], found: Comparisons, ledger: Ledger) -> list[dict[str, Any]]:
    return [
        {
            "optimizer": CANDIDATES[name].label,
            "setting": str(setting),
            **settings_of(judged.trial),
            **({} if name in FAMILY else {"embeddings": ""}),
            "tuning runs": judged.tuning_runs,
            "validation loss": round(ledger.loss(judged.trial), 4),
            **losses_of(judged),
            "less LAMB 0.8": "" if name == REFERENCE else told(found[setting, name]),
        }
        for name, judged in here.items()
    ]


def _by_place(setting: Setting, here: dict[str, Judged], found: Comparisons) -> dict[str, list[str]]:
    """Labels and differences of what is ahead of the reference, behind it and level with it."""
    places: dict[str, list[str]] = {"ahead of": [], "behind": [], "level with": []}
    for name in here:
        if name != REFERENCE:
            gap = found[setting, name]
            places[place(gap)].append(CANDIDATES[name].label + (f" ({gap})" if gap.counts else ""))
    return places


def _sentences(setting: Setting, here: dict[str, Judged], found: Comparisons) -> list[str]:
    told_of = []
    if (setting, "paper less usual") in found:
        gap = found[setting, "paper less usual"]
        told_of.append(f"{setting}: the paper's setting is {place(gap)} LAMB of the same beta2, 0.9 ({gap} nats).")
    for where, names in _by_place(setting, here, found).items():
        if names:
            are = "is" if len(names) == 1 else "are"
            told_of.append(f"{setting}: {listed(names)} {are} {where} LAMB with beta2 0.8.")
    return told_of


def _summary(setting: Setting, here: dict[str, Judged], found: Comparisons) -> str:
    said = []
    for where, is_there in (("ahead of", "lower"), ("behind", "higher")):
        gaps = {CANDIDATES[name].label: found[setting, name] for name in here if name != REFERENCE}
        names = [f"{name} ({gap.mean:+.3f})" for name, gap in gaps.items() if getattr(gap, is_there)]
        if names:
            said.append(f"{listed(names)} {'is' if len(names) == 1 else 'are'} {where} LAMB with beta2 0.8")
    text = f"On the {setting.model} GPT ({setting.batch} x {setting.iterations}), "
    text += f"{'; '.join(said) or 'no difference to LAMB with beta2 0.8 counts'}."
    if (setting, "paper less usual") in found:
        gap = found[setting, "paper less usual"]
        text += f" The paper's setting is {place(gap)} LAMB of its beta2 ({gap})."
    return text


def _notes(ledger: Ledger, there: dict[Setting, dict[str, Judged]]) -> list[str]:
    notes = []
    for setting, here in there.items():
        runs = [f"{CANDIDATES[name].label} {judged.tuning_runs}" for name, judged in here.items()]
        notes.append(f"Tuning runs, {setting}: {', '.join(runs)}.")
        missing = [CANDIDATES[name].label for name in CANDIDATES if name not in here]
        if missing:
            notes.append(f"Not finished, {setting}: {', '.join(missing)}.")
    first = next(iter(there))
    tried: set[Trial] = set()

    def loss(trial: Trial) -> float:
        tried.add(trial)
        return ledger.loss(trial)

    list(each_cell(SMALL[first.model], loss))
    notes[:0] = [
        f"{BUDGET} tuning runs are a cap. A search that finds nothing better ends earlier; one that reaches the cap "
        "may stop before its best; a rate at an end of its grid may exceed it.",
        "The search is uneven. The family starts from the rates of vectors and embeddings that a shared search of "
        f"{len(tried)} tuning runs, of LAMB with beta2 0.8, found on {SMALL[first.model]}. Others start from their "
        "usual values.",
    ]
    late = [CANDIDATES[name].label for name in PEERS if "embedding_lr" in CANDIDATES[name].knobs]
    notes.append(
        f"`embedding_lr` of {listed(late)} was added after test losses of other optimizers were known. Their runs from "
        "before it have it at 1, and count."
    )
    return notes
