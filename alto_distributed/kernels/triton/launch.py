"""Calls of the two Triton kernels. Triton is imported here, and only when the first call comes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from .table import Launch, Tiling

# Products and sums are not fused: each operation rounds as it does in the reference, whatever Triton's default.
_OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}


def launch_phase_one(
    launches: Sequence[Launch],
    tiling: Tiling,
    pieces: torch.Tensor,
    coefficients: torch.Tensor,
    sums: torch.Tensor,
    skip: torch.Tensor | None = None,
) -> None:
    """Phase one of all launches. Their order on the device's stream makes it safe that two add to one slot.

    ``skip`` is a number on the device: if it is not 0, nothing is read or written. Without one, no program asks.
    """
    from . import kernel as kernels
    from .elements import element_type

    if sums.dtype != torch.float64 or sums.stride(1) != 1:
        raise ValueError("sums must be float64 with contiguous rows; make it with torch.zeros(2, slots, dtype=float64)")
    with on(sums.device):
        for launch in launches:
            dtypes = launch.dtypes
            kernels.phase_one[(launch.programs,)](
                launch.chunks,
                launch.totals,
                launch.arrivals,
                launch.partials,
                pieces,
                coefficients,
                sums,
                sums.stride(0),
                skip,
                PARAM=element_type(dtypes.param),
                GRAD=element_type(dtypes.grad),
                EXP_AVG=element_type(dtypes.exp_avg),
                GRAD_EMA=element_type(dtypes.grad_ema),
                TILE=tiling.tile,
                **_OPTIONS,
            )


def launch_phase_two(
    launches: Sequence[Launch],
    tiling: Tiling,
    pieces: torch.Tensor,
    coefficients: torch.Tensor,
    step_sizes: torch.Tensor,
    skip: torch.Tensor | None = None,
) -> None:
    from . import kernel as kernels
    from .elements import element_type

    with on(step_sizes.device):
        for launch in launches:
            dtypes = launch.dtypes
            kernels.phase_two[(launch.programs,)](
                launch.chunks,
                pieces,
                coefficients,
                step_sizes.contiguous(),
                skip,
                PARAM=element_type(dtypes.param),
                EXP_AVG=element_type(dtypes.exp_avg),
                MODEL_COPY=element_type(dtypes.model_copy),
                TILE=tiling.tile,
                **_OPTIONS,
            )


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of the tensors."""
    if device.type == "cpu":  # Triton's interpreter
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = torch.get_device_module(device).device(device)
    return context
