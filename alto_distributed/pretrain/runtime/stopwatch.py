"""How long the parts of a step take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch


class Stopwatch:
    """Adds up the seconds of named parts; on an accelerator with events, so that it need not wait for each part to end.

    Args:
        device: where the parts run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Any, Any]] = []

    @contextlib.contextmanager
    def measuring(self, part: str) -> Iterator[None]:
        start = self._now()
        yield
        self._marks.append((part, start, self._now()))

    def seconds(self) -> dict[str, float]:
        """Of each part so far. Waits for the device."""
        on_host = self._device.type == "cpu"
        if not on_host:
            torch.accelerator.synchronize(self._device)
        parts: dict[str, float] = {}
        for part, start, end in self._marks:
            taken = end - start if on_host else start.elapsed_time(end) / 1000
            parts[part] = parts.get(part, 0.0) + taken
        return parts

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        mark = torch.Event(self._device, enable_timing=True)
        mark.record(torch.accelerator.current_stream(self._device))
        return mark
