"""Checkpoints of a pretraining run under Megatron: its ``dist_checkpointing``, with errors that reach all ranks."""

from __future__ import annotations

import contextlib
import queue
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ....safe_load import only_data
from ...checkpoint.io import Written, failing_late, replaced, shape_of
from ...checkpoint.safe_load import refuse_code


def save(state: dict[str, Any], directory: Path, metadata: dict[str, Any]) -> dict[Path, Written]:
    """Write a sharded state dict into an empty directory. Called by all ranks.

    Returns:
        On rank 0 all files with tensors: the index that it writes names them.

    Raises:
        OSError: a rank could not write.
    """
    try:
        # Ranks agree on how their shards were written. The rest is rank 0's.
        own = (
            (TorchCommonSaveStrategy, "save_common"),
            (FileSystemWriterAsync, "finish"),
            (serialization, "save_config"),
        )
        with _without_writer_processes(), failing_late(*own):
            dist_checkpointing.save(state, str(directory), content_metadata=metadata)
    except CheckpointException as error:  # a BaseException
        details = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
        raise OSError(details or "another rank could not write") from error
    if dist.get_rank() != 0:
        return {}
    return {directory / file: Written(_writer_of(file), states) for file, states in _contents(directory).items()}


def _writer_of(file: str) -> int:
    """The rank that wrote a file of shards."""
    writer = re.fullmatch(r"__(\d+)_\d+\.distcp", file)
    return int(writer.group(1)) if writer else 0


@contextlib.contextmanager
def _without_writer_processes() -> Iterator[None]:
    """Each rank writes its shards itself, in threads, as in Megatron-LM's main.

    megatron-core 0.16.1 forks processes for that, and a rank hangs if one of them is killed, as the kernel
    does when memory runs out. We wait for the writing in any case, so they gain nothing.
    """
    ours = (
        (FileSystemWriterAsync, "write_preloaded_data_multiproc", staticmethod(_write_in_threads)),
        (filesystem_async, "_get_write_results_queue", queue.Queue),  # which would be another process's
    )
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in ours:
            if hasattr(owner, name):
                stack.enter_context(replaced(owner, name, replacement))
        yield


def _write_in_threads(
    transforms: Sequence[Any], use_msc: bool, rank: int, buckets: Sequence[Any], results: queue.Queue[Any]
) -> None:
    """Write each bucket with Megatron's own function, and leave what it says, or the first error, in ``results``."""
    said: queue.Queue[tuple[int, Any]] = queue.Queue()
    to_do: queue.Queue[int] = queue.Queue()
    writers = []
    for index, bucket in enumerate(buckets):
        to_do.put(index)
        arguments = (transforms, index, bucket, said, to_do, True)  # True: fsync
        writers.append(threading.Thread(target=FileSystemWriterAsync.write_preloaded_data, args=arguments, daemon=True))
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    outcomes = dict(said.get_nowait() for _ in range(said.qsize()))
    errors = [outcome for outcome in outcomes.values() if isinstance(outcome, Exception)]
    results.put(errors[0] if errors else outcomes)


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
