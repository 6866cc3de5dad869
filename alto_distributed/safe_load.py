"""Loading files of ``torch.save`` and of ``torch.distributed.checkpoint`` without running code from them.

Both write pickles, and a pickle can name any function and have it called. torch's restricted unpickler
(``weights_only=True``) takes tensors, containers and the classes that it is told of, and calls nothing else. The index
of a checkpoint, which torch reads with plain pickle, is read here, by an unpickler that is as strict.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import torch

from .errors import one_line

_FORCE, _FORCE_NOT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


@contextlib.contextmanager
def only_data(classes: Sequence[Any]) -> Iterator[None]:
    """Every ``torch.load`` in here takes tensors, containers and these classes, and refuses the rest.

    Also one that asks for ``weights_only=False``, as frameworks do, and those of processes that are forked in here.
    """
    before = {name: os.environ.pop(name, None) for name in (_FORCE, _FORCE_NOT)}
    os.environ[_FORCE] = "1"
    # At its end a block takes out what it has put in, also where the block around it had put in the same.
    known = list(torch.serialization.get_safe_globals())
    try:
        with torch.serialization.safe_globals([c for c in classes if c not in known]):
            yield
    finally:
        del os.environ[_FORCE]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def more_than_data(path: Path) -> str | None:
    """What a file of ``torch.save`` holds that :func:`only_data` refuses; None if it is data. Call it in there.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        # On the meta device no tensor is read, only what says which tensors there are.
        torch.load(path, map_location="meta", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        return f"{path.name} ({_names(path) or str(error).strip().partition(chr(10))[0]})"
    return None


def _names(path: Path) -> str:
    """The functions and classes that it asks for."""
    try:
        return ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path)))
    except Exception:  # it may not even be a file of torch.save
        return ""


# -- the index of torch.distributed.checkpoint -----------------------------------------------------------


def read_index(path: Path) -> Any:
    """The index (``.metadata``) of a checkpoint: values, which name files inside that checkpoint alone.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not one, or holds more than values; the message does not name it.
    """
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    content = path.read_bytes()
    try:
        strict = _StrictUnpickler(io.BytesIO(content))
        strict.load()
        if max(strict.memo, default=0) > len(content):  # Python in C makes room for all places below one that is named
            raise pickle.UnpicklingError(f"it asks for place {max(strict.memo)} of a memory of {len(content)}")
        index = _IndexUnpickler(io.BytesIO(content)).load()  # as torch will read the same bytes
    except Exception as error:  # of any type: the bytes may be anything
        raise ValueError(one_line(error)) from None
    if not isinstance(index, Metadata):
        raise ValueError(f"it is a {type(index).__name__}, not an index")
    for name, kind in (("state_dict_metadata", str), ("storage_data", MetadataIndex)):
        entries = getattr(index, name, None)
        if not isinstance(entries, dict) or not all(isinstance(key, kind) for key in entries):
            raise ValueError(f"its {name} is a {type(entries).__name__}, not a dictionary by {kind.__name__}")
    for place in (getattr(info, "relative_path", None) for info in index.storage_data.values()):
        if not isinstance(place, str):
            raise ValueError("it has the name of a file that is not a string")
        if PurePosixPath(place).is_absolute() or ".." in PurePosixPath(place).parts:
            raise ValueError(f"it names {place}, which is not in the checkpoint")
    return index


class _IndexUnpickler(pickle.Unpickler):
    """Calls nothing but what an index needs."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _OF_AN_INDEX.get(module, ()) or (module == "torch" and _is_dtype(name)):
            found: Callable[..., Any] = getattr(importlib.import_module(module), name)
            return found
        raise pickle.UnpicklingError(f"{module}.{name}")


_InPython: Any = pickle._Unpickler


class _StrictUnpickler(_InPython):  # type: ignore[misc]
    """And changes nothing but what it has made. Python's unpickler in Python, which lets itself be looked into."""

    find_class = _IndexUnpickler.find_class

    def load_build(self) -> None:
        """Only values get attributes. On a class or a member of an enumeration they would stay in this process."""
        target = self.stack[-2]
        if isinstance(target, type) or not dataclasses.is_dataclass(target):
            raise pickle.UnpicklingError(f"attributes for a {type(target).__name__}")
        super().load_build()

    def load_bytearray8(self) -> None:
        """It would make room for a length that the file names."""
        raise pickle.UnpicklingError("a bytearray")

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        **_InPython.dispatch,
        pickle.BUILD[0]: load_build,
        pickle.BYTEARRAY8[0]: load_bytearray8,
    }


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)


#: What may be called while an index is read: classes that hold values, and a function that looks one up.
_OF_AN_INDEX = {
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
