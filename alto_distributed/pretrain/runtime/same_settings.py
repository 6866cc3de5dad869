"""All ranks of a run have the same settings, and the same data."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...sharding.agreement import require_agreement
from ...sharding.collective import everyone
from ...sharding.rank_sync import run_on_every_rank
from ..config.settings import Run
from ..data import files

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


def same_data(run: Run) -> dict[str, str]:
    """The checksums of the data, which are the same on all ranks. Each directory of each machine is verified once.

    Raises:
        ValueError: on all ranks; names the files that differ, and the ranks, or what is damaged.
    """
    where = run.data.directory
    places = run_on_every_rank(lambda: (socket.gethostname(), str(Path(where).resolve())))
    rank = dist.get_rank()

    def look() -> dict[str, str]:
        if run.data.verify and places.index(places[rank]) == rank:
            files.verify(where, *files.SPLITS)
        return files.fingerprint(where)

    found = run_on_every_rank(look)[rank]
    world = everyone()
    if world is not None:
        require_agreement(world, {f"the checksum of {name} in data.directory": said for name, said in found.items()})
    return found


def _flat(settings: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{where}{key}.")
        else:
            yield f"{where}{key}", repr(value)
