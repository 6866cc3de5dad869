"""What a saved state_dict must hold to be loaded: all of it or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from . import states
from .errors import shown
from .hyperparameters import ADDED_LATER, HYPERPARAMETER_NAMES, Hyperparameters
from .sharding import dtensor


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
        if key == states.STEP:
            _check_step(value, where)
        elif not _has_numbers(value, param):
            kind = f"{value.dtype}, {value.layout}" if isinstance(value, torch.Tensor) else type(value).__name__
            kind += " without data (meta)" if isinstance(value, torch.Tensor) and value.is_meta else ""
            raise ValueError(f"the checkpoint's {key!r} for {where} must be a dense floating-point tensor, not {kind}")
        if key != states.STEP and dtensor.is_dtensor(param) != dtensor.is_dtensor(value):
            raise ValueError(
                f"the checkpoint's {key!r} for {where} is a {type(value).__name__}, the parameter a "
                f"{type(param).__name__}; save and load sharded state with torch.distributed.checkpoint"
            )
        if key != states.STEP and tuple(value.shape) != tuple(param.shape):
            raise ValueError(
                f"the checkpoint's {key!r} for {where} has shape {tuple(value.shape)}, the parameter has "
                f"{tuple(param.shape)}; load it into the model and the sharding it was saved from"
            )


def _has_numbers(value: Any, param: torch.Tensor) -> bool:
    """Whether it is a state that a step can begin with. One on the meta device is for a parameter that is there too."""
    if not isinstance(value, torch.Tensor) or (value.is_meta and not param.is_meta):
        return False
    return value.is_floating_point() and value.layout == torch.strided


def _check_step(value: Any, where: str) -> None:
    """Raise unless it is a number of steps. One on a GPU is taken on trust: it was written by an optimizer."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        if value.device.type not in ("cpu", "meta"):
            return
        value = value if value.is_meta else value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**53 or value != int(value):
        raise ValueError(f"the checkpoint's {states.STEP!r} for {where} must be a number of steps, not {shown(value)}")


def check_form(state_dict: Any) -> None:
    """Raise unless it is what ``torch.optim`` calls a state_dict."""
    saved = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
    states_of = state_dict.get("state") if isinstance(state_dict, Mapping) else None
    if not (
        isinstance(saved, (list, tuple))
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in saved)
        and all(isinstance(key, (int, str)) for group in saved for key in group["params"])
        and isinstance(states_of, Mapping)
        and all(isinstance(state, Mapping) for state in states_of.values())
    ):
        raise ValueError(
            "this is not an optimizer's state_dict: it should be {'state': {...}, 'param_groups': [...]}, with "
            "'params', by number or name, in every group; give what ALTO.state_dict() returned"
        )


def check_group_sizes(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless the checkpoint has the optimizer's groups with as many parameters in each."""
    check_form(state_dict)
    here = [len(group["params"]) for group in groups]
    saved = [len(group["params"]) for group in state_dict["param_groups"]]
    if here != saved:
        raise ValueError(
            f"the checkpoint has parameter groups of {saved} tensors, this optimizer has {here}; "
            "build the groups as they were when the checkpoint was saved"
        )


def check_saved_by_alto(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless a state_dict is one of ALTO's that fits parameter groups, with every state it should have."""
    check_group_sizes(state_dict, groups)
    for g, group in enumerate(state_dict["param_groups"]):
        missing = [name for name in HYPERPARAMETER_NAMES if name not in group and name not in ADDED_LATER]
        if missing:
            raise ValueError(
                f"group {g} of the checkpoint has no {', '.join(map(repr, missing))}: it was not saved by ALTO. "
                "Load it into the optimizer that saved it"
            )
    hypers = [Hyperparameters.from_group(group) for group in state_dict["param_groups"]]
    for g, i, param, saved in saved_tensors(state_dict, groups):
        if saved is not None:
            needed = [states.STEP, states.EXP_AVG, states.EXP_AVG_SQ]
            if hypers[g].alpha != 0 or states.GRAD_EMA in saved:
                needed.append(states.GRAD_EMA)
            advice = "a resumed run would differ from the saved one. Save again with ALTO.state_dict()"
            check_saved_state(g, i, param, saved, needed, advice)
            _check_unknown(g, i, param, saved)


def _check_unknown(g: int, i: int, param: torch.Tensor, saved: Mapping[str, Any]) -> None:
    """Raise for a state of another name that torch cannot cast, as it does with all of them while it loads."""
    for key, value in saved.items():
        if isinstance(value, torch.Tensor):
            castable = not value.is_meta or param.is_meta
        else:
            castable = value is None or isinstance(value, (int, float))
        if not castable:
            kind = "tensor without data (meta)" if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(
                f"the checkpoint has a state {shown(key)} for parameter {i} of group {g} that ALTO does not know, a "
                f"{kind}; delete it from the state_dict, or give what ALTO.state_dict() returned"
            )


def load_exactly(
    optimizer: Optimizer,
    load: Callable[[dict[str, Any]], None],
    state_dict: dict[str, Any],
    check: Callable[[Mapping[str, Any]], None],
    keys: Sequence[str],
    dtypes: Mapping[str, torch.dtype | None] | None = None,
) -> None:
    """Run a torch optimizer's ``load`` on a checked state_dict, and keep the states named ``keys`` as saved.

    ``dtypes`` says which of them this optimizer keeps in bfloat16; the precision is the optimizer's own choice,
    not the checkpoint's, and a state of another is converted.

    torch casts floating-point states to the parameter's dtype, which would round float32 states of
    bfloat16 parameters. What it loaded is seen through a pre-hook, after the user's own pre-hooks.
    """
    seen: list[dict[str, Any]] = []

    def look(_: Optimizer, final: dict[str, Any]) -> None:
        check(final)
        seen.append(final)

    check_form(state_dict)  # torch copies it before it asks anyone
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
                    state[key] = states.match_layout(saved[key], param, (dtypes or {}).get(key))
            if isinstance(state.get(states.STEP), torch.Tensor):
                state[states.STEP] = state[states.STEP].to("cpu", torch.float32)  # torch keeps the saved type
