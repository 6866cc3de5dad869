"""What the courses of :mod:`.flatness` say about the paper's claims: table, verdicts, figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .figures import new_figure, save
from .paired import LEAST_SEEDS, Difference, paired, verdict_higher, verdict_lower
from .study import Claim, mean_and_spread

if TYPE_CHECKING:
    from .flatness import Course, Family

Courses = Mapping[tuple["Family", tuple[float, float]], Sequence["Course"]]

INTRO = (
    "The paper follows the Hessian's largest eigenvalue, the distance from the initial parameters and the distance "
    "covered in ten steps for ResNet20 on CIFAR-100, with AdamW (batch 128) and LAMB (batch 16384) adapted with "
    "several alphas. Here: a small network on scikit-learn's digits with AdamW (batch 64) and LAMB (full batch), and "
    "the tiny GPT-2 with LAMB. Rate, initial weights and batches are the same for every alpha of a seed; the rate "
    "falls by a cosine to 1%. The eigenvalue is that of the training loss (GPT-2: of 128 fixed samples), by power "
    "iteration on exact Hessian-vector products."
)


def rows(courses: Courses) -> list[dict[str, Any]]:
    table = []
    for (family, (alpha, beta1)), some in courses.items():
        eigenvalue, spread = mean_and_spread([abs(course.eigenvalue[-1]) for course in some])
        level = [_at_loss(course, bar) for course, bar in zip(some, _bars(courses, family), strict=True)]
        table.append(
            {
                "setting": family.name,
                "base": family.base,
                "alpha": alpha,
                "beta1": beta1,
                "rho": round(-alpha * (1 - beta1), 4) + 0.0,
                "top eigenvalue at the end": eigenvalue,
                "+-": spread,
                "the same at equal loss": statistics.fmean(level),
                "drift": statistics.fmean(course.drift[-1] for course in some),
                "moved in 10 steps, mean": statistics.fmean(map(_moved, some)),
                "training loss, mean": statistics.fmean(map(_progress, some)),
                "training loss at the end": statistics.fmean(course.loss[-1] for course in some),
                "held-out error": statistics.fmean(course.held_out for course in some),
                "seeds": len(some),
            }
        )
    return table


# -- what is compared ------------------------------------------------------------------------------------


def _sharpness(course: Course) -> float:
    """The logarithm of |H|, the eigenvalue's size."""
    return math.log(max(abs(course.eigenvalue[-1]), 1e-12))


def _progress(course: Course) -> float:
    """Mean training loss over the run: the lower, the faster it converged."""
    return statistics.fmean(course.loss)


def _moved(course: Course) -> float:
    return statistics.fmean(course.moved)


def _bars(courses: Courses, family: Family) -> list[float]:
    """For each seed the lowest training loss that every alpha came down to."""
    runs = [some for (of, _), some in courses.items() if of == family]
    return [max(min(course.loss) for course in same_seed) for same_seed in zip(*runs, strict=True)]


def _at_loss(course: Course, bar: float) -> float:
    """The eigenvalue when the training loss first came down to ``bar``, between measurements by a straight line."""
    points = list(zip(course.loss, map(abs, course.eigenvalue), strict=True))
    for (loss_0, value_0), (loss_1, value_1) in pairwise(points):
        if loss_1 <= bar < loss_0:
            return value_0 + (value_1 - value_0) * (loss_0 - bar) / (loss_0 - loss_1)
    return next((value for loss, value in points if loss <= bar), points[-1][1])


def _pairs(courses: Courses, against: Callable[[float], float]) -> Iterator[tuple[str, Any, Any]]:
    """(what, runs with alpha < 0, runs with alpha ``against(alpha)``) of every family that has both."""
    for (family, (alpha, beta1)), some in courses.items():
        if alpha < 0:
            other = next(
                (
                    runs
                    for (of, (a, b)), runs in courses.items()
                    if of == family and a == against(alpha) and b in (beta1, 0.99)
                ),
                None,
            )
            if other is not None:
                yield f"{family.name}, alpha {alpha:g} against {against(alpha):g}", some, other


