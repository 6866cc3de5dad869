"""Processes that the doctor starts. One that hangs or crashes is stopped and reported."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# The child imports from where this process does.
PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
from alto_distributed.doctor.child import main
main()
"""
# Seconds that the other ranks have to report when one has failed.
GRACE = 3.0
_POLL = 0.02

#: Set when the doctor is interrupted: all processes are stopped.
interrupted = threading.Event()


class Ended(NamedTuple):
    """How a process ended."""

    records: list[dict[str, Any]]
    """What it reported, in order."""
    problem: str | None
    """Why it did not end by itself and well."""


def run(*roles: Sequence[str], seconds: float) -> list[Ended]:
    """Run processes side by side until all have ended.

    Args:
        roles: the arguments of each (see :mod:`.child`).
        seconds: all are stopped when none of them has reported anything for so long.
    """
    with tempfile.TemporaryDirectory(prefix="alto_distributed-") as directory:
        children: list[_Child] = []
        try:
            for place, role in enumerate(roles):
                children.append(_Child(Path(directory, str(place)), role))
            _wait(children, seconds)
        finally:
            for child in children:
                child.stop()
        return [child.ended(seconds) for child in children]


def _wait(children: Sequence[_Child], seconds: float) -> None:
    sizes, since = [0] * len(children), time.monotonic()
    while any(child.process.poll() is None for child in children):
        now = [child.reported() for child in children]
        if now != sizes:
            sizes, since = now, time.monotonic()
        failed = any(child.process.poll() for child in children)
        if time.monotonic() - since > (min(GRACE, seconds) if failed else seconds):
            return
        if interrupted.wait(_POLL):
            return


class _Child:
    def __init__(self, base: Path, role: Sequence[str]) -> None:
        self._records, self._output = base.with_suffix(".records"), base.with_suffix(".output")
        self._records.touch()
        command = [sys.executable, "-c", PROGRAM, json.dumps(sys.path), str(self._records), *role]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._stopped = False

    def reported(self) -> int:
        return self._records.stat().st_size

    def stop(self) -> None:
        """Stop it with all that it has started."""
        self._stopped = self.process.poll() is None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()
        self.process.wait()

    def ended(self, seconds: float) -> Ended:
        # The last line is not whole if the process was stopped while it wrote.
        lines = [line for line in self._records.read_text().splitlines(keepends=True) if line.endswith("\n")]
        problem = None
        if self._stopped:
            problem = f"it did not end within {seconds:g} s"
        elif self.process.returncode:
            problem = f"its process ended with {_name_of(self.process.returncode)}{self._last_words()}"
        return Ended([json.loads(line) for line in lines], problem)

    def _last_words(self) -> str:
        lines = [line for line in self._output.read_text(errors="replace").splitlines() if line.strip()]
        return f": {lines[-1].strip()[:300]}" if lines else ""


def _name_of(code: int) -> str:
    try:
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    except ValueError:
        return f"signal {-code}"
