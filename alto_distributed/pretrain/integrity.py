"""Files that are written whole and checked before they are used: for the manifests of prepared data and of checkpoints.

A manifest names files with their sizes and checksums. It is written last, so a directory without one was not finished,
and a file that is not as its manifest says has been damaged since. That guards against faults of disks, networks and
hands, not against an enemy, who would write a manifest to match: see :mod:`.checkpoint.safe_load`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = "manifest.json"

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Content:
    """What a file should hold."""

    bytes: int
    checksum: str
    """SHA-256: ``sha256sum`` checks it too, and processors have instructions for it."""


def checksum(path: str | Path) -> str:
    """Of a file."""
    return content_of(path).checksum


def content_of(path: str | Path) -> Content:
    """What a file holds."""
    digest, count = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            count += len(chunk)
    return Content(count, digest.hexdigest())


def damage(
    path: Path, expected: Content, names: Mapping[str, str] | None = None, *, sizes_only: bool = False
) -> str | None:
    """What is wrong with a file: missing, truncated, changed or swapped; None if nothing is.

    Args:
        path: of the file.
        expected: what it should hold.
        names: checksum -> name of the files that it may have been swapped with.
        sizes_only: do not read it.
    """
    names = names or {}
    try:
        size = path.stat().st_size
        changed_size = f"{size:,} bytes instead of {expected.bytes:,}"
        if sizes_only:
            kind = "truncated" if size < expected.bytes else "changed"
            return None if size == expected.bytes else f"{kind}: {changed_size}"
        found = checksum(path)
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error}"
    if found == expected.checksum:
        return None
    if found in names:
        return f"swapped: it holds what {names[found]} should hold"
    if size < expected.bytes:
        return f"truncated: {changed_size}"
    size_too = "" if size == expected.bytes else f", and it has {changed_size}"
    return f"changed since it was written: its checksum is another{size_too}"


def checksum_of_json(content: Any) -> str:
    """Of what a manifest says, for the manifest itself to hold."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_json(path: Path, content: Any) -> None:
    """Write beside, then rename: a file of this name is whole."""
    beside = path.with_name(f"beside-{os.getpid()}-{path.name}")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    sync(beside)
    beside.replace(path)


def sync(path: Path) -> None:
    """Wait until the disk has a file's content, or a directory's names, so that no loss of power can undo them."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directories(path: Path) -> None:
    """Make a directory with those above it, and see to it that the disk has their names, each in the one above."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        with contextlib.suppress(OSError):  # one may be entered without being read
            sync(folder.parent)


def is_count(value: Any) -> bool:
    """Whether a value of a manifest is a number of bytes, tokens or the like."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
