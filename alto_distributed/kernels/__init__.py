"""The update rule: pure functions on flat tensors, in two phases with the norms between them.

A kernel is a module or an object with the two functions of :class:`.protocol.Kernel`.

Between the two, and outside of this folder, the sums become norms of whole logical parameters
(``sharding.norms``) and the norms become step sizes (:func:`reference.trust_ratio`). A kernel gets all
shards of one device at once, so that it may serve many of them with one launch; ``sums`` and
``step_sizes`` live on that device and are never read by the host.

``reference`` is the definition, written to be read beside the paper. The others must agree with it:
``chunked`` in torch operations, for any device, ``cpu.kernel`` in C, and ``triton.step`` for GPUs.
"""

from __future__ import annotations

from typing import cast

import torch

from ..errors import is_one_of, shown
from . import chunked, reference
from .cpu import kernel as native
from .protocol import Kernel
from .shards import Batch, Coefficients, FlatShard, Span
from .skip import SkipIf
from .triton import step as gpu_step

__all__ = ["KERNELS", "Batch", "Coefficients", "FlatShard", "Kernel", "Span", "kernel_for", "kernel_with_skip"]

KERNELS = ("auto", "torch", "reference", "native", "triton")


def check_kernel(name: str) -> str:
    """``name`` if it is a kernel that can be used here; "native" is built for that if it was not yet."""
    if not is_one_of(name, KERNELS):
        raise ValueError(f"kernel={shown(name)} is not one of {', '.join(map(repr, KERNELS))}")
    if name == "native":
        native.require()
    return name


def kernel_for(name: str, device: torch.device) -> Kernel:
    """The kernel that serves ``device`` under the user's choice ``name``."""
    if check_kernel(name) == "reference":
        return cast(Kernel, reference)
    if name == "native" or (name == "auto" and device.type == "cpu" and native.available()):
        return cast(Kernel, native)
    # Not by "auto" until it has been seen to be right on a GPU: so far it has run in Triton's interpreter alone.
    if name == "triton":
        return gpu_step.kernel_on(device)
    return cast(Kernel, chunked)


def kernel_with_skip(kernel: Kernel, skip: torch.Tensor) -> Kernel:
    """``kernel``, but nothing changes if ``skip``, on its device, is not 0. The host does not read it."""
    return kernel.unless(skip) if isinstance(kernel, gpu_step.TritonKernel) else SkipIf(kernel, skip)
