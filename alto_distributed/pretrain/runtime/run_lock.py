"""A run's directory belongs to one job at a time.

Two jobs that train in one directory, as when a scheduler starts a job again whose first copy still hangs somewhere,
would delete each other's unfinished checkpoints and mix their records.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
import warnings
from pathlib import Path

NAME = ".occupied"

#: Seconds that a job which is about to end may take for it.
PATIENCE = 30.0

#: Those of this process. A lock lasts as long as its file is open, and the kernel closes it however a process ends.
_open: dict[Path, int] = {}


def lock_run(directory: Path, patience: float = PATIENCE) -> None:
    """Take a run's directory for as long as this process lives. Called by rank 0.

    Raises:
        ValueError: another process has it, and still had it when ``patience`` seconds were over.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = (directory / NAME).resolve()
    if path in _open:
        return
    file, until = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), time.monotonic() + patience
    try:
        while not _locked(file, path):
            if time.monotonic() > until:
                owner = os.pread(file, 200, 0).decode(errors="replace").strip() or "unknown"
                raise ValueError(
                    f"{directory} is another job's, which still runs ({owner}): end that one, or give this one a "
                    "directory of its own (--into)"
                )
            time.sleep(0.1)
    except BaseException:
        os.close(file)
        raise
    owner = f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%F %T %Z')}\n"
    with contextlib.suppress(OSError):  # on a full disk the lock holds all the same
        os.ftruncate(file, 0)
        os.pwrite(file, owner.encode(), 0)
    _open[path] = file


def _locked(file: int, path: Path) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        warnings.warn(
            f"the file system of {path} has no locks ({error.strerror}): see to it that no second job runs there",
            stacklevel=3,
        )
    return True
