"""Nothing in a checkpoint may run as code.

Checksums do not help: whoever can write a file can write a manifest. So before a framework loads a file, torch's
restricted unpickler reads it (:mod:`alto_distributed.safe_load`); and while the framework loads it, its
``torch.load(weights_only=False)`` is made to be ``weights_only=True``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from ...safe_load import more_than_data, only_data, read_index
from ...sharding.rank_sync import run_on_every_rank
from ...torch_version import OLDEST_THAT_LOADS_SAFELY, check_torch

check_torch(str(torch.__version__), OLDEST_THAT_LOADS_SAFELY, "the pretraining program")


def refuse_code(directory: Path, files: Iterable[Path], classes: Sequence[type]) -> None:
    """Look into pickles before anyone loads them, each rank into some. Called by all ranks.

    Args:
        directory: the checkpoint, for the message.
        files: of ``torch.save``, or plain pickles of ``torch.distributed.checkpoint`` (``.metadata``).
        classes: what may be in them beside tensors and containers.

    Raises:
        ValueError: on all ranks, if one of them holds anything else.
    """
    share = sorted(files)[dist.get_rank() :: dist.get_world_size()]
    with only_data(classes):
        found = run_on_every_rank(lambda: [problem for path in share if (problem := _problem(path))])
    _refuse(directory, [problem for of_rank in found for problem in of_rank])


def refuse_code_alone(directory: Path, files: Iterable[Path], classes: Sequence[type]) -> None:
    """:func:`refuse_code` in a process without ranks."""
    with only_data(classes):
        _refuse(directory, [problem for path in sorted(files) if (problem := _problem(path))])


def _refuse(directory: Path, problems: Sequence[str]) -> None:
    if problems:
        raise ValueError(
            f"{directory} was not loaded, for it holds more than data: {'; '.join(problems)}. A checkpoint of this "
            "program never does: do not trust where it came from"
        )


def _problem(path: Path) -> str | None:
    if path.name != ".metadata":
        return more_than_data(path)
    try:
        read_index(path)
    except ValueError as error:
        return f"{path.name} ({error})"
    return None
