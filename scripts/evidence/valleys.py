"""Valleys: do adapted optimizers go on along a valley that the plain ones stop in?"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from alto_distributed import ALTO, E

from .landscapes import CARDIOID, ROSENBROCK, Exploration, Maker, Valley, explore, follow
from .study import Claim, Result, verdict
from .valleys_figure import draw_valleys, draw_wells
from .wells import F1, F2, study_well, well_claims

TITLE = "Valleys: going on after the minimum is reached"
BETA1 = 0.99
#: The paper's default for large batches, and the strongest that it uses on functions of two wells and more.
ALPHAS = (0.0, -5.0, -80.0)
#: The paper does not give the rates of its figure; these let the plain optimizer reach the valley and settle.
RATES = {"SGD": 2e-4, "Adam": 1e-2, "LAMB": 2e-3}
OF_THE_VALLEY = ("entered", "inside", "flattest")
ADAPTED = {"SGD": "ESGD", "Adam": "EAdam", "LAMB": "ALTO"}
SHIFT = 4.0
INTRO = """\
Pairs of a plain optimizer and its adapted form from the same starts, with the same rate, without noise, in float64;
means over the starts. A path is in the valley where the function is below a threshold. *Explored* is the length of the
valley's floor that a path visits after it first enters, each piece of 0.05 counted once, so that swinging to and fro in
one place counts for nothing; *path* counts the swings. *Flattest* is the smallest top eigenvalue of the Hessian met in
the valley. The paper shows pictures and gives no rates for its figure; ours are in the settings. For the two functions
of one variable its alpha and betas are used, with five rates; *flattest* and *last* are then those at the end, the
median over the rates."""
#: "Goes on" means: sees at least this many times the length of valley.
FACTOR = 1.5


def maker(base: str, alpha: float) -> Maker:
    """Of ``base``, adapted if alpha is not 0."""

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        if base == "LAMB":
            return ALTO(groups, alpha=alpha, betas=(BETA1, 0.9, 0.99), weight_decay=0.0, layerwise="all")
        plain: torch.optim.Optimizer
        if base == "SGD":
            plain = torch.optim.SGD(groups, momentum=0.9)
        else:
            plain = torch.optim.Adam(groups, betas=(0.9, 0.99))
        return E(plain, alpha=alpha, beta1=BETA1) if alpha else plain

    return make


def run(quick: bool, into: Path) -> Result:
    steps, count, alphas = (400, 4, (0.0, -80.0)) if quick else (2000, 8, ALPHAS)
    rows, seen, drawn = [], {}, {}
    for valley in (CARDIOID, ROSENBROCK):
        for base in RATES:
            for alpha in alphas:
                points = follow(
                    valley.function,
                    valley.starts[:count],
                    maker(base, alpha),
                    steps,
                    [RATES[base]] * count,
                    SHIFT if base == "LAMB" else 0.0,
                )
                found = [explore(valley, points[:, i]) for i in range(count)]
                seen[valley.name, base, alpha] = found
                drawn[valley.name, base, alpha] = points[:, 0]
                rows.append(_row(valley, base, alpha, found))
    wells = [study_well(well, 500 if quick else 2000, well.rates[1:4] if quick else well.rates) for well in (F1, F2)]
    for well in wells:
        rows += well.rows
    figures = [
        draw_valleys((CARDIOID, ROSENBROCK), drawn, list(RATES), ADAPTED, alphas[-1], into),
        draw_wells(wells, into),
    ]
    claims = [_goes_on(seen, alphas[-1]), _flatter(seen, alphas[-1]), _lower(seen, alphas[-1]), *well_claims(wells)]
    return Result(
        study="valleys",
        title=TITLE,
        form="quick" if quick else "full",
        settings={
            "steps": steps,
            "starts": {valley.name: valley.starts[:count] for valley in (CARDIOID, ROSENBROCK)},
            "rates": RATES,
            "alphas": alphas,
            "betas": [BETA1, 0.9, 0.99],
            "momentum of SGD": 0.9,
            "shift of LAMB's and ALTO's parameter": SHIFT,
            "thresholds": {valley.name: valley.threshold for valley in (CARDIOID, ROSENBROCK)},
            "wells": {well.well.name: well.settings() for well in wells},
        },
        seeds=[],
        rows=rows,
        columns=[*rows[0], "ends at"],
        figures=figures,
        claims=claims,
        notes=_notes(seen, alphas),
        guidance=_guidance(seen, alphas) if not quick else [],
        intro=INTRO,
    )


def _row(valley: Valley, base: str, alpha: float, found: list[Exploration]) -> dict[str, Any]:
    def mean(name: str) -> float:
        # When it entered, and what it met there, only a path can tell that did.
        values = [getattr(one, name) for one in found if one.entered is not None or name not in OF_THE_VALLEY]
        return fmean(values) if values else math.nan

    return {
        "function": valley.name,
        "optimizer": ADAPTED[base] if alpha else base,
        "alpha": alpha,
        "rho": abs(alpha) * (1 - BETA1),
        "lr": f"{RATES[base]:g}",
        "enters at step": mean("entered"),
        "explored": mean("explored"),
        "path": mean("path"),
        "share inside": mean("inside"),
        "flattest": mean("flattest"),
        "lowest": mean("lowest"),
        "last": mean("last"),
    }


Seen = dict[tuple[str, str, float], list[Exploration]]


def _pairs(seen: Seen, alpha: float) -> list[tuple[str, str, list[Exploration], list[Exploration]]]:
    """(function, base, plain, adapted)."""
    return [(f, base, found, seen[f, base, alpha]) for (f, base, a), found in seen.items() if a == 0]


def _goes_on(seen: Seen, alpha: float) -> Claim:
    pairs = _pairs(seen, alpha)
    means = [(f, b, fmean(p.explored for p in plain), fmean(p.explored for p in ad)) for f, b, plain, ad in pairs]
    told = "; ".join(f"{f}, {ADAPTED[b]} {more:.2f} against {b} {less:.2f}" for f, b, less, more in means)
    return Claim(
        "An adapted optimizer goes on along the valley after reaching it, where the plain one stops.",
        "introduction, figure 1",
        verdict([more >= FACTOR * less for _, _, less, more in means]),
        f"Length of valley explored at alpha {alpha:g}: {told}. Counted as going on: {FACTOR:g} times as much.",
    )


def _flatter(seen: Seen, alpha: float) -> Claim:
    pairs = [pair for pair in _pairs(seen, alpha) if pair[0] == CARDIOID.name]
    means = [(b, _mean_in_valley(plain), _mean_in_valley(adapted)) for _, b, plain, adapted in pairs]
    told = "; ".join(f"{ADAPTED[b]} {flat:.3g} against {b} {sharp:.3g}" for b, sharp, flat in means)
    return Claim(
        "The longer the explored valley, the flatter the best minimum in it.",
        "introduction, figure 1",
        verdict([flat < sharp for _, sharp, flat in means]),
        f"Smallest top Hessian eigenvalue met in the cardioid's valley at alpha {alpha:g}, mean over starts: {told}.",
    )


def _mean_in_valley(found: list[Exploration]) -> float:
    """Of the flattest point; a path that never entered has met none."""
    met = [path.flattest for path in found if path.entered is not None]
    return fmean(met) if met else math.inf


def _lower(seen: Seen, alpha: float) -> Claim:
    pairs = [pair for pair in _pairs(seen, alpha) if pair[0] == ROSENBROCK.name]
    means = [(b, fmean(p.last for p in plain), fmean(p.last for p in ad)) for _, b, plain, ad in pairs]
    told = "; ".join(f"{ADAPTED[b]} {ours:.2g} against {b} {theirs:.2g}" for b, theirs, ours in means)
    return Claim(
        "Exploring the valley leads to lower values.",
        "introduction, figure 1 (right)",
        verdict([ours < theirs for _, theirs, ours in means]),
        f"Rosenbrock's value after the last step at alpha {alpha:g}, mean over starts: {told}.",
    )


def _notes(seen: Seen, alphas: tuple[float, ...]) -> list[str]:
    inside = {a: fmean(p.inside for (_, _, at), found in seen.items() if at == a for p in found) for a in alphas}
    told = ", ".join(f"{share:.0%} at alpha {a:g}" for a, share in inside.items())
    return [
        f"Exploring is paid for with height: of the steps after entering, this share was in the valley: {told}.",
        f"LAMB and ALTO see the point moved by {SHIFT:g} in both coordinates. A step of theirs is proportional to the "
        "parameter's norm, so that with a single layer of two numbers they would creep at the origin and hurry far "
        "from it. They also never settle at a constant rate: the norm of a step does not fall.",
    ]


def _guidance(seen: Seen, alphas: tuple[float, ...]) -> list[str]:
    def explored(alpha: float) -> float:
        return fmean(p.explored for (_, _, a), found in seen.items() if a == alpha for p in found)

    told = ", ".join(f"{explored(a):.2f} at rho = {abs(a) * (1 - BETA1):g}" for a in alphas)
    return [f"Exploration grows with rho: on noiseless valleys the mean length explored is {told} (beta1 {BETA1:g})."]
