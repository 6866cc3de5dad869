"""A file that one process holds at a time. The kernel gives it back when the process ends, however that ends."""

from __future__ import annotations

import errno
import warnings
from pathlib import Path

from filelock import FileLock, Timeout

__all__ = ["Timeout", "take"]

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


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
    lock = FileLock(path, timeout=patience, poll_interval=0.1, fallback_to_soft=False)
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