#: Claims, each of which compares every pair.
CLAIMS = 4


def _together(courses: Courses, against: Callable[[float], float]) -> int:
    """Comparisons of the page."""
    return CLAIMS * len(list(_pairs(courses, against)))


def compare(
    courses: Courses, against: Callable[[float], float], value: Callable[[Course], float]
) -> dict[str, Difference]:
    count = _together(courses, against)
    return {
        what: paired([value(course) for course in some], [value(course) for course in other], comparisons=count)
        for what, some, other in _pairs(courses, against)
    }


def at_equal_loss(courses: Courses, against: Callable[[float], float]) -> dict[str, Difference]:
    """As :func:`compare` of sharpness, where both have come down to the loss that both reach."""
    differences = {}
    for what, some, other in _pairs(courses, against):
        bars = [max(min(a.loss), min(b.loss)) for a, b in zip(some, other, strict=True)]
        levels = [
            [math.log(max(_at_loss(c, bar), 1e-12)) for c, bar in zip(runs, bars, strict=True)]
            for runs in (some, other)
        ]
        differences[what] = paired(*levels, comparisons=_together(courses, against))
    return differences


# -- verdicts --------------------------------------------------------------------------------------------


def claims(courses: Courses) -> list[Claim]:
    where = "section 3, figure of the Hessian's top eigenvalue"
    mirrored = compare(courses, lambda alpha: -alpha, _sharpness)
    level = at_equal_loss(courses, lambda alpha: -alpha)
    original = compare(courses, lambda _: 0.0, _sharpness)
    original_level = at_equal_loss(courses, lambda _: 0.0)
    drift = compare(courses, lambda alpha: -alpha, lambda course: course.drift[-1])
    slow = compare(courses, lambda alpha: -alpha, _progress)
    return [
        Claim(
            "A negative alpha ends in flatter minima than a positive one.",
            where,
            verdict_lower(level.values()),  # where losses differ, so does flatness
            f"{_told('Top eigenvalue at equal training loss', level, _times)} {_told('At the end', mirrored, _times)}",
        ),
        Claim(
            "A negative alpha ends in flatter minima than the optimizer that it adapts (alpha 0).",
            "section 3, why large-batch training is important",
            verdict_lower(original_level.values()),
            f"{_told('Top eigenvalue at equal training loss', original_level, _times)} "
            f"{_told('At the end', original, _times)}",
        ),
        Claim(
            "A negative alpha explores a larger part of the parameter space than a positive one.",
            where,
            verdict_higher(drift.values()),
            _told("Distance from the initial parameters", drift, lambda d: f"{d.mean:+.2f}"),
        ),
        Claim(
            "A negative alpha converges more slowly than a positive one.",
            where,
            verdict_higher(slow.values()),
            _told("Training loss, mean over the run", slow, lambda d: f"{d.mean:+.4f}"),
        ),
    ]


def _times(difference: Difference) -> str:
    return f"{math.exp(difference.mean):.2g} times"


def _told(what: str, differences: Mapping[str, Difference], figure: Callable[[Difference], str]) -> str:
    parts = [f"{pair}: {figure(d)}{_doubt(d)}" for pair, d in differences.items()]
    return f"{what}, {'; '.join(parts)}."


def _doubt(difference: Difference) -> str:
    if difference.seeds < LEAST_SEEDS:
        return f" ({difference.seeds} seeds)"
    return "" if difference.counts else " (within noise)"


