"""A tiny GPT-2 trained with the project's own pieces, in float32 and one process; runs are remembered on disk.

The data, model, optimizers and schedule are those of ``python -m alto_distributed pretrain``. There is no engine, so
that a run takes a quarter of a minute on one core.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from alto_distributed.pretrain.config.settings import Run, parse
from alto_distributed.pretrain.data.prepare import prepare
from alto_distributed.pretrain.data.samples import Samples
from alto_distributed.pretrain.model import build_model, inputs_of, next_token_loss
from alto_distributed.pretrain.optimizers import build_groups, build_optimizer
from alto_distributed.pretrain.schedule import learning_rate

from .places import ROOT

MODEL = {"layers": 2, "hidden": 32, "heads": 2, "sequence": 32, "vocabulary": 512, "dropout": 0.0}
#: Where data and finished runs are kept, out of the repository.
WORK = ROOT / "runs" / "evidence" / "tiny_gpt"
MICRO_BATCH = 128


@dataclass(frozen=True)
class Trial:
    """One training run: an optimizer in a setting, with a seed."""

    optimizer: str
    """As :mod:`alto_distributed.pretrain.optimizers` names it."""
    lr: float
    alpha: float = 0.0
    """Of "alto" alone, as beta1 is."""
    beta1: float = 0.99
    share: str = "0.9"
    """Share of the text that is for training; 0.05 is for validation, always."""
    batch: int = 128
    iterations: int = 240
    seed: int = 1
    beta2: float = 0.9
    """Momentum: the decay of the first moment, whatever the optimizer calls it."""
    held_out: int = 256
    """Samples of a validation."""

    @property
    def rho(self) -> float:
        return -self.alpha * (1 - self.beta1)

    def run(self, data: Path) -> Run:
        """Its settings, as a pretraining run has them."""
        options: dict[str, Any] = {"betas": [self.beta2, 0.99]}
        if self.optimizer == "alto":
            options = {"alpha": self.alpha, "betas": [self.beta1, self.beta2, 0.99]}
        decay = {"alto": 1e-4, "lamb": 1e-4, "adam": 0.0, "adabelief": 0.0}.get(self.optimizer, 1e-2)
        training = {"iterations": self.iterations, "global_batch": self.batch, "precision": "fp32", "clip": 1.0}
        return parse(
            {
                "model": MODEL,
                "data": {"directory": str(data)},
                "training": {**training, "micro_batch": math.gcd(self.batch, MICRO_BATCH), "seed": self.seed},
                "optimizer": {"name": self.optimizer, "lr": self.lr, "weight_decay": decay, "options": options},
                "schedule": {"kind": "cosine", "warmup": max(self.iterations // 12, 1), "final": 0.01},
                "evaluation": {"every": max(self.iterations // 24, 1), "samples": self.held_out},
            }
        )


@dataclass(frozen=True)
class Outcome:
    """What a run came to. Losses are in nats a token."""

    steps: list[int]
    valid: list[float]
    """After each of ``steps``; infinite from where the run broke down."""
    train: float
    """Mean over the last twelfth of the iterations."""
    seconds: float
    """Of the processor."""

    @property
    def final(self) -> float:
        return self.valid[-1]

    def reaches(self, loss: float) -> float:
        """Iterations until the validation loss is at most ``loss``, between validations by a straight line."""
        before_step, before = 0, math.log(MODEL["vocabulary"])
        for step, value in zip(self.steps, self.valid, strict=True):
            if value <= loss:
                return before_step + (step - before_step) * (before - loss) / max(before - value, 1e-12)
            before_step, before = step, value
        return math.inf


def stdlib_data(share: str, packages: Iterable[str] = ()) -> Path:
    """The standard library's sources as tokens: all of them, or some of its packages. Prepared once."""
    packages = tuple(packages)
    rest = str(round(0.95 - float(share), 6))
    output = WORK / "data" / "-".join((*packages, f"train{share}"))
    inputs = [Path(sysconfig.get_paths()["stdlib"]) / package for package in packages]
    vocabulary = MODEL["vocabulary"]
    prepare(output, inputs, kind="bpe", vocabulary=vocabulary, split=(share, "0.05", rest))
    return output


def windows(data: Path) -> int:
    """Samples for training that there are."""
    return Samples(data, "train", MODEL["sequence"], MODEL["vocabulary"]).windows


