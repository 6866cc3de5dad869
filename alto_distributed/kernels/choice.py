"""Which kernel serves which device.

On the CPU "auto" is C, or else plain torch operations. On a GPU it is Triton, once that has proved right on that very
device for the dtypes in use (:mod:`.proof`); if it has not, or there is no Triton, a warning says why, and torch's
foreach operations do the work.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import cast

import torch

from ..errors import is_one_of, shown
from . import chunked, foreach, proof, reference
from .cpu import kernel as native
from .protocol import Kernel, SkippingKernel
from .shards import Dtypes
from .skip import SkipIf
from .triton import step as gpu_step

KERNELS = ("auto", "torch", "reference", "native", "triton")

#: Device type -> what makes the kernel that "auto" would like to use there. It raises ValueError if there is none.
ACCELERATED: dict[str, Callable[[torch.device], Kernel]] = {"cuda": gpu_step.kernel_on, "xpu": gpu_step.kernel_on}

_complaints: dict[tuple[torch.device, Dtypes], str] = {}
_proved: defaultdict[torch.device, set[Dtypes]] = defaultdict(set)


def check_kernel(name: str) -> str:
    """``name`` if it is a kernel that can be used here; "native" is built for that if it was not yet."""
    if not is_one_of(name, KERNELS):
        raise ValueError(f"kernel={shown(name)} is not one of {', '.join(map(repr, KERNELS))}")
    if name == "native":
        native.require()
    return name


def kernel_for(name: str, device: torch.device, proved: bool = True) -> Kernel:
    """The kernel that serves ``device`` under the user's choice ``name``.

    Args:
        name: as checked by :func:`check_kernel`.
        device: of the tensors.
        proved: False for "auto" on a device for which :func:`find_fault` or another rank has found fault.
    """
    if name == "reference":
        return cast(Kernel, reference)
    if name == "native" or (name == "auto" and device.type == "cpu" and native.available()):
        return cast(Kernel, native)
    if name == "triton":
        return gpu_step.kernel_on(device)
    if name == "auto" and proved and device.type in ACCELERATED:
        kernel = ACCELERATED[device.type](device)
        return kernel.only(_proved[device]) if isinstance(kernel, gpu_step.TritonKernel) else kernel
    return cast(Kernel, chunked) if device.type == "cpu" else foreach.kernel


def kernel_with_skip(kernel: Kernel, skip: torch.Tensor) -> Kernel:
    """``kernel``, but nothing changes if ``skip``, on its device, is not 0. The host does not read it."""
    return kernel.unless(skip) if isinstance(kernel, SkippingKernel) else SkipIf(kernel, skip)


def find_fault(device: torch.device, dtypes: Iterable[Dtypes]) -> str:
    """Why "auto" must not use its accelerated kernel on ``device``; "" if it may. Found out once a process.

    The first call for a device and its dtypes compiles the kernel and waits for the device.
    """
    for some in dtypes:
        key = device, some
        if key not in _complaints:
            _complaints[key] = _find(device, some)
            if not _complaints[key]:
                _proved[device].add(some)
        if _complaints[key]:
            return _complaints[key]
    return ""


def _find(device: torch.device, dtypes: Dtypes) -> str:
    try:
        kernel = ACCELERATED[device.type](device)
    except ValueError as error:
        return str(error)
    if dtypes.param == torch.float64:
        return ""  # not the kernel's business: see ``serves``
    wrong = proof.complaint(kernel, lambda skip: kernel_with_skip(kernel, skip), device, [dtypes])
    return f"its self-check on {device} failed, {wrong}" if wrong else ""


def warn_of_fallback(why: str) -> None:
    """Say that steps go the way of torch's own operations."""
    warnings.warn(
        f"ALTO does not use its Triton kernel: {why}. Steps take torch's own operations instead, with the same result "
        'and more launches. kernel="torch" says that this is intended.',
        stacklevel=2,
    )
