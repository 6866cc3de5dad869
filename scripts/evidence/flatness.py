"""Sharpness, drift and convergence by the sign of alpha: the paper's figure of the Hessian's top eigenvalue.

Three families, each with the same rate, initial weights and batches for every alpha of a seed:
AdamW at a small batch and LAMB at full batch on scikit-learn's digits, LAMB at large batch on the tiny GPT-2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from alto_distributed import ALTO, param_groups
from alto_distributed.pretrain.data.samples import Samples
from alto_distributed.pretrain.model import inputs_of, next_token_loss

from . import flatness_report, tiny_gpt
from .hessian import top_eigenvalue
from .study import Result

TITLE = "Flatness, drift and convergence by the sign of alpha"
TRACE = 10  # the paper's: how far parameters move in ten steps


@dataclass
class Course:
    """What was measured on the way of one run. Losses are of the training data."""

    steps: list[int] = field(default_factory=list)
    eigenvalue: list[float] = field(default_factory=list)
    drift: list[float] = field(default_factory=list)
    """Distance from the initial parameters."""
    moved: list[float] = field(default_factory=list)
    """Distance from the parameters ten steps before."""
    loss: list[float] = field(default_factory=list)
    held_out: float = math.nan
    """Error on data that was not trained on: share of wrong classes, or nats a token."""


class Observer:
    """Follows a run: parameters at every step, the Hessian at some."""

    def __init__(self, loss: Callable[[nn.Module], torch.Tensor], at: set[int], products: int) -> None:
        self.course = Course()
        self._loss, self._at, self._products = loss, at, products
        self._recent: list[torch.Tensor] = []

    def __call__(self, step: int, model: nn.Module, *_: Any) -> None:
        now = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        if step == 0:
            self._first = now
        self._recent = [*self._recent[-TRACE:], now]
        if step not in self._at:
            return
        course, loss = self.course, functools.partial(self._loss, model)
        course.steps.append(step)
        course.eigenvalue.append(top_eigenvalue(loss, list(model.parameters()), iterations=self._products))
        course.drift.append(float((now - self._first).norm()))
        course.moved.append(float((now - self._recent[0]).norm()))
        with torch.no_grad():
            course.loss.append(float(loss()))


@dataclass(frozen=True)
class Family:
    """A base optimizer in a setting, and the (alpha, beta1) with which it is adapted."""

    name: str
    base: str
    lr: float
    steps: int
    batch: int
    terms: tuple[tuple[float, float], ...]
    looks: int
    """Measurements on the way."""

    def at(self) -> set[int]:
        return {round(self.steps * (i + 1) / self.looks) for i in range(self.looks)}


SMALL = ((-5.0, 0.99), (-0.5, 0.01), (0.0, 0.99), (0.5, 0.01), (5.0, 0.99))
LARGE = ((-50.0, 0.99), (-5.0, 0.99), (0.0, 0.99), (5.0, 0.99), (50.0, 0.99))
FAMILIES = (
    Family("digits, batch 64", "AdamW", 3e-3, 660, 64, SMALL, 11),
    Family("digits, full batch", "LAMB", 0.01, 600, 0, LARGE, 12),
    Family("tiny GPT-2, batch 128", "LAMB", 0.04, 240, 128, (LARGE[0], LARGE[2], LARGE[4]), 4),
)


def run(quick: bool, into: Path) -> Result:
    families = [replace(f, steps=120, looks=3, terms=f.terms[::2]) for f in FAMILIES[:2]] if quick else FAMILIES
    counts = {family: 2 if quick else 3 if "GPT" in family.name else 5 for family in families}
    courses = {
        (family, terms): [follow(family, *terms, seed) for seed in range(1, counts[family] + 1)]
        for family in families
        for terms in family.terms
    }
    return Result(
        study="flatness",
        title=TITLE,
        form="quick" if quick else "full",
        settings={
            "families": [vars(family) for family in families],
            "network on digits": "64-32-32-10, GELU",
            "courses": {
                f"{family.name}, alpha {alpha:g}, beta1 {beta1:g}": [vars(course) for course in some]
                for (family, (alpha, beta1)), some in courses.items()
            },
        },
        seeds=list(range(1, max(counts.values()) + 1)),
        rows=flatness_report.rows(courses),
        figures=[flatness_report.draw(courses, into)],
        claims=flatness_report.claims(courses),
        notes=flatness_report.notes(courses),
        guidance=flatness_report.guidance(courses),
        intro=flatness_report.INTRO,
    )


def follow(family: Family, alpha: float, beta1: float, seed: int) -> Course:
    return (_on_text if "GPT" in family.name else _on_digits)(family, alpha, beta1, seed)


def _on_digits(family: Family, alpha: float, beta1: float, seed: int) -> Course:
    (x, y), (unseen_x, unseen_y) = digits()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 10))
    layerwise = "none" if family.base == "AdamW" else "decayed"
    betas = (beta1, 0.9, 0.99)
    optimizer = ALTO(param_groups(model, 1e-4), family.lr, betas, alpha, layerwise=layerwise)
    watch = Observer(lambda m: nn.functional.cross_entropy(m(x), y), family.at(), products=100)
    order = _order(len(x), family.batch or len(x), seed)
    watch(0, model)
    for step in range(family.steps):
        for group in optimizer.param_groups:
            group["lr"] = family.lr * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / family.steps)))
        chosen = next(order)
        nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
        optimizer.zero_grad()
        watch(step + 1, model)
    with torch.no_grad():
        watch.course.held_out = float((model(unseen_x).argmax(1) != unseen_y).float().mean())
    return watch.course


def _order(count: int, batch: int, seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        shuffled = torch.randperm(count, generator=generator)
        yield from shuffled[: count // batch * batch].split(batch)


@functools.cache
def digits() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """scikit-learn's 1,797 handwritten digits of 8 x 8: images and classes for training, and a fifth held out."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16 - 0.3, torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, unseen = order[:1437], order[1437:]
    return (x[train], y[train]), (x[unseen], y[unseen])


def _on_text(family: Family, alpha: float, beta1: float, seed: int) -> Course:
    trial = tiny_gpt.Trial("alto", family.lr, alpha, beta1, batch=family.batch, iterations=family.steps, seed=seed)
    data = tiny_gpt.stdlib_data(trial.share)
    model = tiny_gpt.MODEL
    (tokens,) = Samples(data, "train", model["sequence"], model["vocabulary"], seed=0).batch(0, 128, 128)
    watch = Observer(lambda m: next_token_loss(m(**inputs_of(tokens)).logits, tokens), family.at(), products=40)
    watch.course.held_out = tiny_gpt.train(trial.run(data), watch).final
    return watch.course
