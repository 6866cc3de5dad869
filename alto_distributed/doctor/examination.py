"""The whole examination: facts, engines, self-checks, and what is wrong."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from .. import apex
from ..errors import one_line
from . import engines, processes
from .facts import facts, without_home

#: Of the JSON: a number that changes when a key goes or changes its meaning.
FORMAT = 1


def examine(seconds: float) -> dict[str, Any]:
    """Everything that the page says, by stable keys.

    Args:
        seconds: limit of each check.
    """
    found: dict[str, Any] = {"format": FORMAT, **facts()}
    pytorch = engines.pytorch()
    if pytorch["status"] == "refused":
        # Nothing else of this package can be imported.
        found.update(devices=[], engines=[pytorch], checks=[_check("all", "skipped", "torch is too old")])
    else:
        devices, frameworks, rows = _in_processes(seconds)
        accelerators = [device["device"] for device in devices if device["device"] != "cpu"]
        rows += unseen(found, accelerators)
        found.update(devices=devices, engines=[pytorch, *frameworks, engines.training_program(frameworks)], checks=rows)
    found["problems"] = problems(found)
    found["ok"] = not found["problems"]
    cleaned: dict[str, Any] = without_home(found)
    return cleaned


def _in_processes(seconds: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Devices, frameworks and checks: what runs in processes of its own, side by side."""
    with ThreadPoolExecutor(4) as pool:
        try:
            checks = pool.submit(run_checks, seconds)
            ranks = pool.submit(two_ranks, "cpu", seconds)
            frameworks = list(pool.map(lambda which: engines.framework(which, seconds), engines.FRAMEWORKS))
            devices, rows = checks.result()
            rows.append(ranks.result())
            if len(devices) > 2:
                rows.append(two_ranks(devices[1]["device"].partition(":")[0], seconds))
        except BaseException:  # Ctrl-C: the processes do not get it
            processes.interrupted.set()
            raise
    return devices, frameworks, rows


def problems(found: dict[str, Any]) -> list[str]:
    """What is wrong that a user would rely on, a line each, with what to do."""
    lines = [
        f"{engine['name']}: {engine['message']}"
        for engine in found["engines"]
        if engine["status"] == "refused" and engine["name"] != "training program"  # it says what its engines say
    ]
    if found["apex"]["kind"] == "namesake":
        lines.append(f"apex: {apex.ADVICE}")
    return lines + [f"{row['name']}: {row['message']}" for row in found["checks"] if row["status"] == "failed"]


def _check(name: str, status: str, message: str, seconds: float | None = None) -> dict[str, Any]:
    return {"name": name, "status": status, "message": message, "seconds": seconds}


def run_checks(seconds: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The devices, and the checks of one process."""
    (ended,) = processes.run(["checks"], seconds=seconds)
    devices: list[dict[str, Any]] = []
    planned: list[str] = []
    rows: dict[str, dict[str, Any]] = {}
    begun = "devices"
    for record in ended.records:
        devices, planned = record.get("devices", devices), record.get("planned", planned)
        begun = record.get("begun", begun)
        if "name" in record:
            rows[record["name"]] = record
    if ended.problem and begun not in rows:
        rows[begun] = _check(begun, "failed", ended.problem)
    for name in planned:
        rows.setdefault(name, _check(name, "skipped", f"not run, because of {begun}"))
    return devices, list(rows.values())


def two_ranks(device_type: str, seconds: float) -> dict[str, Any]:
    """Two processes that step shards of the same parameters."""
    name = f"two ranks on {device_type}"
    if not torch.distributed.is_available():
        return _check(name, "skipped", "this build of torch has no torch.distributed")
    try:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        # This process holds the store, as torchrun does. The system picks a free port.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    except Exception as error:
        return _check(name, "failed", f"no store for two ranks: {one_line(error)}; allow connections to 127.0.0.1")
    ended = processes.run(*(["rank", str(rank), str(store.port), device_type] for rank in range(2)), seconds=seconds)
    records = [end.records[-1] for end in ended if end.records]
    failed = next((record["message"] for record in records if record["status"] == "failed"), None)
    # A rank that was stopped may have waited for one that crashed.
    ends = sorted((end.problem for end in ended if end.problem), key=lambda said: said.startswith("it did not end"))
    problem = failed or next(iter(ends), None)
    if problem is not None or len(records) < 2:
        advice = "check that processes of this machine reach each other (firewall, host name, GLOO_SOCKET_IFNAME)"
        return _check(name, "failed", f"{problem or 'a rank reported nothing'}; {advice}")
    return _check(name, records[0]["status"], records[0]["message"], max(record["seconds"] for record in records))


def unseen(found: dict[str, Any], accelerators: list[str]) -> list[dict[str, Any]]:
    """GPUs of the machine that torch was built for and does not see."""
    gpus = found["cuda"]["driver_gpus"]
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not gpus or accelerators or hidden or found["torch"]["build"] != "cuda":
        return []
    advice = "look at CUDA_VISIBLE_DEVICES, or install a driver for this CUDA or a torch for this driver"
    said = f"nvidia-smi lists {gpus}, and torch for CUDA {found['cuda']['cuda']} can use none with driver "
    return [_check("GPUs", "failed", f"{said}{found['cuda']['driver']}; {advice}")]
