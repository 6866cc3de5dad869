"""One run, without an engine: the project's model, data and schedule, and any optimizer."""

from __future__ import annotations

import functools
import importlib
import math
import time
from pathlib import Path
from typing import Any

from torch import nn

from alto_distributed.pretrain.config.settings import Run, parse
from alto_distributed.pretrain.data.prepare import prepare
from alto_distributed.pretrain.data.samples import Samples
from alto_distributed.pretrain.data.sources import stdlib
from alto_distributed.pretrain.model import build_model
from alto_distributed.pretrain.schedule import learning_rate

from ..places import ROOT
from ..tiny_gpt import backward, validate
from .candidates import optimizers
from .trials import HELD_OUT, MODELS, TUNING_SEED, Setting, Trial

WORK = ROOT / "runs" / "evidence" / "recipes"
#: Installed packages whose sources join the standard library's, by model.
PACKAGES: dict[str, tuple[str, ...]] = {"43k": (), "1M": ("numpy", "sympy")}
SPLIT = ("0.9", "0.05", "0.05")
#: Samples in one pass through the model, by model.
MICRO_BATCH = {"43k": 128, "1M": 8}


@functools.cache
def text(model: str) -> Path:
    """The tokens for a model, prepared once."""
    inputs: list[Path] = []  # none is the standard library
    if PACKAGES[model]:
        inputs = [Path(source.path) for source in stdlib()]
        inputs += [Path(importlib.import_module(package).__path__[0]) for package in PACKAGES[model]]
    output = WORK / "data" / model
    prepare(output, inputs, kind="bpe", vocabulary=MODELS[model]["vocabulary"], split=SPLIT)
    return output


def run_of(setting: Setting, seed: int) -> Run:
    """Model, data and schedule as a pretraining run has them, with a rate of 1."""
    training = {"iterations": setting.iterations, "global_batch": setting.batch, "seed": seed, "precision": "fp32"}
    micro_batch = math.gcd(setting.batch, MICRO_BATCH[setting.model])
    return parse(
        {
            "model": {**MODELS[setting.model], "dropout": 0.0},
            "data": {"directory": str(text(setting.model))},
            "training": {**training, "micro_batch": micro_batch, "clip": 1.0},
            "optimizer": {"name": "adamw", "lr": 1.0},
            "schedule": {"kind": "cosine", "warmup": max(setting.iterations // 12, 1), "final": 0.01},
        }
    )


def train(trial: Trial) -> dict[str, Any]:
    """Losses in nats a token: of the last twelfth of training, and of text that the model has not seen.

    That is the validation text for the tuning seed and the test text for all others.
    """
    began = time.process_time()
    run = run_of(trial.setting, trial.seed)
    t = run.training
    batches = _samples(run, "train")
    model = build_model(run)
    scaled = optimizers(trial, model)
    every = list({id(optimizer): optimizer for optimizer, *_ in scaled}.values())
    losses: list[float] = []
    for step in range(t.iterations):
        for _, group, factor in scaled:
            group["lr"] = trial.lr * factor * learning_rate(run, step)
        losses.append(backward(model, batches.batch(step, t.global_batch, t.micro_batch)))
        if not math.isfinite(losses[-1]):
            break
        nn.utils.clip_grad_norm_(model.parameters(), t.clip)
        for optimizer in every:
            optimizer.step()
            optimizer.zero_grad()
    recent = losses[-max(t.iterations // 12, 1) :]
    split = "valid" if trial.seed == TUNING_SEED else "test"
    found = {"train": sum(recent) / len(recent), split: _loss(model, run, split)}
    # JSON has no infinity: null is a run that broke down.
    told: dict[str, Any] = {name: round(x, 6) if math.isfinite(x) else None for name, x in found.items()}
    return {**told, "seconds": round(time.process_time() - began, 2)}


def _samples(run: Run, split: str) -> Samples:
    return Samples(run.data.directory, split, run.model.sequence, run.model.vocabulary, run.training.seed)


def _loss(model: nn.Module, run: Run, split: str) -> float:
    name = next(name for name, shape in MODELS.items() if shape["hidden"] == run.model.hidden)
    return validate(model, _samples(run, split).validation(HELD_OUT[name], 64))
