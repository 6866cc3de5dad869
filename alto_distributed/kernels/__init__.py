"""The update rule: pure functions on flat tensors, in two phases with the norms between them.

A kernel is a module or an object with the two functions of :class:`.protocol.Kernel`. One that skips steps by
itself is a :class:`.protocol.SkippingKernel`.

Between the two, and outside of this folder, the sums become norms of whole logical parameters
(``sharding.norms``) and the norms become step sizes (:func:`reference.trust_ratio`). A kernel gets all
shards of one device at once, so that it may serve many of them with one launch; ``sums`` and
``step_sizes`` live on that device and are never read by the host.

``reference`` is the definition, written to be read beside the paper. The others must agree with it:
``chunked`` in torch operations, for any device, ``cpu.kernel`` in C, and ``triton.step`` for GPUs.
"""

from __future__ import annotations

from .choice import KERNELS, check_kernel, find_fault, kernel_for, kernel_with_skip
from .protocol import Kernel
from .shards import Batch, Coefficients, Dtypes, FlatShard, Span

__all__ = [
    "KERNELS",
    "Batch",
    "Coefficients",
    "Dtypes",
    "FlatShard",
    "Kernel",
    "Span",
    "check_kernel",
    "find_fault",
    "kernel_for",
    "kernel_with_skip",
]
