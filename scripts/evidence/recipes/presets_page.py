"""The page on presets as they are defined: nothing but lr is tuned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alto_distributed import recipe

from ..figures import new_figure, save
from .candidates import CANDIDATES
from .ledger import Ledger, OutOfTime
from .parts import Comparisons, Part, axis_of_gaps, effect, listed, losses_of, place, settings_of, told
from .queue import AS_DEFINED, EMBEDDINGS, PLAIN, SMALL, Judged, plain, preset

NAME = "presets"
TITLE = "Which preset?"

#: A preset and the batch that it is for, or one of PLAIN and 0; and the rule for embeddings.
Key = tuple[str, int, str]
RECOMMENDED: Key = ("recommended", 4096, "ratio")
DEFAULTS, LESS_MOMENTUM = ((name, 0, "ratio") for name in PLAIN)
PAPER: Key = ("paper", 4096, "ratio")


def label(key: Key) -> str:
    name, batch, _ = key
    if not batch:
        return CANDIDATES[name].label + ", one rate"
    return f'"{name}"' + (f", batch {batch}" if name == "paper" else "")


def make(ledger: Ledger) -> Part:
    """The page, as soon as "recommended" and one more are there.

    Raises:
        OutOfTime: they are not.
    """
    setting = SMALL["43k"]
    judged: dict[Key, Judged] = {}
    missing: list[str] = []
    for name, batch, rule in [
        *((n, 0, "ratio") for n in PLAIN),
        *((n, b, e) for n, b in AS_DEFINED for e in EMBEDDINGS),
    ]:
        try:
            judged[name, batch, rule] = (
                preset(name, batch, rule, setting, ledger) if batch else plain(name, setting, ledger)
            )
        except OutOfTime:
            missing.append(f"{label((name, batch, rule))}, {rule}")
    if RECOMMENDED not in judged or len(judged) < 2:
        raise OutOfTime(NAME)
    found = _compared(judged)
    rows = [_row(key, one, found, ledger) for key, one in judged.items()]
    shown = ("preset", "embeddings", "lr", "test loss", "less recommended", "less with the ratio")

    def draw(into: Path) -> None:
        pairs = {key: (key, ("recommended", 4096, key[2])) for key in judged}
        keys = [key for key in judged if pairs[key] in found]
        figure, axes = new_figure(1, 1, 7.0, 0.9 + 0.3 * len(keys))
        gaps = [found[pairs[key]] for key in keys]
        names = [f"{label(key)} ({key[2]})" for key in keys]
        axis_of_gaps(axes[0][0], gaps, names, 'test loss less that of "recommended", the same embeddings, nats')
        axes[0][0].set_title(str(setting))
        save(figure, into, f"{NAME}.png")

    notes = [
        'Presets are those of `recipe()`, each at its best lr. "One rate" is `vector_lr=1`.',
        f"`recipe({setting.batch})` is the paper's for small batches; `recipe(4096)` is the one that it is known for.",
        '"Less recommended" compares with "recommended" under the same rule for embeddings.',
        f"{len(found)} comparisons.",
    ]
    if missing:
        notes.append(f"Not finished: {'; '.join(missing)}.")
    return Part(
        NAME,
        TITLE,
        "Presets",
        "What do the presets of `recipe()` give, as they are defined, and what do their parts contribute?",
        _summary(found),
        _sentences(found, judged),
        rows,
        [{name: row[name] for name in shown} for row in rows],
        notes,
        draw,
    )


def _compared(judged: dict[Key, Judged]) -> Comparisons:
    """All differences of the page, named by their two keys."""
    found = Comparisons()
    for key, one in judged.items():
        name, batch, rule = key
        others = {("recommended", 4096, rule), (name, batch, "ratio")}
        others |= {DEFAULTS} if key in (LESS_MOMENTUM, PAPER, RECOMMENDED) else set()
        others |= {LESS_MOMENTUM} if key == RECOMMENDED else set()
        for other in others - {key}:
            if other in judged:
                found.add((key, other), one, judged[other])
    return found


def _row(key: Key, judged: Judged, found: Comparisons, ledger: Ledger) -> dict[str, Any]:
    name, batch, rule = key
    columns = {
        "less recommended": (key, ("recommended", 4096, rule)),
        "less with the ratio": (key, (name, batch, "ratio")),
        "less LAMB beta2 0.9": (key, DEFAULTS),
    }
    numbers = settings_of(judged.trial)
    if batch:
        chosen = recipe(batch, preset=name)
        numbers["numbers"] = f"alpha={chosen['alpha']:g} betas={' '.join(f'{beta:g}' for beta in chosen['betas'])}"
    return {
        "preset": label(key),
        **numbers,
        "validation loss": round(ledger.loss(judged.trial), 4),
        **losses_of(judged),
        **{column: told(found[pair]) if pair in found else "" for column, pair in columns.items()},
    }


def _sentences(found: Comparisons, judged: dict[Key, Judged]) -> list[str]:
    told_of = []
    if (LESS_MOMENTUM, DEFAULTS) in found:
        told_of.append(f"LAMB, one rate for all: beta2 0.8 instead of 0.9 {effect(found[LESS_MOMENTUM, DEFAULTS])}.")
    if (RECOMMENDED, LESS_MOMENTUM) in found:
        told_of.append(f"LAMB, beta2 0.8: `vector_lr=0.3` instead of 1 {effect(found[RECOMMENDED, LESS_MOMENTUM])}.")
    if (PAPER, DEFAULTS) in found:
        told_of.append(
            f"The paper's setting for large batches is {place(found[PAPER, DEFAULTS])} LAMB with the same beta2, 0.9 "
            f"({found[PAPER, DEFAULTS]} nats)."
        )
    for rule, where in (("ratio", "with the ratio"), ("adam", "without the ratio")):
        base: Key = ("recommended", 4096, rule)
        gaps = {key: found[key, base] for key in judged if key[1] and key[2] == rule and (key, base) in found}
        if gaps:
            places = [f"{label(key)} is {place(gap)} it ({gap})" for key, gap in gaps.items()]
            told_of.append(f'Embeddings {where}, beside "recommended": {"; ".join(places)}.')
    for name, batch in AS_DEFINED:
        pair = ((name, batch, "adam"), (name, batch, "ratio"))
        if pair in found:
            told_of.append(f"{label(pair[0])}: taking the ratio from embeddings {effect(found[pair])}.")
    return told_of


def _summary(found: Comparisons) -> str:
    """About "recommended" under the rule that it has, what it is made of, and what is beside it."""
    sentences = []
    if (RECOMMENDED, DEFAULTS) in found:
        gain = f'On the 43k GPT, "recommended" instead of LAMB\'s usual values {effect(found[RECOMMENDED, DEFAULTS])}'
        steps = [(LESS_MOMENTUM, DEFAULTS), (RECOMMENDED, LESS_MOMENTUM)]
        if all(step in found and found[step].lower for step in steps):
            momentum, vectors = (f"{-found[step].mean:.3f}" for step in steps)
            gain += f": {momentum} by beta2 0.8 instead of 0.9, and {vectors} by slower vectors"
        sentences.append(f"{gain}.")
    others = [
        key for key in (("nesterov", 4096, "ratio"), ("zero-lag", 4096, "ratio"), PAPER) if (key, RECOMMENDED) in found
    ]
    if others:
        gaps = {key: found[key, RECOMMENDED] for key in others}
        sentences.append(listed([f"{label(key)} is {place(gap)} it ({gap})" for key, gap in gaps.items()]) + ".")
    return " ".join(sentences) + " Embeddings have the ratio in all of these."
