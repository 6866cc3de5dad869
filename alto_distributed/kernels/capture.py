"""Steps that a CUDA graph records: what they may not do, since a replay does it without the host.

A graph repeats launches and copies with the same addresses. So whatever changes from step to step must be on the
device, and what a replay copies from the host must stay where it is, unchanged.
"""

from __future__ import annotations

from typing import NoReturn

import torch


def is_capturing(device_type: str | None) -> bool:
    """Whether what is launched on the current device of a type now is recorded instead."""
    asked = getattr(getattr(torch, device_type or "", None), "is_current_stream_capturing", None)
    return asked is not None and bool(asked())


def refuse_cold(what: str) -> NoReturn:
    """Raise for a capture that would record what belongs before it."""
    raise ValueError(
        f"a CUDA graph cannot be captured now: {what}. Take a step outside of the graph first, with gradients of the "
        "same parameters, and then capture"
    )
