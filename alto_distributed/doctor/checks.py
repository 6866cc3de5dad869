"""The self-checks. They run in processes of their own (:mod:`.child`)."""

from __future__ import annotations

import functools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from .. import ALTO, LogicalParameter, ShardLayout
from ..kernels import Dtypes, find_fault
from ..kernels.choice import ACCELERATED
from ..kernels.cpu import build as native_build
from ..kernels.triton import step as gpu_step

#: Of the parameters that are stepped: over several blocks of the C kernel, one, and parts of one.
SHAPES = ((300, 257), (513,), (7, 5), (1,))
STEPS = 3
#: Largest difference to the reference, relative to the largest value. float32 kernels agree to about 1e-6.
TOLERANCE = 1e-4
#: bfloat16 weights are rounded at the end of a step, and may fall to either side.
BFLOAT16_TOLERANCE = 2.0**-7


class Skipped(Exception):
    """The check does not apply here; the message says why."""


class Wrong(Exception):
    """The result of a check is not right."""


def devices() -> list[dict[str, Any]]:
    """The CPU, and every accelerator that torch can use."""
    found: list[dict[str, Any]] = [{"device": "cpu"}]
    if torch.accelerator.is_available():
        kind = str(torch.accelerator.current_accelerator()).partition(":")[0]
        found += [_device(kind, index) for index in range(torch.accelerator.device_count())]
    return found


def _device(kind: str, index: int) -> dict[str, Any]:
    device: dict[str, Any] = {"device": f"{kind}:{index}", "name": None, "memory": None, "capability": None}
    module = torch.get_device_module(kind)
    try:
        properties = module.get_device_properties(index)
        device["name"], device["memory"] = str(properties.name), int(properties.total_memory)
        device["capability"] = ".".join(map(str, module.get_device_capability(index)))
    except Exception:  # not every backend has them, nor all of them
        pass
    return device


def planned(names: Sequence[str]) -> Iterator[tuple[str, Callable[[], str]]]:
    """The checks of one process.

    Args:
        names: of the devices.
    """
    for name in names:
        device = torch.device(name)
        kernels = ("reference", "torch", "native" if name == "cpu" else "triton")
        for kernel in kernels:
            yield f"kernel {kernel} on {name}", functools.partial(kernel_agrees, kernel, device)
        if device.type in ACCELERATED:
            yield f"kernel auto on {name}", functools.partial(auto_uses, device)
    if len(names) == 1:
        yield "kernel triton", _no_gpu
    for name in names[:2]:
        yield f"save and load on {name}", functools.partial(resumes, torch.device(name))


def _no_gpu() -> str:
    raise Skipped("torch finds no GPU here")


# -- kernels -----------------------------------------------------------------------------------------------


def kernel_agrees(kernel: str, device: torch.device) -> str:
    """Some steps with a kernel on a device, against the reference on the CPU in float64."""
    began = time.monotonic()
    if kernel == "native":
        _require_compiler()
    if kernel == "triton" and not gpu_step.available(device):
        raise Skipped("needs triton 3.4 or later and a GPU of compute capability 8.0 or later")
    largest = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        # bfloat16 weights: float32 arithmetic and one rounding, so the definition is the reference in bfloat16.
        exact = torch.float64 if dtype == torch.float32 else dtype
        expected = _stepped("reference", torch.device("cpu"), exact, dtype)
        found = _stepped(kernel, device, dtype, dtype)
        for what, values in found.items():
            tolerance = BFLOAT16_TOLERANCE if what.startswith("weight") and dtype != torch.float32 else TOLERANCE
            difference = _difference(values, expected[what])
            if not difference <= tolerance:  # nor a NaN
                raise Wrong(
                    f"{what} in {dtype} differs from the reference by {difference:.1e} of its size; do not train with "
                    f'kernel="{kernel}" here, and report this'
                )
            if dtype == torch.float32:
                largest = max(largest, difference)
    built = f", ready in {time.monotonic() - began:.1f} s" if kernel in ("native", "triton") else ""
    return f"largest difference to the reference {largest:.1g}{built}"


def auto_uses(device: torch.device) -> str:
    """Which kernel "auto" takes on a GPU, by the self-check of a first step."""
    full, half = torch.float32, torch.bfloat16
    in_use = [Dtypes(full, full, full, full), Dtypes(half, half, full, full), Dtypes(full, full, half, half)]
    fault = find_fault(device, in_use)
    return f"torch's foreach operations: {fault}" if fault else "Triton: its self-check passed, also in bfloat16"


def _require_compiler() -> None:
    """Skip if there is neither a compiler nor a library that was built before."""
    try:
        native_build.find_compiler()
    except native_build.NativeUnavailable as no_compiler:
        try:
            native_build.library()
        except (native_build.NativeUnavailable, OSError):
            raise Skipped(f"{no_compiler}; without it steps on the CPU take two or three times as long") from None


