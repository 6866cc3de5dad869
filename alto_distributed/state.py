"""The states an optimizer keeps for a tensor: their names, their precision, their place in memory."""

from __future__ import annotations

import torch

from .sharding import dtensor

EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
GRAD_EMA = "grad_ema"
STEP = "step"


def state_dtype(param: torch.Tensor) -> torch.dtype:
    """float32 at least: a moving average with decay 0.99 does not move in bfloat16."""
    return torch.promote_types(param.dtype, torch.float32)


def new_state(param: torch.Tensor) -> torch.Tensor:
    """Zeros shaped, placed and laid out in memory like ``param``."""
    return torch.zeros_like(param, dtype=state_dtype(param))


def new_step() -> torch.Tensor:
    """A counter on the host, as torch.optim keeps it, so that reading it never waits for a GPU."""
    return torch.tensor(0.0, dtype=torch.float32)


def in_memory_order(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The local elements of ``tensor``, its dimensions permuted to the order in which ``param`` lies in memory.

    The order itself is of no importance to the update; that a parameter, its gradient and its states
    share it is. A channels-last parameter and its states thus become flat views without a copy.
    """
    piece, local = dtensor.local(tensor), dtensor.local(param)
    if local.is_contiguous():
        return piece
    return piece.permute(sorted(range(local.ndim), key=lambda dim: (-local.stride()[dim], dim)))


def match_layout(state: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """``state`` as it must be to serve ``param``: on its device, in the state's precision and memory order.

    A state that came from a checkpoint may be none of these.
    """
    as_needed = state.dtype == state_dtype(param) and state.device == param.device
    if as_needed and in_memory_order(state, param).is_contiguous():
        return state
    return new_state(param).copy_(state)
