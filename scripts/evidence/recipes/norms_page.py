"""The page on what wrong norms cost."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from ..figures import new_figure, plain_ticks, save
from ..paired import Difference
from .ledger import Ledger, OutOfTime
from .parts import Comparisons, Part, axis_of_gaps, listed, losses_of, mean, settings_of, told
from .queue import EMBEDDINGS, JUDGED_PIECES, PIECES, SMALL, Judged, judged_norms, norms_at_exact_rate, wrong_norms
from .trials import Trial
from .wrong_norms import KINDS

NAME = "norms"
TITLE = "What do wrong norms cost?"
EXACT = ("exact", 1)
#: At which rate a wrong norm is judged.
OWN, SAME = "its own", "that of exact norms"
COLUMNS = {OWN: "cost", SAME: "cost at the exact rate"}
MORE = "more ranks"
RULES = {"ratio": "Where embeddings have the ratio", "adam": "Where embeddings have none"}
#: By rule, and then by kind and number of ranks.
Found = dict[str, dict[tuple[str, int], Judged]]
Rates = dict[str, dict[tuple[str, int], tuple[Trial, float]]]


def make(ledger: Ledger) -> Part:
    """The page.

    Raises:
        OutOfTime: its runs are not finished.
    """
    setting = SMALL["43k"]
    judged: Found = {rule: judged_norms(setting, ledger, rule) for rule in EMBEDDINGS}
    rates: Rates = _finished(lambda rule: wrong_norms(setting, ledger, rule))
    few, many = JUDGED_PIECES
    found = Comparisons()
    same: Found = _finished(lambda rule: norms_at_exact_rate(setting, ledger, rule))
    for rate, by_rule in ((OWN, judged), (SAME, same)):
        for rule, here in by_rule.items():
            for (kind, pieces), one in here.items():
                if kind != "exact":
                    found.add((rate, rule, kind, pieces), one, here[EXACT])
            for kind in KINDS:
                found.add((rate, rule, kind, MORE), here[kind, many], here[kind, few])
    rows = [_row(rule, key, one, found, ledger) for rule, here in judged.items() for key, one in here.items()]
    rows += _tuned_only(judged, rates, ledger)
    shown = ("norm of", "ranks", "embeddings", "lr", "cost", "cost at the exact rate")

    def draw(into: Path) -> None:
        keys = [(rule, *key) for rule, here in judged.items() for key in here if key != EXACT]
        figure, axes = new_figure(1, 2 if rates else 1, 5.6, 0.9 + 0.3 * len(keys))
        names = [f"{kind}, {pieces} ranks ({rule})" for rule, kind, pieces in keys]
        gaps = [found[(OWN, *key)] for key in keys]
        axis_of_gaps(axes[0][0], gaps, names, "loss above that with exact norms, each at its best rate, nats")
        axes[0][0].set_title(str(setting))
        if rates:
            _draw_rates(axes[0][1], rates)
        save(figure, into, f"{NAME}.png")

    notes = [f'Exact norms with "{r}": lr {h[EXACT].trial.lr:g}, loss {mean(h[EXACT]):.4f}.' for r, h in judged.items()]
    notes += [
        "A rank's norm is made by layouts that say what is one parameter; nothing else of the optimizer changes.",
        f"{few} and {many} ranks are judged on the test text. Other numbers have a best rate and a validation loss.",
        f"{len(found)} comparisons.",
    ]
    notes += [f'Not finished: 2 to 64 ranks, "{rule}".' for rule in EMBEDDINGS if rule not in rates]
    notes += [f'Not finished: the rate of exact norms, "{rule}".' for rule in EMBEDDINGS if rule not in same]
    return Part(
        NAME,
        TITLE,
        "Wrong norms",
        "An optimizer that knows nothing of sharding takes the norm of what a rank holds. How much worse does it "
        "train, with its own best rate, and does that depend on the number of ranks?",
        _summary(judged, rates, found),
        [sentence for rule in judged for sentence in _sentences(rule, rates.get(rule, {}), found)],
        rows,
        [{name: row[name] for name in shown} for row in rows if row["cost"]],
        notes,
        draw,
    )


def _finished(part: Callable[[str], Any]) -> dict[str, Any]:
    """What a part of the study has found by the rule for embeddings, of those whose runs are finished."""
    found = {}
    for rule in EMBEDDINGS:
        try:
            found[rule] = part(rule)
        except OutOfTime:
            continue
    return found


def _row(rule: str, key: tuple[str, int], one: Judged, found: Comparisons, ledger: Ledger) -> dict[str, Any]:
    kind, pieces = key
    return {
        "norm of": KINDS.get(kind, "whole parameters"),
        "ranks": pieces,
        **settings_of(one.trial),
        "validation loss": round(ledger.loss(one.trial), 4),
        **losses_of(one),
        **{column: _cell(found, (rate, rule, kind, pieces)) for rate, column in COLUMNS.items()},
    }


def _cell(found: Comparisons, name: Hashable) -> str:
    return told(found[name]) if name in found else ""


def _tuned_only(judged: Found, rates: Rates, ledger: Ledger) -> list[dict[str, Any]]:
    """Rows of numbers of ranks that have a best rate and no test loss."""
    return [
        {
            "norm of": KINDS[kind],
            "ranks": pieces,
            **settings_of(trial),
            "validation loss": round(ledger.loss(trial), 4),
            "test loss": None,
            "test loss by seed": "",
            **dict.fromkeys(COLUMNS.values(), ""),
        }
        for rule, here in rates.items()
        for (kind, pieces), (trial, _) in here.items()
        if (kind, pieces) not in judged[rule]
    ]


def _gaps(rate: str, rule: str, found: Comparisons) -> dict[tuple[str, int], Difference]:
    """Less exact norms, by kind and number of ranks."""
    keys = [(kind, pieces) for kind in KINDS for pieces in JUDGED_PIECES]
    return {key: found[(rate, rule, *key)] for key in keys if (rate, rule, *key) in found}


def _costs(rate: str, rule: str, found: Comparisons) -> str:
    gaps = _gaps(rate, rule, found)
    low, high = min(gap.mean for gap in gaps.values()), max(gap.mean for gap in gaps.values())
    worse = [f"{gap} ({kind}, {pieces} ranks)" for (kind, pieces), gap in gaps.items() if gap.counts]
    always = sum(found.is_worse_with_every_seed((rate, rule, *key)) for key in gaps)
    how_many = f"{always} of {len(gaps)} worse with every seed, {len(worse) or 'none'} of which counts"
    return f"{low:+.3f} to {high:+.3f} nats; {how_many}{f': {listed(worse)}' if worse else ''}"


def _moved(rates: dict[tuple[str, int], tuple[Trial, float]]) -> str:
    """With which kinds and numbers of ranks the best rate is another one."""
    exact = rates[EXACT][0].lr
    others = {kind: [pieces for pieces in PIECES if rates[kind, pieces][0].lr != exact] for kind in KINDS}
    moved = [f"{kind} ({_range(pieces)} ranks)" for kind, pieces in others.items() if pieces]
    if not moved:
        return f"the best lr is {exact:.3g} everywhere, as with exact norms"
    lrs = sorted({rates[kind, pieces][0].lr for kind, some in others.items() for pieces in some})
    return f"the best lr is {' or '.join(f'{lr:.3g}' for lr in lrs)} instead of {exact:.3g} with {listed(moved)}"


def _range(pieces: list[int]) -> str:
    first, last = PIECES.index(pieces[0]), PIECES.index(pieces[-1])
    is_all = len(pieces) > 1 and tuple(pieces) == PIECES[first : last + 1]
    return f"{pieces[0]} to {pieces[-1]}" if is_all else listed([str(count) for count in pieces])


def _sentences(rule: str, rates: dict[tuple[str, int], tuple[Trial, float]], found: Comparisons) -> list[str]:
    few, many = JUDGED_PIECES
    told_of = []
    for rate, where in ((OWN, "at its own best rate"), (SAME, "at the rate that is best with exact norms")):
        gaps = _gaps(rate, rule, found)
        if gaps and (rate == OWN or gaps != _gaps(OWN, rule, found)):
            more = {kind: found[rate, rule, kind, MORE] for kind in KINDS}
            shown = listed([f"{told(gap)} ({kind})" for kind, gap in more.items()])
            told_of.append(f"{RULES[rule]}, {where}: wrong norms cost {_costs(rate, rule, found)}.")
            told_of.append(f"{RULES[rule]}, {where}: {many} ranks instead of {few} change the loss by {shown} nats.")
    if rates:
        told_of.append(f"{RULES[rule]}, {PIECES[0]} to {PIECES[-1]} ranks: {_moved(rates)}.")
    return told_of


def _summary(judged: Found, rates: Rates, found: Comparisons) -> str:
    told_of = []
    for rule in judged:
        told_of.append(f"{RULES[rule]}, wrong norms change LAMB's loss by {_costs(OWN, rule, found)}.")
        same = _gaps(SAME, rule, found)
        if same and same != _gaps(OWN, rule, found):
            told_of.append(f"At the rate that is best with exact norms, by {_costs(SAME, rule, found)}.")
        if rule in rates:
            told_of.append(f"Over {PIECES[0]} to {PIECES[-1]} ranks, {_moved(rates[rule])}.")
    few, many = JUDGED_PIECES
    keys = [(rate, rule, kind, MORE) for rate in COLUMNS for rule in judged for kind in KINDS]
    counting = list(dict.fromkeys(f"{found[key]} ({key[2]})" for key in keys if key in found and found[key].counts))
    told_of.append(
        f"From {few} to {many} ranks, "
        f"{f'these changes of the loss count: {listed(counting)}' if counting else 'no change of the loss counts'}."
    )
    return " ".join(told_of)


def _draw_rates(axis: Any, rates: Rates) -> None:
    for rule, color in (("ratio", "tab:orange"), ("adam", "tab:blue")):
        for kind, style in zip(KINDS, ("o-", "s--", "^:"), strict=True):
            if rule in rates:
                lrs = [rates[rule][kind, pieces][0].lr for pieces in PIECES]
                axis.plot(PIECES, lrs, style, color=color, alpha=0.7, label=f"{kind} ({rule})")
    axis.set(xscale="log", yscale="log", xlabel="ranks", ylabel="best lr, tuning seed", title="best rate")
    plain_ticks(axis.xaxis, axis.yaxis)
    axis.legend(fontsize=7)
