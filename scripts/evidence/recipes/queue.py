"""The order of runs, and what each part of the study finds. With a ledger that runs nothing, the same code reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from alto_distributed import recipe

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
#: A rate of the vectors and a rule for embeddings.
Cell = tuple[float, str]
SHIPPED: Cell = (1.0, "ratio")
RECOMMENDED: Cell = (0.3, "ratio")
PIECES = (2, 4, 8, 16, 32, 64)
#: Of the large model, these run before the others.
FIRST = ("lamb-0.9", "lamb-0.8", "nesterov", "paper", "zero-lag", "adamw", "muon")
#: Preset -> the candidate that has its form.
CANDIDATE_OF = {"recommended": "lamb-0.8", "nesterov": "nesterov", "zero-lag": "zero-lag", "paper": "paper"}
#: Presets and batches that are judged as they are defined. The paper's is another for small batches.
AS_DEFINED = (("recommended", 4096), ("nesterov", 4096), ("zero-lag", 4096), ("paper", 4096), ("paper", 32))
#: LAMB with one rate for all, and the ratio for embeddings: what the presets are compared with.
PLAIN = ("lamb-0.9", "lamb-0.8")
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


def each_cell(setting: Setting, loss: Callable[[Trial], float]) -> Iterator[tuple[Cell, Trial, float]]:
    """The best rate for each rate of the vectors and rule for embeddings, with log2 of it, on the tuning seed."""
    octaves = dict.fromkeys(EMBEDDINGS, CANDIDATES[SEARCHED_ON].octaves)
    for vectors in VECTORS:
        for embeddings in EMBEDDINGS:
            start = CANDIDATES[SEARCHED_ON].start(setting, SEARCHED_ON, vectors, embeddings)
            trial, octaves[embeddings] = best_rate(start, octaves[embeddings], loss)
            yield (vectors, embeddings), trial, octaves[embeddings]


def chosen(setting: Setting, ledger: Ledger, rules: Sequence[str] = EMBEDDINGS) -> tuple[Trial, float]:
    """The best of the cells of this model's first setting: it is searched once for the family.

    Args:
        setting: which model.
        ledger: of the runs.
        rules: for embeddings, to choose from.
    """
    found = [cell for cell in each_cell(SMALL[setting.model], ledger.loss) if cell[0][1] in rules]
    _, trial, octaves = min(found, key=lambda cell: ledger.loss(cell[1]))
    return trial, octaves


def vector_rates(setting: Setting, ledger: Ledger) -> dict[Cell, Judged]:
    """The cells, judged. Of a large model: as shipped, as recommended, and the best of each rule for embeddings."""
    found = {key: trial for key, trial, _ in each_cell(setting, ledger.loss)}
    wanted = list(found)
    if setting.model != "43k":
        best = [min((k for k in found if k[1] == e), key=lambda k: ledger.loss(found[k])) for e in EMBEDDINGS]
        wanted = list(dict.fromkeys([SHIPPED, *best, RECOMMENDED]))
    return {key: judge(found[key], ledger) for key in wanted}


def tuned(name: str, setting: Setting, ledger: Ledger) -> Judged:
    """An optimizer at its best, judged. The family starts from what was found on LAMB."""
    candidate = CANDIDATES[name]
    start, octaves = candidate.start(setting, name), candidate.octaves
    if name in FAMILY:
        best, octaves = chosen(setting, ledger)
        start = candidate.start(setting, name, best.vectors, best.embeddings)
    trial, runs = tune(start, octaves, candidate.knobs, ledger.loss)
    return judge(trial, ledger, runs)


def preset_trial(name: str, batch: int, embeddings: str, setting: Setting) -> Trial:
    """What ``recipe(batch, preset=name)`` sets, at the rate where its tuning starts."""
    chosen = recipe(batch, preset=name)
    beta1, beta2, _ = chosen["betas"]
    numbers = {"alpha": chosen["alpha"], "beta1": beta1, "beta2": beta2}
    candidate = CANDIDATES[CANDIDATE_OF[name]]
    own = tuple((number, numbers[number]) for number in sorted(candidate.defaults))
    start = candidate.start(setting, CANDIDATE_OF[name], chosen.get("vector_lr", 1.0), embeddings)
    return replace(start, own=own)


def preset(name: str, batch: int, embeddings: str, setting: Setting, ledger: Ledger) -> Judged:
    """A preset as it is defined, judged: nothing but lr is tuned."""
    start = preset_trial(name, batch, embeddings, setting)
    trial, _ = best_rate(start, CANDIDATES[start.optimizer].octaves, ledger.loss)
    return judge(trial, ledger)


def plain(name: str, setting: Setting, ledger: Ledger) -> Judged:
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


def norms_at_exact_rate(setting: Setting, ledger: Ledger, rule: str) -> dict[tuple[str, int], Judged]:
    """The same, judged at the rate that is best with exact norms: what a run does when sharding is all that changes."""
    best, _ = chosen(setting, ledger, (rule,))
    found = {("exact", 1): judge(best, ledger)}
    for kind in KINDS:
        for pieces in JUDGED_PIECES:
            found[kind, pieces] = judge(replace(best, norms=kind, pieces=pieces), ledger)
    return found


def parts() -> Iterator[tuple[str, Callable[[Ledger], object]]]:
    """All parts in the order in which they run: what decides most for its time comes first."""
    small, large_model = SMALL["43k"], SMALL["1M"]
    yield f"vectors and embeddings, {small}", lambda ledger: vector_rates(small, ledger)
    for name in (*FAMILY, *PEERS):
        yield _tuned(name, small)
    for rule in EMBEDDINGS:
        yield f"wrong norms, embeddings by {rule}", lambda ledger, r=rule: judged_norms(small, ledger, r)
    for rule in EMBEDDINGS:
        told = f"wrong norms at the rate of exact ones, embeddings by {rule}"
        yield told, lambda ledger, r=rule: norms_at_exact_rate(small, ledger, r)
    for name in PLAIN:
        yield f"{name} as constructors have it, {small}", lambda ledger, n=name: plain(n, small, ledger)
    papers = [chosen for chosen in AS_DEFINED if chosen[0] == "paper"]
    yield from (_preset(*chosen, small) for chosen in AS_DEFINED if chosen not in papers)
    pieces = [
        (f"2 to 64 pieces, embeddings by {rule}", lambda ledger, r=rule: wrong_norms(small, ledger, r))
        for rule in EMBEDDINGS
    ]
    yield pieces[0]
    yield f"vectors and embeddings, {large_model}", lambda ledger: vector_rates(large_model, ledger)
    yield pieces[1]
    yield from (_preset(*chosen, small) for chosen in papers)
    for name in FIRST:
        yield _tuned(name, large_model)
    for setting in (LARGE["43k"], LONG["43k"]):
        for name in (*FAMILY, *PEERS):
            yield _tuned(name, setting)
    for name in (*FAMILY, *PEERS):
        if name not in FIRST:
            yield _tuned(name, large_model)
    for setting in (LONG["1M"], LARGE["1M"]):
        for name in (*FAMILY, *PEERS):
            yield _tuned(name, setting)


def _tuned(name: str, setting: Setting) -> tuple[str, Callable[[Ledger], object]]:
    return f"{name}, {setting}", lambda ledger: tuned(name, setting, ledger)


def _preset(name: str, batch: int, setting: Setting) -> tuple[str, Callable[[Ledger], object]]:
    told = f'recipe({batch}, "{name}"), {setting}'
    return told, lambda ledger: [preset(name, batch, rule, setting, ledger) for rule in EMBEDDINGS]
