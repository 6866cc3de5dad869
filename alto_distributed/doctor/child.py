"""What runs in the doctor's processes. Each reports to a file, a line of JSON at a time."""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from ..errors import UnsupportedVersion, one_line
from ..framework_import import advice
from ..sharding.shutdown import leave
from . import benchmark, checks
from .facts import machine_of

Report = Callable[[dict[str, Any]], None]


def main() -> None:
    """``RECORDS checks`` | ``RECORDS rank RANK PORT DEVICE_TYPE`` | ``RECORDS framework FOLDER MODULE PACKAGE``
    | ``RECORDS benchmark``."""
    path, role, *rest = sys.argv[1:]
    with open(path, "a") as file:

        def report(record: dict[str, Any]) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()

        if role == "checks":
            _run_checks(report)
        elif role == "rank":
            rank, port, device_type = rest
            ended = outcome(lambda: checks.sharded_step(int(rank), int(port), device_type))
            report(ended)
            if ended["status"] == "ok":
                leave()  # with a barrier: the other rank may have failed otherwise
        elif role == "benchmark":
            device = benchmark.device_here()
            report({"machine": machine_of(device)})
            for row in benchmark.rows(device):
                report(row)
        else:
            report(ask(*rest))


def _run_checks(report: Report) -> None:
    found = checks.devices()
    report({"devices": found})
    planned = list(checks.planned([device["device"] for device in found]))
    report({"planned": [name for name, _ in planned]})
    for name, check in planned:
        report({"begun": name})
        report({"name": name, **outcome(check)})


def outcome(check: Callable[[], str]) -> dict[str, Any]:
    """Run a check: its status, message and seconds."""
    begin = time.monotonic()
    try:
        status, message = "ok", check()
    except checks.Skipped as reason:
        status, message = "skipped", str(reason)
    except Exception as error:
        status, message = "failed", str(error) if isinstance(error, checks.Wrong) else one_line(error)
    return {"status": status, "message": message, "seconds": round(time.monotonic() - begin, 2)}


def ask(folder: str, module: str, package: str) -> dict[str, Any]:
    """Whether a framework can be used with ALTO, from that framework's own folder here.

    Args:
        folder: "deepspeed" or "megatron".
        module: the framework's module, whose version is told.
        package: its name for pip.
    """
    status, message = "supported", ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            versions = importlib.import_module(f"alto_distributed.{folder}.versions")
            versions.check_version()
            versions.warn_if_untested()
        except UnsupportedVersion as error:
            status, message = "refused", str(error)
        except Exception as error:  # it may fail in any way
            status, message = "refused", f"it cannot be used: {one_line(error)}; {advice(package)}"
    for warning in caught:
        if status == "supported" and "untested" in str(warning.message):
            status, message = "untested", " ".join(str(warning.message).split())
    return {"status": status, "message": message, "version": getattr(sys.modules.get(module), "__version__", None)}
