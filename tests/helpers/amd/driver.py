"""A driver for Triton whose GPU is the emulator: Triton compiles and launches as it does on that GPU.

Kernels read and write the memory of torch's CPU tensors::

    gpu = EmulatedGPU("gfx942")
    triton.runtime.driver.set_active(gpu)
    kernel[(programs,)](tensor, 5)
"""

from __future__ import annotations

import random
import struct
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from .code_object import CodeObject, parse
from .launch import launch
from .memory import Memory, live_tensors

WAVE_SIZES = {"gfx942": 64, "gfx1100": 32}
_SHARED = 65536  # bytes of LDS that a workgroup can have


class EmulatedGPU(DriverBase):
    """The only device. Launches are done when the call returns.

    Args:
        target: a key of ``WAVE_SIZES``.
    """

    def __init__(self, target: str) -> None:
        self.target = GPUTarget("hip", target, WAVE_SIZES[target])
        self.order = random.Random(1234)
        """Workgroups and waves run in another order at every launch. Nothing may depend on it."""
        self.code_objects: dict[str, CodeObject] = {}
        """Those that were loaded, by a name of their own."""
        self.executed = 0
        """Instructions of all waves so far."""
        self.launcher_cls = lambda source, metadata: _Launcher(self, source, metadata)
        self.utils = SimpleNamespace(
            load_binary=self._load_binary, get_device_properties=lambda device: {"max_shared_mem": _SHARED}
        )

    @classmethod
    def is_active(cls) -> bool:
        return False  # only if it is asked for

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("no C++ is made for this device")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("speed means nothing here")

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> str:
        return str(self.target.arch)  # Triton keeps what it compiled by this

    def get_current_stream(self, device: str) -> int:
        return 0

    def _load_binary(self, name: str, binary: bytes, shared: int, device: str) -> tuple[Any, ...]:
        found = parse(binary, name)
        if (found.target, found.wave_size) != (self.target.arch, self.target.warp_size):
            raise ValueError(f"{name} is for {found.target}, not for {self.target}")
        self.code_objects[f"{name} {len(self.code_objects)}"] = found
        return binary, found, 0, 0, 1024


class _Launcher:
    """Calls one compiled kernel."""

    def __init__(self, gpu: EmulatedGPU, source: Any, metadata: Any) -> None:
        self._gpu = gpu
        self._types = list(source.signature.values())
        self._waves = metadata.num_warps
        self._shared = metadata.shared

    def __call__(
        self, x: int, y: int, z: int, stream: int, code: CodeObject, packed: Any, launch_metadata: Any, *rest: Any
    ) -> None:
        _enter, _exit, *arguments = rest
        given = [
            (kind, value)
            for kind, value in zip(self._types, arguments, strict=True)
            if kind != "constexpr"  # compiled in
        ]
        block = bytearray(code.arguments_size)
        for place, (kind, value) in zip(code.arguments, given, strict=False):
            packed_value = _packed(kind, value)
            if len(packed_value) != place.size:
                raise ValueError(f"{code.name}: an argument of {kind} in {place.size} bytes")
            block[place.offset : place.offset + place.size] = packed_value
        # Behind the kernel's own come two addresses of Triton's, of memory that our kernels do not ask for.
        if any(place.kind != "global_buffer" for place in code.arguments[len(given) :]):
            raise ValueError(f"{code.name} takes {code.arguments}, and was given {[kind for kind, _ in given]}")
        memory = Memory([*live_tensors(), block])
        self._gpu.executed += launch(
            code,
            (x, y, z),
            self._waves,
            memory,
            memory.address_of(block),
            lds_size=max(self._shared, code.lds_size),
            order=self._gpu.order,
        )


def _packed(kind: str, value: Any) -> bytes:
    """An argument as memory has it."""
    if kind.startswith("*"):
        return struct.pack("<Q", value.data_ptr())
    formats = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H"}
    formats.update({"u32": "I", "u64": "Q", "fp32": "f", "fp64": "d"})
    return struct.pack("<" + formats[kind], value)
