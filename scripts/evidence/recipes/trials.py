"""What one run is: a model, a batch, a length, an optimizer with its numbers, and a seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

#: Tuning uses the first seed and the validation text; verdicts use the others and the test text.
TUNING_SEED = 1
JUDGED_SEEDS = (11, 12, 13, 14, 15)

#: By name: GPT-2's shape, and samples of each of the two evaluations.
MODELS: dict[str, dict[str, Any]] = {
    "43k": {"layers": 2, "hidden": 32, "heads": 2, "sequence": 32, "vocabulary": 512},
    "1M": {"layers": 4, "hidden": 128, "heads": 4, "sequence": 128, "vocabulary": 2048},
}
HELD_OUT = {"43k": 1024, "1M": 256}


@dataclass(frozen=True)
class Setting:
    """What is trained, and how much."""

    model: str
    batch: int
    iterations: int

    def __str__(self) -> str:
        return f"{self.model}, {self.batch} x {self.iterations}"


_FIELDS = ("lr", "vectors", "embeddings")


@dataclass(frozen=True)
class Trial:
    """One run."""

    setting: Setting
    optimizer: str
    """A key of :data:`.candidates.CANDIDATES`."""
    lr: float
    vectors: float = 1.0
    """Factor on lr for tensors of fewer than two dimensions, and for embeddings under "adam"."""
    embeddings: str = "ratio"
    """"ratio": with the layer-wise ratio, as other matrices; "adam": without. Of LAMB and ALTO alone."""
    own: tuple[tuple[str, float], ...] = ()
    """Numbers of the optimizer's own that differ from its defaults, sorted by name."""
    norms: str = "exact"
    """Of whole parameters; or a way to get them wrong, see :mod:`.wrong_norms`."""
    pieces: int = 1
    seed: int = TUNING_SEED

    def knob(self, name: str) -> Any:
        return getattr(self, name) if name in _FIELDS else dict(self.own)[name]

    def with_knob(self, knob: str, value: Any) -> Trial:
        """With another value of one of its fields or of its own numbers."""
        if knob in _FIELDS:
            return replace(self, **{knob: value})
        return replace(self, own=tuple(sorted({**dict(self.own), knob: value}.items())))

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "own": dict(self.own)}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Trial:
        return cls(**{**told, "setting": Setting(**told["setting"]), "own": tuple(sorted(told["own"].items()))})


def on_grid(octaves: float) -> float:
    """The rate 2**octaves to six digits; half-octaves make the grid of all rates."""
    return float(f"{2.0**octaves:.6g}")
