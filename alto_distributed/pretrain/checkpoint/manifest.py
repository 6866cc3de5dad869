"""The manifest of a checkpoint: every file with its size and checksum, who wrote it and what is in it.

It is written last, and names everything else, so a checkpoint without one was not finished, and one whose files are
not as it says has been damaged since. It guards against faults of disks, networks and hands, not against an enemy, who
would write a manifest to match: see :mod:`.trust`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from ...errors import shown
from ..config.parsing import parse_json

NAME = "manifest.json"
_VERSION = 1
_CHUNK = 1 << 20


@dataclass(frozen=True)
class FileRecord:
    """One file."""

    bytes: int
    checksum: str
    """SHA-256: ``sha256sum`` checks it too, and processors have instructions for it."""
    rank: int
    """Who wrote it."""
    states: Mapping[str, str]
    """Tensors in it, their types and shapes."""


@dataclass(frozen=True)
class Manifest:
    step: int
    world_size: int
    versions: Mapping[str, str]
    """Of what wrote it."""
    files: Mapping[str, FileRecord]
    """By path inside the checkpoint."""

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())


def entry_of(path: Path, rank: int, states: Mapping[str, str]) -> FileRecord:
    """Read a file back, and see to it that it is on the disk."""
    with path.open("rb") as file:
        checksum, count = _digest(file)
        os.fsync(file.fileno())
    return FileRecord(count, checksum, rank, states)


def write(directory: Path, manifest: Manifest) -> None:
    """Put a manifest into a checkpoint, and see to it that names and content are on the disk."""
    content = {"version": _VERSION, **asdict(manifest)}
    path = directory / NAME
    with path.open("w") as file:
        json.dump({"checksum": _checksum(content), **content}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for folder in {directory, *(parent for name in manifest.files for parent in (directory / name).parents)}:
        if folder == directory or directory in folder.parents:
            sync_directory(folder)


def read(directory: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        ValueError: there is none, or it is not as it was written.
    """
    try:
        content = parse_json((directory / NAME).read_bytes(), NAME)
    except FileNotFoundError:
        raise ValueError(
            f"{NAME}: missing; it was written by a version before there was one, or not by this program"
        ) from None
    if not isinstance(content, dict):
        raise ValueError(f"{NAME}: cannot be read (it holds a {type(content).__name__}, and should hold an object)")
    checksum = content.pop("checksum", None)
    if checksum != _checksum(content):
        raise ValueError(f"{NAME}: changed since it was written: its checksum is another")
    version = content.pop("version", None)
    if version != _VERSION:
        raise ValueError(f"{NAME}: of version {shown(version)}, and this program reads version {_VERSION}")
    for wrong in _not_as_written(content):
        raise ValueError(f"{NAME}: not written by this program: {wrong}")
    return Manifest(**{**content, "files": {name: FileRecord(**entry) for name, entry in content["files"].items()}})


def _not_as_written(content: Mapping[str, Any]) -> Iterator[str]:
    """What no manifest has, for its checksum can be made by anyone: other fields, other types, files elsewhere."""
    if set(content) != {field.name for field in fields(Manifest)}:
        yield f"it has the fields {shown(sorted(content))}"
    if not _is_count(content["step"]) or not _is_count(content["world_size"]):
        yield "its step and world_size are not numbers"
    if not _is_text(content["versions"]):
        yield "its versions are not text"
    if not isinstance(content["files"], dict):
        yield "its files are not a list by name"
    for name, entry in content["files"].items():
        parts = PurePosixPath(name).parts
        if not name.isprintable() or name.startswith("/") or ".." in parts or not parts:
            yield f"{shown(name)} is not a file inside the checkpoint"
        if not isinstance(entry, dict) or set(entry) != {field.name for field in fields(FileRecord)}:
            yield f"it does not say of {shown(name)} what it should"
        if not (_is_count(entry["bytes"]) and _is_count(entry["rank"]) and isinstance(entry["checksum"], str)):
            yield f"bytes, rank and checksum of {shown(name)} are not numbers and text"
        if not _is_text(entry["states"]):
            yield f"the states of {shown(name)} are not text"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(inner, str) for inner in value.values())


def problems(directory: Path, manifest: Manifest, names: Iterable[str], *, sizes_only: bool = False) -> list[str]:
    """What is wrong with some of the files: missing, truncated, changed or swapped."""
    found = []
    by_checksum = {entry.checksum: name for name, entry in manifest.files.items()}
    for name in names:
        entry = manifest.files[name]
        wrong = _wrong(directory / name, entry, by_checksum, sizes_only)
        if wrong:
            found.append(f"{name}, written by rank {entry.rank}{_holding(entry.states)}: {wrong}")
    return found


def _wrong(path: Path, entry: FileRecord, by_checksum: Mapping[str, str], sizes_only: bool) -> str | None:
    try:
        size = path.stat().st_size
        if size < entry.bytes and (sizes_only or not _is_another(path, by_checksum)):
            return f"truncated: {size:,} bytes instead of {entry.bytes:,}"
        if sizes_only:
            return f"changed: {size:,} bytes instead of {entry.bytes:,}" if size != entry.bytes else None
        with path.open("rb") as file:
            checksum, _ = _digest(file)
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error}"
    if checksum == entry.checksum:
        return None
    if checksum in by_checksum:
        return f"swapped: it holds what {by_checksum[checksum]} should hold"
    size_too = "" if size == entry.bytes else f", and it has {size:,} bytes instead of {entry.bytes:,}"
    return f"changed since it was written: its checksum is another{size_too}"


def _is_another(path: Path, by_checksum: Mapping[str, str]) -> bool:
    with path.open("rb") as file:
        return _digest(file)[0] in by_checksum


def _holding(states: Mapping[str, str]) -> str:
    """ " (exp_avg float32[10], ... and 3 more tensors)" """
    if not states:
        return ""
    shown = [f"{name} {shape}" for name, shape in list(states.items())[:3]]
    more = [f"{len(states) - 3} more"] if len(states) > 3 else []
    return f" ({', '.join([*shown, *more])})"


def _digest(file: Any) -> tuple[str, int]:
    digest, count = hashlib.sha256(), 0
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
        count += len(chunk)
    return digest.hexdigest(), count


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sync_directory(directory: Path) -> None:
    """See to it that names in a directory are on the disk."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def versions() -> dict[str, str]:
    """Of everything that had a part in writing."""
    found = {"torch": str(torch.__version__)}
    for name in ("alto-distributed", "deepspeed", "megatron-core"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
