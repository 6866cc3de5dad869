"""The optimizers of the study: where their tuning starts, what is tuned, and how they are built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from alto_distributed import ALTO

from .trials import Setting, Trial, on_grid
from .wrong_norms import layouts_of

#: A parameter group, and the factor on the run's rate that it has.
Scaled = tuple[torch.optim.Optimizer, dict[str, Any], float]

VECTORS = (3.0, 1.0, 0.3, 0.1, 0.03)


@dataclass(frozen=True)
class Candidate:
    """An optimizer and its search."""

    label: str
    octaves: float
    """log2 of the first rate to try."""
    build: Callable[[Trial, Mapping[str, list[nn.Parameter]]], list[Scaled]]
    defaults: Mapping[str, float] = field(default_factory=dict)
    """Its own numbers."""
    knobs: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Numbers beside lr that are tuned, each with its ordered values."""

    def start(self, setting: Setting, name: str, vectors: float = 1.0, embeddings: str = "ratio") -> Trial:
        """The trial that its tuning starts from; all of its own numbers are in it."""
        own = tuple(sorted(self.defaults.items()))
        return Trial(setting, name, on_grid(self.octaves), vectors=vectors, embeddings=embeddings, own=own)


def split(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Embeddings, other matrices, and vectors."""
    embeddings = [p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()]
    known = {id(p) for p in embeddings}
    others = [p for p in model.parameters() if id(p) not in known]
    return {
        "embeddings": embeddings,
        "matrices": [p for p in others if p.ndim >= 2],
        "vectors": [p for p in others if p.ndim < 2],
    }


def optimizers(trial: Trial, model: nn.Module) -> list[Scaled]:
    """The optimizers of a trial, by group, with the factor of each group."""
    return CANDIDATES[trial.optimizer].build(trial, split(model))


def _alto(trial: Trial, parts: Mapping[str, list[nn.Parameter]]) -> list[Scaled]:
    numbers = dict(trial.own)
    beta2 = numbers["beta2"]
    beta1, alpha = numbers.get("beta1", 0.99), numbers.get("alpha", 0.0)
    if trial.optimizer == "zero-lag":
        beta1, alpha = beta2, beta2 / (1 - beta2)
    elif trial.optimizer == "nesterov":
        beta1, alpha = 0.0, beta2
    whole = parts["matrices"] + (parts["embeddings"] if trial.embeddings == "ratio" else [])
    plain = parts["embeddings"] if trial.embeddings == "adam" else []
    groups = [
        {"params": whole, "weight_decay": 1e-4},
        {"params": plain, "weight_decay": 1e-4, "decayed": False},
        {"params": parts["vectors"], "weight_decay": 0.0},
    ]
    optimizer = ALTO([g for g in groups if g["params"]], betas=(beta1, beta2, 0.99), alpha=alpha)
    if trial.norms != "exact":
        optimizer.set_layouts(layouts_of(whole, trial.norms, trial.pieces))
    return [(optimizer, g, 1.0 if g["params"][0] is whole[0] else trial.vectors) for g in optimizer.param_groups]


def _elementwise(
    make: Callable[[list[dict[str, Any]], dict[str, float], Trial], torch.optim.Optimizer],
) -> Callable[[Trial, Mapping[str, list[nn.Parameter]]], list[Scaled]]:
    """Of optimizers that treat each element by itself: matrices, embeddings and vectors, with a rate each."""

    def build(trial: Trial, parts: Mapping[str, list[nn.Parameter]]) -> list[Scaled]:
        groups: list[dict[str, Any]] = [
            {"params": parts["matrices"], "weight_decay": 1e-2},
            {"params": parts["embeddings"], "weight_decay": 1e-2},
            {"params": parts["vectors"], "weight_decay": 0.0},
        ]
        numbers = dict(trial.own)
        optimizer = make(groups, numbers, trial)
        factors = (1.0, numbers["embedding_lr"], trial.vectors)
        return [(optimizer, g, f) for g, f in zip(optimizer.param_groups, factors, strict=True)]

    return build


def _adamw(groups: list[dict[str, Any]], n: dict[str, float], trial: Trial) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=trial.lr, betas=(n["beta1"], n["beta2"]))


def _ademamix(groups: list[dict[str, Any]], n: dict[str, float], trial: Trial) -> torch.optim.Optimizer:
    from pytorch_optimizer import AdEMAMix

    betas = (n["beta1"], n["beta2"], n["beta3"])
    # alpha and beta3 grow over the whole run, as its authors do.
    return AdEMAMix(
        groups,
        lr=trial.lr,
        betas=betas,
        alpha=n["alpha"],
        t_alpha_beta3=trial.setting.iterations,
        weight_decouple=True,
    )


def _mars(groups: list[dict[str, Any]], n: dict[str, float], trial: Trial) -> torch.optim.Optimizer:
    from pytorch_optimizer import MARS

    betas = (n["beta1"], n["beta2"])
    return MARS(groups, lr=trial.lr, lr_1d=trial.lr, betas=betas, gamma=n["gamma"], weight_decay_1d=0.0)


def _muon(trial: Trial, parts: Mapping[str, list[nn.Parameter]]) -> list[Scaled]:
    """Muon for the matrices; AdamW, at ``rest`` times the rate, for embeddings and vectors."""
    n = dict(trial.own)
    # This rule for the rate does not ask which dimension is the input's; GPT-2's layers here have it first.
    muon = torch.optim.Muon(
        parts["matrices"],
        lr=trial.lr,
        momentum=n["momentum"],
        weight_decay=1e-2,
        adjust_lr_fn="match_rms_adamw",
    )
    groups: list[dict[str, Any]] = [
        {"params": parts["embeddings"], "weight_decay": 1e-2},
        {"params": parts["vectors"], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=trial.lr, betas=(n["beta1"], 0.99))
    factors = (n["rest"], n["rest"] * trial.vectors)
    rest = [(adamw, g, f) for g, f in zip(adamw.param_groups, factors, strict=True)]
    return [(muon, muon.param_groups[0], 1.0), *rest]


_FAMILY: dict[str, Sequence[float]] = {"vectors": VECTORS}
_BETA1 = (0.5, 0.7, 0.8, 0.9, 0.95)
_BETA2 = (0.9, 0.95, 0.99, 0.999)
#: The family's rule for embeddings and Muon's ``rest`` give these a rate of their own, too.
_EMBEDDINGS = (0.3, 1.0, 3.0, 10.0, 30.0)

CANDIDATES: dict[str, Candidate] = {
    "lamb-0.9": Candidate("LAMB beta2 0.9", -4.5, _alto, {"beta2": 0.9}, _FAMILY),
    "lamb-0.8": Candidate("LAMB beta2 0.8", -4.5, _alto, {"beta2": 0.8}, _FAMILY),
    "lamb": Candidate("LAMB (beta2 tuned)", -4.5, _alto, {"beta2": 0.8}, {**_FAMILY, "beta2": (0.6, 0.7, 0.8, 0.9)}),
    "paper": Candidate("ALTO (paper)", -4.5, _alto, {"alpha": -5.0, "beta1": 0.99, "beta2": 0.9}, _FAMILY),
    "zero-lag": Candidate("ALTO (zero-lag)", -4.5, _alto, {"beta2": 0.9}, {**_FAMILY, "beta2": (0.7, 0.8, 0.9, 0.95)}),
    "nesterov": Candidate("ALTO (Nesterov)", -4.5, _alto, {"beta2": 0.9}, {**_FAMILY, "beta2": (0.7, 0.8, 0.9, 0.95)}),
    "adamw": Candidate(
        "AdamW",
        -7.0,
        _elementwise(_adamw),
        {"beta1": 0.9, "beta2": 0.99, "embedding_lr": 1.0},
        {"embedding_lr": _EMBEDDINGS, "beta1": _BETA1, "beta2": _BETA2, "vectors": VECTORS},
    ),
    "muon": Candidate(
        "Muon with AdamW",
        -5.5,
        _muon,
        {"momentum": 0.95, "beta1": 0.8, "rest": 0.5},
        {"rest": (0.125, 0.25, 0.5, 1.0, 2.0), "momentum": (0.8, 0.9, 0.95), "vectors": VECTORS},
    ),
    "ademamix": Candidate(
        "AdEMAMix",
        -7.5,
        _elementwise(_ademamix),
        {"beta1": 0.9, "beta2": 0.99, "beta3": 0.99, "alpha": 2.0, "embedding_lr": 1.0},
        {
            "embedding_lr": _EMBEDDINGS,
            "alpha": (1.0, 2.0, 5.0),
            "beta3": (0.95, 0.99, 0.999),
            "beta1": _BETA1,
            "vectors": VECTORS,
        },
    ),
    "mars": Candidate(
        "MARS",
        -7.0,
        _elementwise(_mars),
        {"beta1": 0.95, "beta2": 0.99, "gamma": 0.025, "embedding_lr": 1.0},
        {"embedding_lr": _EMBEDDINGS, "beta1": _BETA1, "gamma": (0.0125, 0.025, 0.05, 0.1), "vectors": VECTORS},
    ),
}
FAMILY = ("lamb-0.9", "lamb-0.8", "lamb", "paper", "zero-lag", "nesterov")
PEERS = ("adamw", "muon", "ademamix", "mars")
