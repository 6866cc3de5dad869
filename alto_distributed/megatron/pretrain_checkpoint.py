"""Checkpoints of a pretraining run under Megatron: its ``dist_checkpointing``, with errors that reach all ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..pretrain.trust import only_data, refuse_code
from ..pretrain.writing import failing_late, shape_of, wrote


def save(state: dict[str, Any], directory: Path, metadata: dict[str, Any]) -> None:
    """Write a sharded state dict into an empty directory. Called by all ranks.

    Raises:
        OSError: a rank could not write.
    """
    try:
        # Shards are written in processes of their own, and ranks agree on how that went. The rest is rank 0's.
        own = (
            (TorchCommonSaveStrategy, "save_common"),
            (FileSystemWriterAsync, "finish"),
            (serialization, "save_config"),
        )
        with failing_late(*own):
            dist_checkpointing.save(state, str(directory), content_metadata=metadata)
    except CheckpointException as error:  # a BaseException
        details = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
        raise OSError(details or "another rank could not write") from error
    if dist.get_rank() == 0:
        for file, states in _contents(directory).items():
            writer = re.fullmatch(r"__(\d+)_\d+\.distcp", file)
            wrote(directory / file, states, int(writer.group(1)) if writer else 0)


def _contents(directory: Path) -> dict[str, dict[str, str]]:
    """Which tensors, with the shapes of the whole, have pieces in which file: from the index just written."""
    index = FileSystemReader(directory).read_metadata()
    found: dict[str, dict[str, str]] = {}
    for piece, place in (index.storage_data or {}).items():
        about = index.state_dict_metadata.get(piece.fqn)
        if isinstance(about, TensorStorageMetadata):
            shape = shape_of(about.properties.dtype, about.size)
            found.setdefault(place.relative_path, {})[piece.fqn] = shape
    return found


def load(state: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Fill a sharded state dict with what :func:`save` wrote. Called by all ranks.

    Raises:
        ValueError: on all ranks, if a file holds more than data.
    """
    refuse_code(directory, [*directory.glob("**/*.pt"), *directory.glob(".metadata")], ())
    with only_data(()):  # the shards hold pickles too, one an object
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(directory))
    return loaded
