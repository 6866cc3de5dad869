"""``starts.jsonl``: a line for each start of a run, with command, ranks, versions, hardware and settings.

Nothing of the environment is written down: it may hold secrets.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from .checkpoint.manifest import versions
from .config.settings import Run
from .metrics import append

FILE = "starts.jsonl"


def note_start(directory: Path, run: Run, step: int, ranks: int) -> None:
    """Write down a start. A disk that refuses does not end a run."""
    entry = {
        "began": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "step": step,
        "ranks": ranks,
        # Of "python -m alto_distributed", Python keeps the path of the module.
        "command": ["alto" if Path(sys.argv[0]).name == "__main__.py" else sys.argv[0], *sys.argv[1:]],
        "versions": {"python": platform.python_version(), **versions(), **_libraries()},
        "hardware": hardware(),
        "settings": run.as_dict(),
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        append(directory / FILE, json.dumps(entry) + "\n")
    except OSError as error:
        warnings.warn(f"{directory / FILE} cannot be written ({error}); training goes on", stacklevel=2)


def read(directory: Path) -> list[dict[str, Any]]:
    """The starts of a run, oldest first; what is no entry is left out, and an older run has none."""
    found = []
    with contextlib.suppress(OSError):
        for line in (directory / FILE).read_bytes().splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                entry = json.loads(line)
                if isinstance(entry, dict) and isinstance(entry.get("settings"), dict):
                    found.append(entry)
    return found


def hardware() -> dict[str, Any]:
    """Of this machine."""
    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        found["gpus"] = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        found["cuda"] = torch.version.cuda or torch.version.hip
    return found


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _libraries() -> dict[str, str]:
    found = {}
    for name in ("transformers", "numpy", "pytorch_optimizer"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