def notes(courses: Courses) -> list[str]:
    table, level = rows(courses), at_equal_loss(courses, lambda alpha: -alpha)
    told = []
    for name in dict.fromkeys(row["setting"] for row in table):
        here = [row for row in table if row["setting"] == name]
        flattest = min(here, key=lambda row: row["top eigenvalue at the end"])
        best = min(here, key=lambda row: row["held-out error"])
        told.append(
            f"{name}: flattest at the end is alpha = {flattest['alpha']:g} "
            f"({flattest['top eigenvalue at the end']:.3g}, held-out error {flattest['held-out error']:.4g}); least "
            f"held-out error has alpha = {best['alpha']:g} ({best['held-out error']:.4g})."
        )
    return [
        "A difference counts with five seeds or more, where its 95% interval, widened for the comparisons of all "
        "claims, excludes 0. Verdicts are those of the settings with five seeds.",
        f"Where both have come down to the same training loss, the negative alpha of a mirrored pair is flatter beyond "
        f"noise in {sum(d.lower for d in level.values())} and sharper in {sum(d.higher for d in level.values())} of "
        f"{len(level)} pairs.",
        'Sharpness changes as the loss falls, so a run that is further on is compared with one that is not; "at equal '
        'loss" '
        "is the eigenvalue where each seed's training loss first comes down to what all alphas reached.",
        "The rate at full batch was first 0.05 and became 0.01 after a look at one seed: at 0.05 alpha -50 and 0 broke "
        "down to the loss of guessing and alpha 50 did not. So the ranking is that of one rate, and a positive alpha "
        "stands a higher one.",
        *told,
    ]


def guidance(courses: Courses) -> list[str]:
    flat = at_equal_loss(courses, lambda _: 0.0)
    flatter = sum(d.lower for d in flat.values())
    sharper = sum(d.higher for d in flat.values())
    return [
        f"Do not choose a negative alpha for flatness alone without measuring: beside alpha 0, at equal loss, the top "
        f"eigenvalue was lower beyond noise in {flatter} and higher in {sharper} of {len(flat)} comparisons here."
    ]


# -- figure ----------------------------------------------------------------------------------------------


def draw(courses: Courses, into: Path) -> str:
    families = list(dict.fromkeys(family for family, _ in courses))
    figure, axes = new_figure(len(families), 4, width=2.9, height=2.2)
    kinds = (
        ("top eigenvalue of the Hessian", lambda course: list(map(abs, course.eigenvalue))),
        ("distance from the start", lambda course: course.drift),
        ("distance covered in 10 steps", lambda course: course.moved),
        ("training loss", lambda course: course.loss),
    )
    for line, family in zip(list(axes), families, strict=True):
        terms = sorted(term for of, term in courses if of == family)
        for ax, (what, values) in zip(line, kinds, strict=True):
            for term in terms:
                some = courses[family, term]
                mean = [statistics.fmean(at) for at in zip(*map(values, some), strict=True)]
                label = f"alpha {term[0]:g}" + (f", beta1 {term[1]:g}" if term[0] else "")
                ax.plot(some[0].steps, mean, "o-", ms=2, lw=1, color=_colour(term, terms), label=label)
            heights = [abs(y) for drawn in ax.lines for y in drawn.get_ydata()]
            ax.set_yscale("log" if max(heights) > 30 * min(heights) else "linear")
            if family == families[0]:
                ax.set_title(what, fontsize=10)
            ax.tick_params(which="both", labelsize=7)
            ax.minorticks_off()
        line[0].set_ylabel(f"{family.base}, {family.name}", fontsize=8)
        line[1].legend(fontsize=7)
    for ax in axes[-1]:
        ax.set_xlabel("steps")
    return save(figure, into, "flatness.png")


def _colour(term: tuple[float, float], terms: Sequence[tuple[float, float]]) -> str:
    """Blue below 0, black at 0, red above; darker for the larger rho."""
    sizes = sorted({abs(alpha * (1 - beta1)) for alpha, beta1 in terms if alpha})
    strong = abs(term[0] * (1 - term[1])) == sizes[-1]
    if term[0] == 0:
        return "black"
    return ("navy" if strong else "deepskyblue") if term[0] < 0 else ("darkred" if strong else "salmon")