def _stepped(kernel: str, device: torch.device, dtype: torch.dtype, drawn: torch.dtype) -> dict[str, torch.Tensor]:
    """What all parameters moved by, and their states, after some steps.

    Args:
        kernel: its name.
        device: of the parameters.
        dtype: of the parameters.
        drawn: in which the numbers are drawn, so that parameters of two precisions have the same values.
    """
    params = _parameters(device, dtype, drawn)
    optimizer = ALTO(_groups(params), lr=0.1, kernel=kernel)
    begin = [param.detach().cpu().double().clone() for param in params]
    _step(optimizer, params, range(STEPS), drawn)
    found = {}
    for place, param in enumerate(params):
        moved = param.detach().cpu().double()
        found[f"weight {place}"] = moved - begin[place] if dtype != torch.bfloat16 else moved
        for name in ALTO.state_keys:
            found[f"{name} {place}"] = optimizer.state[param][name].detach().cpu().double()
    return found


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the largest value that is expected. Infinite where nothing has happened."""
    size = float(expected.abs().max())
    return float((found - expected).abs().max()) / size if size else math.inf


def _parameters(device: torch.device, dtype: torch.dtype, drawn: torch.dtype) -> list[torch.nn.Parameter]:
    values = [_draw(shape, place, drawn) for place, shape in enumerate(SHAPES)]
    return [torch.nn.Parameter(value.to(device=device, dtype=dtype)) for value in values]


def _draw(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


def _groups(params: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """Matrices with decay and ratio, the rest without."""
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def _gradient(place: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    return _draw(SHAPES[place], 1000 * (step + 1) + place, dtype)


def _step(optimizer: ALTO, params: Sequence[torch.Tensor], steps: range, drawn: torch.dtype) -> None:
    for step in steps:
        for place, param in enumerate(params):
            param.grad = _gradient(place, step, drawn).to(device=param.device, dtype=param.dtype)
        optimizer.step()


# -- save and load -----------------------------------------------------------------------------------------


def resumes(device: torch.device) -> str:
    """Save after some steps, load into a new optimizer, and continue: bitwise as without."""
    params = _parameters(device, torch.float32, torch.float32)
    optimizer = ALTO(_groups(params))
    _step(optimizer, params, range(STEPS), torch.float32)
    with tempfile.TemporaryDirectory(prefix="alto_distributed-") as directory:
        path = Path(directory, "checkpoint.pt")
        torch.save({"model": [param.detach() for param in params], "optimizer": optimizer.state_dict()}, path)
        size = path.stat().st_size
        saved = torch.load(path, weights_only=True, map_location=device)
    resumed = [torch.nn.Parameter(value) for value in saved["model"]]
    after = ALTO(_groups(resumed))
    after.load_state_dict(saved["optimizer"])
    more = range(STEPS, 2 * STEPS)
    _step(optimizer, params, more, torch.float32)
    _step(after, resumed, more, torch.float32)
    for place, (one, other) in enumerate(zip(params, resumed, strict=True)):
        if not torch.equal(one, other):
            raise Wrong(f"weight {place} is not bitwise that of a run that was not stopped")
    return f"{size:,} bytes, continued bitwise"


# -- ranks -------------------------------------------------------------------------------------------------


def sharded_step(rank: int, port: int, device_type: str) -> str:
    """One rank of two: steps on this rank's half of all parameters in one buffer, against unsharded steps."""
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, rank)
    if device_type != "cpu":
        torch.get_device_module(device_type).set_device(device)
    backend = dist.Backend.default_device_backend_map.get(device_type)
    if backend is None:
        raise Skipped(f"torch.distributed has no backend for {device_type}")
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=600))
    bound = None if device_type == "cpu" else device
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, device_id=bound)
    difference = _sharded_difference(rank, device)
    if not difference <= TOLERANCE:
        raise Wrong(f"sharded steps differ from unsharded ones by {difference:.1e} of their size; report this")
    return f"over {backend}, largest difference to unsharded steps {difference:.1g}"


def _sharded_difference(rank: int, device: torch.device) -> float:
    import torch.distributed as dist

    whole = _parameters(device, torch.float32, torch.float32)
    sizes = [param.numel() for param in whole]
    flat = torch.cat([param.detach().flatten() for param in whole])
    half = math.ceil(flat.numel() / 2)
    cut = slice(rank * half, min((rank + 1) * half, flat.numel()))

    plain = ALTO(whole, layerwise="all")
    shard = torch.nn.Parameter(flat[cut].clone())
    sharded = ALTO([shard], layerwise="all")
    world = dist.group.WORLD
    if world is None:
        raise Wrong("there is no process group")
    logical = [LogicalParameter(f"p{place}", shape, (world,)) for place, shape in enumerate(SHAPES)]
    sharded.set_layouts({shard: ShardLayout.of_flat_shard(logical, cut.start, shard.numel())})
    for step in range(STEPS):
        gradients = [_gradient(place, step, torch.float32).to(device) for place in range(len(sizes))]
        for param, gradient in zip(whole, gradients, strict=True):
            param.grad = gradient
        shard.grad = torch.cat([gradient.flatten() for gradient in gradients])[cut].clone()
        plain.step()
        sharded.step()
    expected = torch.cat([param.detach().flatten() for param in whole])[cut] - flat[cut]
    return _difference((shard.detach() - flat[cut]).cpu().double(), expected.cpu().double())
