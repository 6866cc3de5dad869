"""Calls of the Triton kernels. Triton is imported here, and only when the first call comes."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from .table import Tables, Tiling
from .values import Values

#: Partial sums that a program of the last launch of phase one reads at a time.
FINISH_TILE = 512


def launch_phase_one(
    tables: Tables, tiling: Tiling, values: Values, sums: torch.Tensor, skip: torch.Tensor | None = None
) -> None:
    """Phase one of all launches, and one more that adds up their sums.

    ``skip`` is a number on the device: if it is not 0, nothing else is read or written. Without one, no program asks.
    """
    from . import kernel as kernels
    from .elements import element_type

    if sums.dtype != torch.float64 or sums.stride(1) != 1:
        raise ValueError("sums must be float64 with contiguous rows; make it with torch.zeros(3, slots, dtype=float64)")
    places = tables.partials.shape[1]
    options = options_for(sums.device.type, torch.version.hip is not None)
    with on(sums.device):
        for launch in tables.launches:
            dtypes = launch.dtypes
            kernels.phase_one[(launch.programs,)](
                launch.chunks,
                tables.partials,
                places,
                values.shards,
                values.coefficients,
                values.inverse_scale,
                skip,
                PARAM=element_type(dtypes.param),
                GRAD=element_type(dtypes.grad),
                EXP_AVG=element_type(dtypes.exp_avg),
                GRAD_EMA=element_type(dtypes.grad_ema),
                TILE=tiling.tile,
                **options,
            )
        if len(tables.totals):
            kernels.finish[(len(tables.totals), len(sums))](
                tables.totals, tables.partials, places, sums, sums.stride(0), skip, TILE=FINISH_TILE, **options
            )


def launch_phase_two(
    tables: Tables, tiling: Tiling, values: Values, step_sizes: torch.Tensor, skip: torch.Tensor | None = None
) -> None:
    """Phase two of all launches."""
    from . import kernel as kernels
    from .elements import element_type

    options = options_for(step_sizes.device.type, torch.version.hip is not None)
    with on(step_sizes.device):
        for launch in tables.launches:
            dtypes = launch.dtypes
            kernels.phase_two[(launch.programs,)](
                launch.chunks,
                values.shards,
                values.coefficients,
                step_sizes.contiguous(),
                skip,
                PARAM=element_type(dtypes.param),
                EXP_AVG=element_type(dtypes.exp_avg),
                TILE=tiling.tile,
                **options,
            )


def options_for(device_type: str, hip: bool) -> dict[str, Any]:
    """How a kernel is compiled.

    Products and sums are not fused: each operation rounds as it does in the reference, whatever Triton's default. At 96
    registers a thread, five blocks share a multiprocessor of NVIDIA's, and nothing spills.
    """
    registers = {"maxnreg": 96} if device_type == "cuda" and not hip else {}
    return {"num_warps": 4, "enable_fp_fusion": False, **registers}


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of the tensors."""
    if device.type == "cpu":  # Triton's interpreter
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = torch.get_device_module(device).device(device)
    return context
