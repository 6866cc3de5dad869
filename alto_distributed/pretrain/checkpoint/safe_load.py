"""Nothing in a checkpoint may run as code.

Checksums do not help: whoever can write a file can write a manifest. So before a framework loads a file, torch's
restricted unpickler reads it (:mod:`alto_distributed.safe_load`); and while the framework loads it, its
``torch.load(weights_only=False)`` is made to be ``weights_only=True``.
"""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist

from ...safe_load import more_than_data, only_data
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
    problems = [problem for of_rank in found for problem in of_rank]
    if problems:
        raise ValueError(
            f"{directory} was not loaded, for it holds more than data: {'; '.join(problems)}. A checkpoint of this "
            "program never does: do not trust where it came from"
        )


def _problem(path: Path) -> str | None:
    if path.name != ".metadata":
        return more_than_data(path)
    try:
        index = _MetadataUnpickler(path).load()
        places = {str(info.relative_path) for info in (index.storage_data or {}).values()}
    except OSError:
        raise
    except Exception as error:
        return f"{path.name} ({str(error).strip().partition(chr(10))[0]})"
    for place in sorted(places):
        if PurePosixPath(place).is_absolute() or ".." in PurePosixPath(place).parts:
            return f"{path.name} (it names {place}, which is not in the checkpoint)"
    return None


class _MetadataUnpickler(pickle.Unpickler):
    """The index that ``torch.distributed.checkpoint`` writes, which torch reads with plain pickle."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.BytesIO(path.read_bytes()))

    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA.get(module, ()) or (module == "torch" and _is_dtype(name)):
            found: Callable[..., Any] = getattr(importlib.import_module(module), name)
            return found
        raise pickle.UnpicklingError(f"{module}.{name}")


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)


#: What may be called while an index is read: classes that hold values, and a function that looks one up.
_METADATA = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata", "TensorStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "pathlib": ("PosixPath",),
    "collections": ("OrderedDict",),
}
