"""All ranks of a run have the same settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...sharding.agreement import require_agreement
from ...sharding.collective import everyone
from ..config.settings import Run

#: Settings that name places: those of a rank's own machine may well be others.
_PLACES = ("data.directory", "deepspeed.config")


def same_settings(run: Run) -> None:
    """All ranks must run the same settings. One small collective.

    Raises:
        ValueError: on all ranks; names the settings that differ, and the ranks.
    """
    world = everyone()
    if world is not None:
        require_agreement(world, {name: said for name, said in _flat(run.as_dict()) if name not in _PLACES})


def _flat(settings: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{where}{key}.")
        else:
            yield f"{where}{key}", repr(value)
