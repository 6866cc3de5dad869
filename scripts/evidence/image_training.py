"""Training a classifier with one of the six optimizers of the paper's table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from alto_distributed import ALTO, param_groups, recipe

from .image_data import Images, batches

#: In the paper's order.
OPTIMIZERS = ("SGD", "Adam", "AdamW", "LAMB", "AdaBelief", "ALTO")


def make_optimizer(
    name: str, model: nn.Module, lr: float, batch: int, weight_decay: float = 1e-4, **options: Any
) -> Any:
    """One of OPTIMIZERS with the usual settings; LAMB and ALTO with the paper's for that batch size.

    Args:
        name: see OPTIMIZERS.
        model: whose parameters are split into decayed and undecayed.
        lr: learning rate.
        batch: samples in a step, which decides ALTO's alpha and beta1.
        weight_decay: of the decayed parameters.
        options: for LAMB and ALTO, what differs from the recipe.
    """
    groups = param_groups(model, weight_decay)
    if name in ("LAMB", "ALTO"):
        settings = {**recipe(batch), "lr": lr, "weight_decay": weight_decay}
        if name == "LAMB":
            settings["alpha"] = 0.0
        return ALTO(groups, **{**settings, **options})
    if name == "SGD":
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)
    if name == "Adam":
        return torch.optim.Adam(groups, lr=lr)
    if name == "AdamW":
        return torch.optim.AdamW(groups, lr=lr)
    if name == "AdaBelief":
        from pytorch_optimizer import AdaBelief

        return AdaBelief(groups, lr=lr)
    raise ValueError(f"optimizer={name!r} is not one of {', '.join(OPTIMIZERS)}")


@dataclass(frozen=True)
class Outcome:
    """Of one run, on the test set after the last epoch."""

    accuracy: float
    """In percent."""
    loss: float
    train_loss: float
    """Of the last epoch's batches."""


def quarters(epoch: int, epochs: int) -> float:
    """The paper's schedule for CIFAR: a tenth of the rate after every quarter of the epochs."""
    return float(0.1 ** (4 * epoch // epochs))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train_set: Images,
    test_set: Images,
    batch: int,
    epochs: int,
    seed: int,
    schedule: Callable[[int, int], float] = quarters,
) -> Outcome:
    """Train on a set in memory; the order of its batches follows from the seed."""
    generator = torch.Generator().manual_seed(seed)
    rates = [group["lr"] for group in optimizer.param_groups]
    losses: Sequence[float] = []
    model.train()
    for epoch in range(epochs):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * schedule(epoch, epochs)
        losses = []
        for chosen in batches(len(train_set), batch, generator):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(train_set.images[chosen]), train_set.labels[chosen])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
    accuracy, test_loss = evaluate(model, test_set)
    return Outcome(accuracy, test_loss, sum(losses) / len(losses))


@torch.no_grad()
def evaluate(model: nn.Module, test_set: Images) -> tuple[float, float]:
    """(accuracy in percent, loss)."""
    model.eval()
    scores = model(test_set.images)
    right = (scores.argmax(dim=-1) == test_set.labels).double().mean().item()
    return 100 * right, nn.functional.cross_entropy(scores, test_set.labels).item()
