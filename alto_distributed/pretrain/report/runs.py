"""What there is to show of a run: its records, its readings by layer, and what it was started with."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import metrics as logs
from .. import readings, starts
from ..checkpoint.manager import HISTORY, Checkpoints, about
from ..config.optimizer_options import NAMES
from ..config.settings import Run

Curve = tuple[list[int], list[float]]


@dataclass(frozen=True)
class RunRecords:
    """The directory of a run."""

    directory: Path

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        return logs.read(self.directory)

    @cached_property
    def readings(self) -> readings.Readings:
        return readings.read(self.directory)

    @cached_property
    def starts(self) -> list[dict[str, Any]]:
        return starts.read(self.directory)

    @property
    def changes(self) -> list[tuple[int, str]]:
        """Settings that were changed on the way (``--resume-with``), and from which step on."""
        found = []
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            for line in (self.directory / HISTORY).read_text().splitlines():
                entry = json.loads(line)
                said = [f"{name} {before} -> {now}" for name, (before, now) in entry["changes"].items()]
                found.append((int(entry["step"]), ", ".join(said)))
        return found

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Of its last start; of its newest checkpoint, if it is older than that; or none."""
        if self.starts:
            settings: Mapping[str, Any] = self.starts[-1]["settings"]
            return settings
        try:
            newest = Checkpoints(self.directory / "checkpoints", Run()).newest()
            return about(newest.path)[0] if newest else {}
        except (OSError, ValueError):
            return {}

    @property
    def optimizer(self) -> str:
        section = self.settings.get("optimizer")
        if isinstance(section, Mapping) and isinstance(section.get("name"), str):
            return str(section["name"])
        return next((name for name in sorted(NAMES, key=len, reverse=True) if name in self.name.lower()), "")

    @property
    def rate(self) -> str:
        """The one that was set or the optimizer's default."""
        section = self.settings.get("optimizer")
        rate = section.get("lr") if isinstance(section, Mapping) else None
        return f"{rate:g}" if isinstance(rate, (int, float)) else "-"

    @property
    def has_diverged(self) -> bool:
        return bool(self.records) and "diverged" in self.records[-1]

    @property
    def is_done(self) -> bool:
        """Whether it has reached its last step."""
        training = self.settings.get("training")
        last = training.get("iterations") if isinstance(training, Mapping) else None
        return any(record["step"] == last and "valid_loss" in record for record in self.records)

    @property
    def skipped(self) -> int:
        """Steps without effect, because a gradient was not finite."""
        return sum(int(record.get("skipped_steps", record.get("skipped", 0))) for record in self.records)

    def curve(self, name: str) -> Curve:
        """A number of the records over the steps, where it is finite."""
        found = [(r["step"], float(r[name])) for r in self.records if name in r and math.isfinite(r[name])]
        return [step for step, _ in found], [value for _, value in found]


@dataclass(frozen=True)
class Place:
    """Where a parameter is in the model."""

    name: str
    layer: int | None
    """None outside of the layers."""
    kind: str
    """Its name inside its layer, or the whole name."""


def place(name: str) -> Place:
    found = re.fullmatch(r"(?:.*\.)?(?:h|layers)\.(\d+)\.(.+)", name)
    short = name.removesuffix(".weight")
    if found is None:
        return Place(short.removeprefix("transformer.").removeprefix("model."), None, short.rpartition(".")[2])
    kind = found[2].removesuffix(".weight")
    return Place(f"{kind} {found[1]}", int(found[1]), kind)


def with_ratio(found: readings.Readings) -> list[str]:
    """The parameters that have had a ratio of their own, in the model's order: those before the layers, and so on."""
    names = list(dict.fromkeys(name for of_step in found.values() for name in of_step))
    moved = [name for name in names if any(s[name].trust_ratio != 1.0 for s in found.values() if name in s)]
    return sorted(moved, key=_order)


def by_kind(names: Sequence[str]) -> dict[str, list[str]]:
    """Parameters in layers, by their kind, each kind in the order of the layers."""
    found: dict[str, list[str]] = {}
    for name in sorted(names, key=_order):
        where = place(name)
        if where.layer is not None:
            found.setdefault(where.kind, []).append(name)
    return found


def grouped(names: Sequence[str]) -> list[str]:
    """The same parameters with each kind together: a kind's layers are alike, and differ by depth."""
    kinds = by_kind(names)
    outside = [name for name in names if place(name).layer is None]
    first = [name for name in outside if _order(name)[0] < 0]
    last = [name for name in outside if name not in first]
    return [*first, *(name for of_kind in kinds.values() for name in of_kind), *last]


def _order(name: str) -> tuple[int, int, str]:
    where = place(name)
    if where.layer is None:
        is_first = any(part in name for part in ("wte", "wpe", "embed"))
        return (-1 if is_first else 1 << 30), 0, name
    return where.layer, _KINDS.index(where.kind) if where.kind in _KINDS else len(_KINDS), name


#: In the order of computation.
_KINDS = (
    *("ln_1", "ln_1.bias", "attn.c_attn", "attn.c_attn.bias", "attn.c_proj", "attn.c_proj.bias"),
    *("ln_2", "ln_2.bias", "mlp.c_fc", "mlp.c_fc.bias", "mlp.c_proj", "mlp.c_proj.bias"),
    *("input_layernorm", "self_attn.qkv_proj", "self_attn.o_proj", "post_attention_layernorm"),
    *("mlp.gate_up_proj", "mlp.down_proj"),
)
