"""What a command shows of the package's log: plain lines, above progress bars.

Only commands set this up. Whoever calls :func:`alto_distributed.pretrain.trainer.train` from a program of their own
configures ``logging`` as they like.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

from tqdm import tqdm

#: The parent of all loggers of the package.
LOGGER = logging.getLogger("alto_distributed")


class _Lines(logging.Handler):
    """Information on stdout, warnings on stderr. Raises OSError if the terminal or the file refuses."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stdout if record.levelno < logging.WARNING else sys.stderr
        tqdm.write(self.format(record), file=stream)
        stream.flush()


@contextlib.contextmanager
def log_lines() -> Iterator[None]:
    """Show the log while a command runs."""
    if any(isinstance(handler, _Lines) for handler in LOGGER.handlers):
        yield
        return
    handler, before = _Lines(), (LOGGER.level, LOGGER.propagate)
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False  # frameworks put handlers on the root, which would say everything twice
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(before[0])
        LOGGER.propagate = before[1]