def train(run: Run, observe: Callable[[int, nn.Module, float], None] | None = None) -> Outcome:
    """Train.

    Args:
        run: its settings.
        observe: called with the number of steps done, the model and the loss of the last batch, before the first step
            (with NaN) and after every one.
    """
    began = time.process_time()
    t = run.training
    batches, held_out = (
        Samples(run.data.directory, split, run.model.sequence, run.model.vocabulary, t.seed)
        for split in ("train", "valid")
    )
    model = build_model(run)
    optimizer = build_optimizer(run, build_groups(run, model))
    steps, valid, losses = [], [], []
    if observe:
        observe(0, model, math.nan)
    for step in range(t.iterations):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run, step)
        losses.append(backward(model, batches.batch(step, t.global_batch, t.micro_batch)))
        nn.utils.clip_grad_norm_(model.parameters(), t.clip)
        optimizer.step()
        optimizer.zero_grad()
        if observe:
            observe(step + 1, model, losses[-1])
        if (step + 1) % run.evaluation.every == 0 or step + 1 == t.iterations:
            steps.append(step + 1)
            valid.append(validate(model, held_out.validation(run.evaluation.samples, MICRO_BATCH)))
            if not math.isfinite(valid[-1]):
                break
    recent = losses[-max(t.iterations // 12, 1) :]
    return Outcome(
        steps,
        [value if math.isfinite(value) else math.inf for value in valid],
        sum(recent) / len(recent),
        time.process_time() - began,
    )


def backward(model: nn.Module, batches: list[torch.Tensor]) -> float:
    """Add up the gradients of a step's micro-batches; returns the loss."""
    total = 0.0
    for tokens in batches:
        loss = next_token_loss(model(**inputs_of(tokens)).logits, tokens) / len(batches)
        loss.backward()
        total += loss.item()
    return total


@torch.no_grad()
def validate(model: nn.Module, batches: list[torch.Tensor]) -> float:
    losses = [next_token_loss(model(**inputs_of(tokens)).logits, tokens) for tokens in batches]
    return float(torch.stack(losses).mean())


class Trials:
    """Runs trials, each of them once: what was run before, by the same code, is read from disk.

    Args:
        packages: of the standard library; none for all of it.
        memory: directory of finished runs; None to remember nothing.
    """

    def __init__(self, packages: Iterable[str] = (), memory: Path | None = None) -> None:
        self._packages, self._memory = tuple(packages), memory
        self._done: dict[Trial, Outcome] = {}

    def __call__(self, trial: Trial) -> Outcome:
        if trial not in self._done:
            self._done[trial] = self._recalled(trial) or self._new(trial)
        return self._done[trial]

    def seeds(self, trial: Trial, seeds: Iterable[int]) -> list[Outcome]:
        return [self(replace(trial, seed=seed)) for seed in seeds]

    def data(self, share: str) -> Path:
        return stdlib_data(share, self._packages)

    def count(self) -> int:
        return len(self._done)

    def seconds(self) -> float:
        """That all of them took, those of earlier calls included."""
        return sum(outcome.seconds for outcome in self._done.values())

    def _new(self, trial: Trial) -> Outcome:
        outcome = train(trial.run(self.data(trial.share)))
        if self._memory:
            self._memory.mkdir(parents=True, exist_ok=True)
            told = {"trial": asdict(trial), **asdict(outcome)}
            self._path(trial, self._memory).write_text(json.dumps(told))
            print(f"{trial}: {outcome.final:.4f} in {outcome.seconds:.0f} s", flush=True)
        return outcome

    def _recalled(self, trial: Trial) -> Outcome | None:
        if not self._memory or not self._path(trial, self._memory).is_file():
            return None
        told: Mapping[str, Any] = json.loads(self._path(trial, self._memory).read_text())
        return Outcome(**{name: told[name] for name in ("steps", "valid", "train", "seconds")})

    def _path(self, trial: Trial, memory: Path) -> Path:
        """A name that changes with the trial, the model and every line that could change the outcome."""
        settings = json.dumps([asdict(trial), MODEL, self._packages, _code()])
        return memory / f"{hashlib.sha256(settings.encode()).hexdigest()[:24]}.json"


@functools.cache
def _code() -> str:
    digest = hashlib.sha256()
    package = ROOT / "alto_distributed"
    elsewhere = {package / folder for folder in ("deepspeed", "megatron", "doctor")}
    sources = [path for path in sorted(package.rglob("*")) if path.suffix in (".py", ".c")]
    sources = [path for path in sources if elsewhere.isdisjoint(path.parents)]
    for path in (Path(__file__), *sources):
        digest.update(path.read_bytes())
    return digest.hexdigest()
