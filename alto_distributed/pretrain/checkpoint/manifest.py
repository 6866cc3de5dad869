"""The manifest of a checkpoint: every file with its size and checksum, who wrote it and what is in it.

See :mod:`..integrity` for what it guards against.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from ...errors import shown
from ..config.parsing import parse_json
from ..integrity import NAME, Content, checksum_of_json, content_of, damage, is_count, sync, write_json

__all__ = ["NAME", "FileRecord", "Manifest", "entry_of", "problems", "read", "versions", "write"]

_VERSION = 1


@dataclass(frozen=True)
class FileRecord(Content):
    """One file."""

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
    found = content_of(path)
    sync(path)
    return FileRecord(found.bytes, found.checksum, rank, states)


def write(directory: Path, manifest: Manifest) -> None:
    """Put a manifest into a checkpoint, and see to it that names and content are on the disk."""
    content = {"version": _VERSION, **asdict(manifest)}
    write_json(directory / NAME, {"checksum": checksum_of_json(content), **content})
    for folder in {directory, *(parent for name in manifest.files for parent in (directory / name).parents)}:
        if folder == directory or directory in folder.parents:
            sync(folder)


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
    if checksum != checksum_of_json(content):
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
    if not is_count(content["step"]) or not is_count(content["world_size"]):
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
        if not (is_count(entry["bytes"]) and is_count(entry["rank"]) and isinstance(entry["checksum"], str)):
            yield f"bytes, rank and checksum of {shown(name)} are not numbers and text"
        if not _is_text(entry["states"]):
            yield f"the states of {shown(name)} are not text"


def _is_text(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(inner, str) for inner in value.values())


def problems(directory: Path, manifest: Manifest, names: Iterable[str], *, sizes_only: bool = False) -> list[str]:
    """What is wrong with some of the files, who wrote them, and what was in them."""
    found = []
    by_checksum = {entry.checksum: name for name, entry in manifest.files.items()}
    for name in names:
        entry = manifest.files[name]
        wrong = damage(directory / name, entry, by_checksum, sizes_only=sizes_only)
        if wrong:
            found.append(f"{name}, written by rank {entry.rank}{_holding(entry.states)}: {wrong}")
    return found


def _holding(states: Mapping[str, str]) -> str:
    """ " (exp_avg float32[10], ... and 3 more tensors)" """
    if not states:
        return ""
    shown = [f"{name} {shape}" for name, shape in list(states.items())[:3]]
    more = [f"{len(states) - 3} more"] if len(states) > 3 else []
    return f" ({', '.join([*shown, *more])})"


def versions() -> dict[str, str]:
    """Of everything that had a part in writing."""
    found = {"torch": str(torch.__version__)}
    for name in ("alto-distributed", "deepspeed", "megatron-core"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
