"""The states an optimizer keeps for a tensor: their names, their precision, their place in memory."""

from __future__ import annotations

from typing import Any

import torch

from .errors import shown
from .kernels import hugepages
from .sharding import dtensor
from .spans import PLAIN

EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
GRAD_EMA = "grad_ema"
STEP = "step"

#: Group key that remembers the beta1 with which grad_ema was gathered: the one-tensor identity holds only while it
#: stays, also over a checkpoint.
GRAD_EMA_BETA1 = "grad_ema_beta1"

#: States that may be kept in bfloat16, with stochastic rounding. exp_avg_sq may not: a root is taken of it.
SHRINKABLE = (EXP_AVG, GRAD_EMA)

#: The options that choose their precision.
STATE_DTYPES = tuple(f"{key}_dtype" for key in SHRINKABLE)

#: What an option for the precision of a state may say; None is the usual precision.
DTYPES: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}


def check_dtype(option: str, dtype: Any) -> torch.dtype | None:
    """The dtype that an option like ``grad_ema_dtype`` stands for; None for the usual precision."""
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, (str, torch.dtype)) else None
    if name not in DTYPES:
        raise ValueError(f"{option}={shown(dtype)} is not one of 'float32', 'bfloat16'")
    return DTYPES[name]


def state_dtype(param: torch.Tensor, chosen: torch.dtype | None = None) -> torch.dtype:
    """float32 at least: a moving average with decay 0.99 does not move in bfloat16, unless it is rounded by chance.

    Args:
        param: what the state belongs to.
        chosen: bfloat16 for a state that is rounded stochastically.
    """
    full = torch.promote_types(param.dtype, torch.float32)
    if chosen is not None and full != torch.float32:
        raise ValueError(f"states in bfloat16 are for parameters of at most float32, not {full}; leave out the option")
    return chosen or full


def new_state(param: torch.Tensor, chosen: torch.dtype | None = None) -> torch.Tensor:
    """Zeros shaped, placed and laid out in memory like ``param``."""
    return hugepages.zeros_like(param, state_dtype(param, chosen))


def new_step(device: torch.device | str = "cpu") -> torch.Tensor:
    """A counter, as torch.optim keeps it: on the host, so that reading it never waits for a GPU, unless capturable."""
    return torch.zeros((), dtype=torch.float32, device=device)


def in_memory_order(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The local elements of ``tensor``, its dimensions permuted to the order in which ``param`` lies in memory.

    The order itself is of no importance to the update; that a parameter, its gradient and its states
    share it is. A channels-last parameter and its states thus become flat views without a copy.
    """
    if type(tensor) in PLAIN and type(param) in PLAIN and param.is_contiguous():
        return tensor  # as nearly always, and a step asks five times for every parameter
    shard, local = dtensor.local(tensor), dtensor.local(param)
    if local.is_contiguous():
        return shard
    return shard.permute(sorted(range(local.ndim), key=lambda dim: (-local.stride()[dim], dim)))


def flat_view(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The same in one dimension. Raises RuntimeError where that would take a copy."""
    ordered = in_memory_order(tensor, param)
    return ordered if ordered.ndim == 1 else ordered.view(-1)


def is_in_order(state: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether a state lies in memory as ``param`` does. One of another shape is not looked at."""
    return state.shape != param.shape or in_memory_order(state, param).is_contiguous()


def match_layout(state: torch.Tensor, param: torch.Tensor, chosen: torch.dtype | None = None) -> torch.Tensor:
    """``state`` as it must be to serve ``param``: on its device, in the state's precision and memory order.

    A state that came from a checkpoint may be none of these. To more precision the conversion is exact; to
    less it rounds to nearest, once.
    """
    as_needed = state.dtype == state_dtype(param, chosen) and state.device == param.device
    if as_needed and in_memory_order(state, param).is_contiguous():
        return state
    return new_state(param, chosen).copy_(state)
