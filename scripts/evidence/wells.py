"""The two functions of one variable: small minima to leave, and sharp ones to pass by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from alto_distributed import ALTO, E

from .landscapes import Function, Maker, f1, f2, follow, top_eigenvalues
from .study import Claim, verdict

BETA1 = 0.99
PAIRS = {"SGD": "ESGD", "Adam": "EAdam", "LAMB": "ALTO"}


@dataclass(frozen=True)
class Well:
    """A function and the paper's settings for it."""

    name: str
    function: Function
    start: float
    alpha: float
    adam_beta: float
    """Of Adam's first moment. The paper gives Adam another than ALTO."""
    beta2: float
    """Of ALTO's and the other adapted optimizers' first moment."""
    rates: tuple[float, ...]
    """The paper gives none."""
    window: tuple[float, float]


RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
F1 = Well("f1", f1, 2.3, alpha=-80.0, adam_beta=0.95, beta2=0.95, rates=RATES, window=(2.0, 200.0))
F2 = Well("f2", f2, 0.95, alpha=-90.0, adam_beta=0.9999, beta2=0.9, rates=RATES, window=(-1.0, 1.0))


@dataclass
class Paths:
    """All optimizers' paths on one function."""

    well: Well
    rates: tuple[float, ...]
    points: dict[str, torch.Tensor]
    """Optimizer -> steps x rates."""
    rows: list[dict[str, Any]]

    def settings(self) -> dict[str, Any]:
        w = self.well
        return {"start": w.start, "alpha": w.alpha, "beta of Adam": w.adam_beta, "beta2": w.beta2, "rates": self.rates}

    def end(self, optimizer: str) -> torch.Tensor:
        """The lowest of the last tenth of the path, at each rate: LAMB and ALTO swing at a constant rate."""
        points = self.points[optimizer]
        tail = points[-len(points) // 10 :]
        values = self.well.function(tail[..., None]).nan_to_num(nan=torch.inf)
        return tail.gather(0, values.argmin(dim=0, keepdim=True))[0]

    def value(self, optimizer: str) -> torch.Tensor:
        return self.well.function(self.end(optimizer)[:, None])


def makers(well: Well) -> dict[str, Maker]:
    def lamb(alpha: float) -> Maker:
        return lambda groups: ALTO(
            groups, alpha=alpha, betas=(BETA1, well.beta2, 0.99), weight_decay=0.0, layerwise="all"
        )

    return {
        "SGD": lambda groups: torch.optim.SGD(groups, momentum=0.9),
        "ESGD": lambda groups: E(torch.optim.SGD(groups, momentum=0.9), alpha=well.alpha, beta1=BETA1),
        "Adam": lambda groups: torch.optim.Adam(groups, betas=(well.adam_beta, 0.99)),
        "EAdam": lambda groups: E(torch.optim.Adam(groups, betas=(well.beta2, 0.99)), alpha=well.alpha, beta1=BETA1),
        "LAMB": lamb(0.0),
        "ALTO": lamb(well.alpha),
    }


def study_well(well: Well, steps: int, rates: tuple[float, ...]) -> Paths:
    starts = [(well.start,)] * len(rates)
    points = {
        name: follow(well.function, starts, maker, steps, rates, shift=0.0)[..., 0]
        for name, maker in makers(well).items()
    }
    paths = Paths(well, rates, points, [])
    for name in points:
        ends = paths.end(name)
        adapted = name in PAIRS.values()
        paths.rows.append(
            {
                "function": well.name,
                "optimizer": name,
                "alpha": well.alpha if adapted else 0.0,
                "rho": -well.alpha * (1 - BETA1) if adapted else 0.0,
                "lr": ", ".join(f"{rate:g}" for rate in rates),
                "flattest": top_eigenvalues(well.function, ends[:, None]).median().item(),
                "last": paths.value(name).median().item(),
                "ends at": ", ".join(f"{end:.3g}" for end in ends.tolist()),
            }
        )
    return paths


def well_claims(both: list[Paths]) -> list[Claim]:
    slope, wells = both
    return [_leaves_small_minima(slope), _passes_sharp_minima(wells)]


def _leaves_small_minima(slope: Paths) -> Claim:
    """For ALTO both the paper's opponent, Adam, and its own plain form, LAMB."""
    contests = [("ALTO", "Adam"), ("ALTO", "LAMB"), ("EAdam", "Adam"), ("ESGD", "SGD")]
    wins = [(slope.value(ours) < slope.value(theirs) - 1e-3).sum().item() for ours, theirs in contests]
    total = len(slope.rates)
    told = ", ".join(
        f"{ours} below {theirs} at {won} of {total}" for (ours, theirs), won in zip(contests, wins, strict=True)
    )
    return Claim(
        "On f1 ALTO leaves small local minima that hold Adam, and finds lower ones.",
        "appendix, different optimization test functions",
        verdict([won > total / 2 for won in wins]),
        f"Value at the end, over the learning rates {', '.join(f'{r:g}' for r in slope.rates)}: {told}.",
    )


def _passes_sharp_minima(wells: Paths) -> Claim:
    total = len(wells.rates)
    flat = {name: (wells.end(name).abs() < 0.2).sum().item() for name in ("Adam", "EAdam", "LAMB", "ALTO")}
    told = ", ".join(f"{name} at {count} of {total}" for name, count in flat.items())
    return Claim(
        "On f2 ALTO passes the sharp minimum and ends in the flat one, where Adam stays in the sharp one.",
        "appendix, different optimization test functions",
        verdict([flat["ALTO"] > total / 2, flat["ALTO"] > flat["Adam"], flat["ALTO"] > flat["LAMB"]]),
        f"Ended in the flat minimum at 0, over the learning rates {', '.join(f'{r:g}' for r in wells.rates)}: {told}. "
        "To hold, ALTO must end there at most rates, and at more of them than Adam and LAMB.",
    )
