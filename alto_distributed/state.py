"""The states an optimizer keeps for a tensor: their names, their precision, and what a checkpoint must hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

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


def saved_tensors(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[int, int, torch.Tensor, Mapping[str, Any] | None]]:
    """(group, position, parameter, saved state or None) for each parameter of an optimizer."""
    for g, (group, saved) in enumerate(zip(groups, state_dict["param_groups"], strict=True)):
        for i, (param, key) in enumerate(zip(group["params"], saved["params"], strict=True)):
            yield g, i, param, state_dict["state"].get(key)


def check_saved_state(
    g: int, i: int, param: torch.Tensor, saved: Mapping[str, Any], needed: Sequence[str], advice: str
) -> None:
    """Raise unless ``saved`` holds all of ``needed``, shaped like the parameter."""
    where = f"parameter {i} of group {g}"
    missing = [key for key in needed if key not in saved]
    if missing:
        raise ValueError(f"the checkpoint has no {', '.join(map(repr, missing))} for {where}; {advice}")
    for key in needed:
        value = saved[key]
        if key != STEP and dtensor.is_dtensor(param) != dtensor.is_dtensor(value):
            raise ValueError(
                f"the checkpoint's {key!r} for {where} is a {type(value).__name__}, the parameter a "
                f"{type(param).__name__}; save and load sharded state with torch.distributed.checkpoint"
            )
        if key != STEP and tuple(value.shape) != tuple(param.shape):
            raise ValueError(
                f"the checkpoint's {key!r} for {where} has shape {tuple(value.shape)}, the parameter has "
                f"{tuple(param.shape)}; load it into the model and the sharding it was saved from"
            )


def check_group_sizes(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless the checkpoint has the optimizer's groups with as many parameters in each."""
    here = [len(group["params"]) for group in groups]
    saved = [len(group["params"]) for group in state_dict["param_groups"]]
    if here != saved:
        raise ValueError(
            f"the checkpoint has parameter groups of {saved} tensors, this optimizer has {here}; "
            "build the groups as they were when the checkpoint was saved"
        )


def load_exactly(
    optimizer: Optimizer,
    load: Callable[[dict[str, Any]], None],
    state_dict: dict[str, Any],
    check: Callable[[Mapping[str, Any]], None],
    keys: Sequence[str],
) -> None:
    """Run a torch optimizer's ``load`` on a checked state_dict, and keep the states named ``keys`` as saved.

    torch casts floating-point states to the parameter's dtype, which would round float32 states of
    bfloat16 parameters. What it loaded is seen through a pre-hook, after the user's own pre-hooks.
    """
    seen: list[dict[str, Any]] = []

    def look(_: Optimizer, final: dict[str, Any]) -> None:
        check(final)
        seen.append(final)

    handle = optimizer.register_load_state_dict_pre_hook(look)
    try:
        load(state_dict)
    finally:
        handle.remove()
    with torch.no_grad():
        for _, _, param, saved in saved_tensors(seen[0], optimizer.param_groups):
            if saved is None:
                continue
            state = optimizer.state[param]
            for key in keys:
                if key in saved:
                    state[key] = match_layout(saved[key], param)
            if isinstance(state.get(STEP), torch.Tensor):
                state[STEP] = state[STEP].cpu()
