"""A run's directory belongs to one job at a time.

Two jobs that train in one directory, as when a scheduler starts a job again whose first copy still hangs somewhere,
would delete each other's unfinished checkpoints and mix their records.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

from filelock import FileLock

from .file_lock import Timeout, take

#: Who has the directory, in words.
NAME = ".occupied"

#: Seconds that a job which is about to end may take for it.
PATIENCE = 30.0

#: Those of this process.
_held: dict[Path, FileLock] = {}


def lock_run(directory: Path, patience: float = PATIENCE) -> None:
    """Take a run's directory for as long as this process lives. Called by rank 0.

    Raises:
        ValueError: another process has it, and still had it when ``patience`` seconds were over.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = (directory / NAME).resolve()
    if path in _held:
        return
    try:
        _held[path] = take(path.with_name(f"{NAME}.lock"), patience)
    except Timeout:
        raise ValueError(
            f"{directory} is another job's, which still runs ({_holder(path)}): end that one, or give this one a "
            "directory of its own (--into)"
        ) from None
    with contextlib.suppress(OSError):  # on a full disk the lock holds all the same
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%F %T %Z')}\n")


def _holder(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[:200].strip() or "unknown"
    except OSError:
        return "unknown"
