"""The order of runs, and what each part of the study finds. With a ledger that runs nothing, the same code reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from .candidates import CANDIDATES, FAMILY, PEERS
from .ledger import Ledger
from .trials import JUDGED_SEEDS, Setting, Trial
from .tuning import best_rate, tune
from .wrong_norms import KINDS

SMALL = {"43k": Setting("43k", 32, 240), "1M": Setting("1M", 8, 240)}
LARGE = {"43k": Setting("43k", 128, 240), "1M": Setting("1M", 32, 240)}
LONG = {"43k": Setting("43k", 32, 720), "1M": Setting("1M", 8, 720)}

SEARCHED_ON = "lamb-0.8"
VECTORS = (1.0, 0.3, 0.1, 0.03)
EMBEDDINGS = ("ratio", "adam")
PIECES = (2, 4, 8, 16, 32, 64)
#: Of these numbers of pieces, more seeds are run.
JUDGED_PIECES = (8, 64)


@dataclass(frozen=True)
class Judged:
    """A tuned trial and its test losses, one a seed."""

    trial: Trial
    losses: tuple[float, ...]
    tuning_runs: int = 0


def judge(trial: Trial, ledger: Ledger, tuning_runs: int = 0) -> Judged:
    losses = tuple(ledger.loss(replace(trial, seed=seed), "test") for seed in JUDGED_SEEDS)
    return Judged(trial, losses, tuning_runs)


def cells(setting: Setting, ledger: Ledger) -> dict[tuple[float, str], tuple[Trial, float]]:
    """The best rate for each rate of the vectors and rule for embeddings, with log2 of it, on the tuning seed."""
    found = {}
    for embeddings in EMBEDDINGS:
        octaves = CANDIDATES[SEARCHED_ON].octaves
        for vectors in VECTORS:
            start = CANDIDATES[SEARCHED_ON].start(setting, SEARCHED_ON, vectors, embeddings)
            found[vectors, embeddings] = best_rate(start, octaves, ledger.loss)
            octaves = found[vectors, embeddings][1]
    return found


def chosen(setting: Setting, ledger: Ledger, rules: Sequence[str] = EMBEDDINGS) -> tuple[Trial, float]:
    """The best of the cells of this model's first setting: it is searched once for the family.

    Args:
        setting: which model.
        ledger: of the runs.
        rules: for embeddings, to choose from.
    """
    found = [cell for (_, rule), cell in cells(SMALL[setting.model], ledger).items() if rule in rules]
    return min(found, key=lambda cell: ledger.loss(cell[0]))


def vector_rates(setting: Setting, ledger: Ledger) -> dict[tuple[float, str], Judged]:
    """The cells, judged. Of a large model: as shipped, and the best of each rule for embeddings."""
    found = cells(setting, ledger)
    wanted = list(found)
    if setting.model != "43k":
        best = [min((k for k in found if k[1] == e), key=lambda k: ledger.loss(found[k][0])) for e in EMBEDDINGS]
        wanted = list(dict.fromkeys([(1.0, "ratio"), *best]))
    return {key: judge(found[key][0], ledger) for key in wanted}


def tuned(name: str, setting: Setting, ledger: Ledger) -> Judged:
    """An optimizer at its best, judged. The family starts from what was found on LAMB."""
    candidate = CANDIDATES[name]
    start, octaves = candidate.start(setting, name), candidate.octaves
    if name in FAMILY:
        best, octaves = chosen(setting, ledger)
        start = candidate.start(setting, name, best.vectors, best.embeddings)
    trial, runs = tune(start, octaves, candidate.knobs, ledger.loss)
    return judge(trial, ledger, runs)


def as_shipped(name: str, setting: Setting, ledger: Ledger) -> Judged:
    """One of the family with one rate for all parameters, as constructors have it, at its best rate."""
    candidate = CANDIDATES[name]
    trial, _ = best_rate(candidate.start(setting, name), candidate.octaves, ledger.loss)
    return judge(trial, ledger)


def wrong_norms(
    setting: Setting, ledger: Ledger, rule: str, counts: Sequence[int] = PIECES
) -> dict[tuple[str, int], tuple[Trial, float]]:
    """The best rate, and log2 of it, by kind of norm and number of pieces, with embeddings by ``rule``."""
    best, octaves = chosen(setting, ledger, (rule,))
    found = {("exact", 1): (best, octaves)}
    for kind in KINDS:
        for pieces in counts:
            found[kind, pieces] = best_rate(replace(best, norms=kind, pieces=pieces), octaves, ledger.loss)
    return found


def judged_norms(setting: Setting, ledger: Ledger, rule: str) -> dict[tuple[str, int], Judged]:
    """By kind and pieces: judged at their own best rate."""
    found = wrong_norms(setting, ledger, rule, JUDGED_PIECES)
    return {key: judge(trial, ledger) for key, (trial, _) in found.items()}


def parts() -> Iterator[tuple[str, Callable[[Ledger], object]]]:
    """All parts in the order in which they run."""
    small = SMALL["43k"]
    yield f"vectors and embeddings, {small}", lambda ledger: vector_rates(small, ledger)
    for name in FAMILY:
        yield f"{name}, {small}", lambda ledger, n=name: tuned(n, small, ledger)
    for rule in EMBEDDINGS:
        yield f"wrong norms, embeddings by {rule}", lambda ledger, r=rule: judged_norms(small, ledger, r)
    yield f"vectors and embeddings, {SMALL['1M']}", lambda ledger: vector_rates(SMALL["1M"], ledger)
    for rule in EMBEDDINGS:
        yield f"2 to 64 pieces, embeddings by {rule}", lambda ledger, r=rule: wrong_norms(small, ledger, r)
    for name in ("lamb-0.9", "paper", "nesterov"):
        yield f"{name} as shipped", lambda ledger, n=name: as_shipped(n, SMALL["43k"], ledger)
    for settings in (SMALL, LONG, LARGE):
        for setting in settings.values():
            for name in (*FAMILY, *PEERS):
                yield f"{name}, {setting}", lambda ledger, s=setting, n=name: tuned(n, s, ledger)
