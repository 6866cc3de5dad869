"""A file or a directory that one process holds at a time. The kernel gives it back when that ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import time
import warnings
from pathlib import Path

from filelock import FileLock, Timeout

__all__ = ["Timeout", "take", "take_directory"]

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_POLL = 0.1


def take(path: Path, patience: float = 0.0) -> FileLock:
    """Hold a file until this process ends or the lock is released. On a file system without locks it only warns.

    Args:
        path: of the file, which is made if need be; its directory must exist.
        patience: seconds to wait for a process that has it.

    Raises:
        Timeout: that process still has it.
        OSError: the file cannot be made.
    """
    # Its other kind of lock, a file that exists, would outlive a process that is killed.
    lock = FileLock(path, timeout=patience, poll_interval=_POLL, fallback_to_soft=False)
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in _NO_LOCKS:  # Timeout has none
            raise
        warnings.warn(
            f"the file system of {path} has no locks ({error.strerror}): see to it that no second job runs there",
            stacklevel=3,
        )
    return lock


def take_directory(path: Path, patience: float = 0.0) -> None:
    """Hold a directory itself until this process ends, whatever is deleted in it.

    Some file systems cannot do that, and nothing is held. NFS makes locks of ranges of bytes of them, for which a file
    must be open for writing, and a directory cannot be.

    Raises:
        Timeout: another process still has it.
    """
    handle, until = os.open(path, os.O_RDONLY | os.O_DIRECTORY), time.monotonic() + patience
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                os.close(handle)
                raise Timeout(str(path)) from None
            time.sleep(_POLL)
        except OSError:
            os.close(handle)
            return
        else:
            return  # the handle stays open, and with it the lock
