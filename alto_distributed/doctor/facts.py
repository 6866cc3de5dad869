"""What is installed and what the machine is like. Devices are asked for elsewhere (:mod:`.checks`): that may hang."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .. import apex

#: Packages whose versions are told beside torch's: as they are called, and as pip knows them.
PACKAGES = {
    "triton": ("triton", "pytorch-triton", "triton-rocm", "pytorch-triton-rocm", "triton-windows"),
    "deepspeed": ("deepspeed",),
    "megatron-core": ("megatron-core",),
    "transformer-engine": ("transformer-engine", "transformer_engine_torch"),
    "numpy": ("numpy",),
}


def facts() -> dict[str, Any]:
    """Everything, by stable keys."""
    return {
        "alto_distributed": own_version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch_facts(),
        "packages": {name: installed(*names) for name, names in PACKAGES.items()},
        "apex": apex_facts(),
        "cuda": cuda_facts(),
        "compiler": compiler_facts(),
        "threads": {
            "cores": cores(),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
            "torch": torch.get_num_threads(),
        },
        "huge_pages": huge_pages(),
    }


def own_version() -> str:
    # With a torch that is too old, the package has not got as far as its version.
    found = getattr(sys.modules[__package__.partition(".")[0]], "__version__", None)
    return str(found or installed("alto-distributed") or "unknown")


def installed(*names: str) -> str | None:
    """The version of the first of these packages that pip knows."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def version_at(package: str, place: str) -> str | None:
    """The version of a package, if the one that pip knows is the one that lies at ``place``."""
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    return found.version if Path(place).is_relative_to(Path(str(found.locate_file("")))) else None


def torch_facts() -> dict[str, Any]:
    """Version, build and vendor."""
    version = str(torch.__version__)
    builds = {"rocm": torch.version.hip, "cuda": torch.version.cuda, "xpu": getattr(torch.version, "xpu", None)}
    build = next((name for name, found in builds.items() if found), "cpu")
    vendor = re.search(r"\+.*?(nv\d[\w.]*)", version)
    return {
        "version": version,
        "build": build,
        "toolkit": builds.get(build),
        "vendor": vendor.group(1) if vendor else None,
        "from": shown_path(torch.__file__),
    }


def apex_facts() -> dict[str, Any]:
    """Whose apex it is."""
    place = apex.origin()
    if place is None:
        return {"kind": None, "version": None, "from": None}
    return {
        "kind": "namesake" if apex.is_namesake() else "nvidia",
        "version": installed("apex"),
        "from": shown_path(place),
    }


def cuda_facts() -> dict[str, Any]:
    """CUDA's or ROCm's version is that which torch was built for; driver and number of GPUs are the machine's."""
    found: dict[str, Any] = {"cuda": torch.version.cuda, "rocm": torch.version.hip, "nccl": None}
    if torch.version.cuda or torch.version.hip:
        try:
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        except Exception:  # a build without it
            found["nccl"] = None
    rows = [row.split(",") for row in _output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])]
    found["driver"] = rows[0][0].strip() if rows and re.match(r"\d", rows[0][0]) else None
    found["driver_gpus"] = len(rows) if found["driver"] else 0
    return found


def compiler_facts() -> dict[str, Any]:
    """The C compiler that builds the CPU kernel."""
    try:
        from ..kernels.cpu import build as native_build

        command = native_build.find_compiler()
    except Exception as error:  # none is found; or torch is too old for the import
        return {"command": None, "version": None, "message": str(error)}
    said = _output_of([*command, "--version"])
    return {"command": shlex.join(command), "version": said[0] if said else None, "message": ""}


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def huge_pages() -> str | None:
    """Linux's setting of transparent huge pages."""
    try:
        said = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return None
    chosen = re.search(r"\[(\w+)\]", said)
    return chosen.group(1) if chosen else None


def _output_of(command: Sequence[str]) -> list[str]:
    """Lines that a command prints; none if it is not there, fails or takes long."""
    if shutil.which(command[0]) is None:
        return []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def origin(module: str) -> str | None:
    """Where a module would be imported from, or None if there is none. Packages around it are imported."""
    try:
        spec = importlib.util.find_spec(module)
    except Exception:  # of a package around it
        return None
    if spec is None:
        return None
    return next(iter(spec.submodule_search_locations or [spec.origin or ""]), "")


# -- nothing about the user --------------------------------------------------------------------------------


def shown_path(path: str) -> str:
    """A path for a ticket: "site-packages" for what pip installed."""
    for name in ("purelib", "platlib"):
        if Path(path).is_relative_to(sysconfig.get_path(name)):
            return "site-packages"
    return str(path)


def without_home(value: Any) -> Any:
    """The same with "site-packages" and "~" for the directories of pip and of users, whose names may be in them."""
    if isinstance(value, dict):
        return {key: without_home(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_home(item) for item in value]
    if not isinstance(value, str):
        return value
    for name in ("purelib", "platlib"):
        value = value.replace(sysconfig.get_path(name), "site-packages")
    for home in {os.path.expanduser("~"), os.path.realpath(os.path.expanduser("~"))} - {"/", "~"}:
        value = re.sub(re.escape(home) + r"(?=/|\W|$)", "~", value)
    return re.sub(r"/(?:home|Users)/[^/\s'\"]+", "~", value)


def machine_of(device: torch.device) -> str:
    """A device in words."""
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"{platform.machine()} CPU, {os.cpu_count()} cores, {threads} thread{'s' if threads > 1 else ''}"
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type
