"""What a resumed run has changed, what it may change if it says so (``--resume-with``), and the history of that."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import did_you_mean, shown
from ..config.optimizer_options import ALTO_NAMES
from ..config.settings import Run
from ..metrics import append

#: What a resumed run may change without a word.
_FREE = (
    *("logs", "evaluation", "checkpoints", "deepspeed", "megatron", "data.directory", "data.verify"),
    *("training.micro_batch", "training.recompute", "training.timeout"),
    "optimizer.preset",  # what it stands for is in the options, and is compared
)

#: What it may change with ``--resume-with``; anything else would make it another run.
_CHANGEABLE = (
    *("training.iterations", "training.clip", "training.max_skipped"),
    *("optimizer.lr", "optimizer.weight_decay", "schedule"),
)
MAY_CHANGE = ", ".join(_CHANGEABLE)


@dataclass(frozen=True)
class Change:
    """A setting that is another than before."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name} was {shown(self.before)}, is {shown(self.now)}"


def names_of(overrides: Sequence[str]) -> list[str]:
    """The settings that ``--resume-with`` names.

    Raises:
        ValueError: a run cannot change one of them.
    """
    names = [override.partition("=")[0].strip() for override in overrides]
    for name in names:
        if not is_named(name, (*_CHANGEABLE, *_FREE)):
            raise ValueError(
                f"--resume-with {name}: a run does not change that on its way{did_you_mean(name, _CHANGEABLE)} (it may "
                f"change: {MAY_CHANGE}); start another run (--into)"
            )
    return names


def is_named(name: str, settings: Collection[str]) -> bool:
    """Whether a setting, or a section that it is in, is among some."""
    return any(name == setting or name.startswith(f"{setting}.") for setting in settings)


def changed(saved: Mapping[str, Any], here: Mapping[str, Any], where: str = "") -> Iterator[Change]:
    """Everything that is another than it was, but what is free to change."""
    for key in sorted({*saved, *here}):
        name = f"{where}{key}"
        before, now = saved.get(key), here.get(key)
        if name in _FREE or before == now:
            continue
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            yield from changed(before, now, f"{name}.")
        else:
            yield Change(name, before, now)


def differences(saved: Mapping[str, Any], here: Mapping[str, Any], meant: Collection[Change] = ()) -> Iterator[str]:
    """ "training.seed was 1, is 2" for everything that a resumed run must not change."""
    yield from (str(change) for change in changed(saved, here) if change not in meant)


def check_changes(run: Run, meant: Sequence[Change], step: int) -> None:
    """Refuse changes whose values make no sense for a run that has done ``step`` steps.

    Raises:
        ValueError: on all ranks alike.
    """
    for change in meant:
        if change.name == "training.iterations" and run.training.iterations < step:
            raise ValueError(f"training.iterations={run.training.iterations}: the run has done {step} steps already")
        has_ratio = run.optimizer.name in ALTO_NAMES
        if change.name == "optimizer.weight_decay" and has_ratio and bool(change.before) != bool(change.now):
            raise ValueError(
                f"{change}: what is decayed has the layer-wise ratio, so decay cannot be turned on or off on the way; "
                "start another run (--into)"
            )


def note_changes(path: Path, step: int, meant: Sequence[Change]) -> None:
    """Add a line to a run's history, unless the same is its last. A disk that refuses does not end a run."""
    about = {"step": step, "changes": {change.name: [change.before, change.now] for change in meant}}
    try:
        last = json.loads(path.read_text().splitlines()[-1])
        is_there = {key: last[key] for key in about} == json.loads(json.dumps(about))
    except (OSError, ValueError, LookupError, TypeError):  # there is none, or it is damaged: it is only read by people
        is_there = False
    if not is_there:
        try:
            append(path, json.dumps({"time": time.strftime("%FT%T%z"), **about}) + "\n")
        except OSError as error:
            warnings.warn(f"{path} cannot be written ({error}); training goes on", stacklevel=2)
