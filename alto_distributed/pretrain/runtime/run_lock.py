"""A run's directory belongs to one job at a time.

Two jobs that train in one directory, as when a scheduler starts a job again whose first copy still hangs somewhere,
would delete each other's unfinished checkpoints and mix their records. The directory itself is locked, and a file in it
for file systems that cannot lock directories.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import warnings
from pathlib import Path

from filelock import FileLock

from ..integrity import make_directories
from .file_lock import Timeout, take, take_directory

#: Who has the directory, in words.
NAME = ".occupied"

#: Seconds that a job which is about to end may take for it.
PATIENCE = 30.0

#: Those of this process, with what was locked for each, by device and inode: the directory and the file.
_held: dict[Path, tuple[FileLock, list[tuple[int, int]]]] = {}
#: Kept, for a lock that is released may delete the file of its name.
_of_deleted_files: list[FileLock] = []


def lock_run(directory: Path, patience: float = PATIENCE) -> None:
    """Take a run's directory for as long as this process lives. Called by rank 0.

    Raises:
        ValueError: another process has it, and still had it when ``patience`` seconds were over.
    """
    make_directories(directory.absolute())
    path = (directory / NAME).resolve()
    if path not in _held:
        _take(directory, path, patience)


def keep_run_lock(directory: Path) -> None:
    """See to it that the directory is still this job's, before anything in it is replaced. Called by rank 0.

    Somebody may have deleted the file, or all of it: the next job then makes and locks others of that name.

    Raises:
        ValueError: another job has it.
    """
    path = (directory / NAME).resolve()
    if path not in _held or _locked(path) == _held[path][1]:
        return
    make_directories(directory.absolute())
    _of_deleted_files.append(_held[path][0])
    _take(directory, path, 0.0)
    warnings.warn(f"{_file(path)} was deleted while this job held it; it is made again", stacklevel=2)


def _take(directory: Path, path: Path, patience: float) -> None:
    try:
        # First: who waits for it must not have the file meanwhile, which its job may be about to make again.
        if path not in _held or _locked(path)[0] != _held[path][1][0]:
            take_directory(path.parent, patience)
        lock = take(_file(path), patience)
    except Timeout:
        raise ValueError(
            f"{directory} is another job's, which still runs ({_holder(path)}): end that one, or give this one a "
            "directory of its own (--into)"
        ) from None
    _held[path] = lock, _locked(path)
    with contextlib.suppress(OSError):  # on a full disk the lock holds all the same
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%F %T %Z')}\n")


def _file(path: Path) -> Path:
    return path.with_name(f"{NAME}.lock")


def _locked(path: Path) -> list[tuple[int, int]]:
    return [_identity(path.parent), _identity(_file(path))]


def _identity(path: Path) -> tuple[int, int]:
    """Which file a name stands for; (0, 0) for none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_dev, status.st_ino


def _holder(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[:200].strip() or "unknown"
    except OSError:
        return "unknown"
