"""The page, from what the JSON holds."""

from __future__ import annotations

from typing import Any

_WIDTH = 20


def page(found: dict[str, Any]) -> str:
    """One page of text."""
    lines = [f"alto_distributed {found['alto_distributed']}, Python {found['python']}, {found['platform']}"]
    lines += ["", "Versions", *_rows(_versions(found)), "", "Machine", *_rows(_machine(found)), "", "Engines"]
    lines += [_engine(engine) for engine in found["engines"]]
    lines += ["", "Self-checks"]
    lines += [_check(check) for check in found["checks"]]
    if found["ok"]:
        return "\n".join([*lines, "", "Nothing is wrong."])
    return "\n".join([*lines, "", "Problems", *(f"  {n}. {line}" for n, line in enumerate(found["problems"], 1))])


def _rows(values: dict[str, str]) -> list[str]:
    return [f"  {name:{_WIDTH}}{value}" for name, value in values.items()]


def _versions(found: dict[str, Any]) -> dict[str, str]:
    torch, packages, cuda = found["torch"], found["packages"], found["cuda"]
    places = {engine["name"]: engine for engine in found["engines"]}
    build = " ".join(filter(None, [torch["build"], torch["toolkit"], torch["vendor"]]))
    rows = {"torch": f"{torch['version']} (build: {build}), {torch['from']}"}
    for name, title in (("triton", "triton"), ("deepspeed", "DeepSpeed"), ("megatron-core", "megatron-core")):
        engine = places.get("Megatron" if name == "megatron-core" else title, {})
        version = engine["version"] if engine.get("from") else packages[name]
        rows[title] = ", ".join(filter(None, [version, engine.get("from")])) or "not installed"
    rows["TransformerEngine"] = packages["transformer-engine"] or "not installed"
    rows["apex"] = _apex(found["apex"])
    named = {"CUDA": cuda["cuda"], "ROCm": cuda["rocm"], "NCCL": cuda["nccl"], "driver": cuda["driver"]}
    rows["CUDA"] = ", ".join(f"{name} {value}" for name, value in named.items() if value) or "none"
    return rows


def _apex(apex: dict[str, Any]) -> str:
    if apex["kind"] is None:
        return "not installed"
    kind = "NVIDIA's" if apex["kind"] == "nvidia" else "not NVIDIA's, another package of that name"
    return ", ".join(filter(None, [kind, apex["version"], apex["from"]]))


def _machine(found: dict[str, Any]) -> dict[str, str]:
    compiler, threads = found["compiler"], found["threads"]
    rows = {}
    for device in found["devices"]:
        if device["device"] != "cpu":
            memory = f"{device['memory'] / 2**30:.0f} GiB" if device["memory"] else None
            capability = f"capability {device['capability']}" if device["capability"] else None
            rows[device["device"]] = ", ".join(filter(None, [device["name"], memory, capability])) or "unknown"
    if not rows:
        gpus = found["cuda"]["driver_gpus"]
        rows["GPUs"] = f"none that this torch can use (nvidia-smi lists {gpus})" if gpus else "none"
    rows["C compiler"] = ": ".join(filter(None, [compiler["command"], compiler["version"]])) or compiler["message"]
    rows["threads"] = f"torch {threads['torch']}, OMP_NUM_THREADS {threads['OMP_NUM_THREADS'] or 'not set'}, "
    rows["threads"] += f"{threads['cores']} cores; torchrun sets OMP_NUM_THREADS=1 unless it is set"
    advice = '; "madvise" makes steps on the CPU a tenth faster' if found["huge_pages"] == "never" else ""
    rows["huge pages"] = f"{found['huge_pages'] or 'unknown'}{advice}"
    return rows


def _engine(engine: dict[str, Any]) -> str:
    return f"  {engine['name']:{_WIDTH}}{engine['status']:15}{engine['message']}".rstrip()


def _check(check: dict[str, Any]) -> str:
    return f"  {check['status']:10}{check['name']:28}{check['message']}".rstrip()
