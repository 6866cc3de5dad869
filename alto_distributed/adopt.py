"""Take over the moments of another optimizer: from Adam, AdamW or a LAMB to ALTO, and back."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from . import states
from .adaptor import ALPHA, E
from .errors import one_line, shown
from .optimizer import ALTO
from .safe_load import only_data, read_index
from .state_dict import check_form, check_saved_state

_MOMENTS = (states.EXP_AVG, states.EXP_AVG_SQ)

#: What wrappers put into the names of parameters.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


@torch.no_grad()
def adopt(optimizer: Optimizer, saved: Any, model: nn.Module | None = None) -> None:
    """Go on from a checkpoint of another optimizer: with its moments and step counts.

    Hyperparameters stay those of ``optimizer``: a learning rate of AdamW's is none of ALTO's. ``grad_ema`` starts from
    zero, as at step 1. All of it is taken over, or an error says why nothing is.

    Args:
        optimizer: ALTO, LAMB, ``torch.optim.Adam`` or ``AdamW``, or E of one of them. Its states are replaced.
        saved: what ``state_dict()`` of Adam, AdamW, ALTO or a LAMB returned, or ``get_optimizer_state_dict`` of
            ``torch.distributed.checkpoint.state_dict``; or the folder of a checkpoint that
            ``torch.distributed.checkpoint`` saved from the latter, of which no code is run. A ``StorageReader`` of your
            own is asked as it is: torch's reads the index with plain pickle.
        model: the model, to find parameters by their names, or by their order if the saved optimizer had other groups.

    Example:
        >>> optimizer = ALTO(param_groups(model))
        >>> adopt(optimizer, torch.load("adamw.pt"), model)
    """
    has_average = isinstance(optimizer, (ALTO, E))
    if isinstance(optimizer, E):
        optimizer = optimizer.base
    if not isinstance(optimizer, (ALTO, torch.optim.Adam)):  # AdamW is an Adam
        raise ValueError(
            f"adopt is for ALTO, LAMB, Adam and AdamW, whose states are {', '.join(_MOMENTS)}; not for a "
            f"{type(optimizer).__name__}"
        )
    if not isinstance(saved, Mapping):
        saved = _from_dcp(optimizer, saved, model)
    check_form(saved)
    target = optimizer.state_dict()
    target["state"] = {}
    for g, i, param, state, group in _pairs(optimizer, saved, model):
        ids = target["param_groups"][g]["params"]
        if bool(group.get("maximize", False)) != bool(optimizer.param_groups[g].get("maximize", False)):
            raise ValueError("the checkpoint has moments of an optimizer with another 'maximize'; build one like it")
        if not state:
            continue
        if has_average and states.GRAD_EMA in state:
            saved_by = "E" if ALPHA in group else "ALTO" if "alpha" in group else "ALTO or E"
            raise ValueError(
                f"this checkpoint was saved by {saved_by} and has {states.GRAD_EMA!r}, which adopt would set to zero; "
                "load it with load_state_dict into the optimizer that saved it, or delete that state to have it so"
            )
        counted = state.get(states.STEP, group.get(states.STEP))
        needed = {**state, **({} if counted is None else {states.STEP: counted})}
        advice = "adopt takes over the checkpoints of Adam, AdamW and LAMB"
        check_saved_state(g, i, param, needed, (*_MOMENTS, states.STEP), advice)
        target["state"][ids[i]] = _state_for(optimizer, param, optimizer.param_groups[g], needed)
    if not target["state"]:
        raise ValueError("the checkpoint has no state of any of this optimizer's parameters")
    optimizer.load_state_dict(target)


def _state_for(
    optimizer: Optimizer, param: torch.Tensor, group: Mapping[str, Any], saved: Mapping[str, Any]
) -> dict[str, Any]:
    """A parameter's state in the target's form. Nothing is shared with the optimizer that it comes from."""
    state: dict[str, Any] = {states.STEP: states.new_step() + float(saved[states.STEP])}
    state.update({key: saved[key].detach().clone() for key in _MOMENTS})
    if isinstance(optimizer, ALTO):
        if group["alpha"] != 0:
            state[states.GRAD_EMA] = optimizer.new_state(param, states.GRAD_EMA)
    elif group["amsgrad"]:
        state["max_exp_avg_sq"] = state[states.EXP_AVG_SQ].clone()
    return state


def _pairs(
    optimizer: Optimizer, saved: Mapping[str, Any], model: nn.Module | None
) -> Iterator[tuple[int, int, torch.Tensor, Mapping[str, Any], Mapping[str, Any]]]:
    """(group, place, parameter, saved state, saved group) of all parameters that the checkpoint has."""
    groups = saved["param_groups"]
    keys = [(key, group) for group in groups for key in group["params"]]
    own = [param for group in optimizer.param_groups for param in group["params"]]
    names = _names(optimizer, model)
    saved_names = _saved_names(groups)
    by_param: dict[int, tuple[Any, Mapping[str, Any]]]
    if saved_names is not None and names is not None:
        by_name = dict(zip(saved_names, keys, strict=True))
        by_param = {id(p): by_name[names[id(p)]] for p in own if names.get(id(p)) in by_name}
    elif any(isinstance(key, str) for key, _ in keys):
        raise ValueError("the checkpoint has parameters by name: give the model to adopt, which knows their names")
    elif [len(group["params"]) for group in groups] == [len(group["params"]) for group in optimizer.param_groups]:
        by_param = {id(p): key for p, key in zip(own, keys, strict=True)}
    else:
        by_param = dict(zip(map(id, _in_order(model, len(keys))), keys, strict=True))
    missing = [i for i, p in enumerate(own) if id(p) not in by_param]
    if missing:
        raise ValueError(
            f"the checkpoint does not have {len(missing)} of this optimizer's {len(own)} parameters, such as number "
            f"{missing[0]}, of shape {tuple(own[missing[0]].shape)}; build the optimizer over the parameters that were "
            "saved, and add_param_group others later"
        )
    for g, group in enumerate(optimizer.param_groups):
        for i, param in enumerate(group["params"]):
            key, saved_group = by_param[id(param)]
            yield g, i, param, saved["state"].get(key, {}), saved_group


def _in_order(model: nn.Module | None, count: int) -> list[torch.Tensor]:
    """The parameters of a model in the order in which ``AdamW(model.parameters())`` has them."""
    if model is None:
        raise ValueError(
            "the checkpoint has other parameter groups than this optimizer: give the model to adopt, whose order of "
            "parameters is then the checkpoint's"
        )
    params: list[torch.Tensor] = list(model.parameters())
    if len(params) != count:
        params = [p for p in params if p.requires_grad]
    if len(params) != count:
        raise ValueError(
            f"the checkpoint has {count} parameters, the model {len(params)} that are trained; give the state_dict of "
            "an optimizer over all of them, or one with names (torch.distributed.checkpoint.state_dict)"
        )
    return params


def _names(optimizer: Optimizer, model: nn.Module | None) -> dict[int, str] | None:
    """The name of each parameter, by its id; None if nobody has told them."""
    if model is not None:
        return {id(p): _clean(name) for name, p in model.named_parameters()}
    named = [group.get("param_names") for group in optimizer.param_groups]
    if any(names is None for names in named):
        return None
    pairs = zip(optimizer.param_groups, named, strict=True)
    return {id(p): _clean(n) for group, names in pairs for p, n in zip(group["params"], names or (), strict=True)}


def _saved_names(groups: Any) -> list[str] | None:
    if all(isinstance(key, str) for group in groups for key in group["params"]):
        return [_clean(key) for group in groups for key in group["params"]]
    if all("param_names" in group for group in groups):
        return [_clean(name) for group in groups for name in group["param_names"]]
    return None


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")  # DistributedDataParallel


def _from_dcp(optimizer: Optimizer, source: Any, model: nn.Module | None) -> dict[str, Any]:
    """The moments that a folder of torch.distributed.checkpoint holds, sharded as the parameters are."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.storage import StorageReader

    if isinstance(source, (str, os.PathLike)):
        source = _reader_of(Path(source))
    elif not isinstance(source, StorageReader):
        raise ValueError(f"adopt takes a state_dict, a folder or a StorageReader, not {shown(source)}")
    names = _names(optimizer, model)
    if names is None:
        raise ValueError("a folder has parameters by name: give the model to adopt, which knows their names")
    found = source.read_metadata().state_dict_metadata
    own = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"] if id(p) in names}
    suffixes = [f"state.{name}.{states.EXP_AVG}" for name in own]
    prefixes = {key.removesuffix(suffix) for suffix in suffixes for key in found if key.endswith(suffix)}
    if len(prefixes) != 1:
        raise ValueError(
            f"the folder has {states.EXP_AVG!r} of this optimizer's parameters at {len(prefixes)} places "
            f"({shown(sorted(prefixes))}), not at one; save {{'optim': get_optimizer_state_dict(model, optimizer)}}"
        )
    (prefix,) = prefixes
    read, counts = _counts_of_groups(found, prefix)
    state: dict[str, dict[str, str]] = {name: {} for name in own}
    for name, param in own.items():
        for key in (*_MOMENTS, states.STEP, states.GRAD_EMA):
            at = f"{prefix}state.{name}.{key}"
            if at in found:
                is_tensor = isinstance(found[at], TensorStorageMetadata)
                read[at] = (states.new_step() if is_tensor else 0) if key == states.STEP else states.new_state(param)
                state[name][key] = at
    try:
        with only_data([]):  # a step count that is not a tensor is pickled
            load(read, storage_reader=source)
    except CheckpointException as error:  # on all ranks, and no Exception
        rank, (problem, _) = next(iter(error.failures.items()))
        raise ValueError(f"the checkpoint cannot be read: rank {rank}: {one_line(problem)}") from None
    loaded = {name: {key: read[at] for key, at in places.items()} for name, places in state.items()}
    for name, count in ((name, count) for names, count in counts.items() for name in read.get(names, [names])):
        if name in loaded:
            loaded[name].setdefault(states.STEP, read[count])
    return {"state": loaded, "param_groups": [{"params": list(own)}]}


def _counts_of_groups(found: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, str]]:
    """What to read of step counts that an optimizer keeps in its groups, as some LAMBs do.

    Args:
        found: what the folder has.
        prefix: of the optimizer's entries.

    Returns:
        What to read; and for each count, under the entry that has the names of its parameters, or under the one name
        that an entry is for where groups were flattened, the entry of the count.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    read: dict[str, Any] = {}
    counts: dict[str, str] = {}
    begin, end = f"{prefix}param_groups.", f".{states.STEP}"
    for at in found:
        if at.startswith(begin) and at.endswith(end):
            names = f"{at.removesuffix(end)}.params"
            if names in found:
                read[names], counts[names] = [], at
            else:
                counts[at.removeprefix(begin).removesuffix(end)] = at
            read[at] = states.new_step() if isinstance(found[at], TensorStorageMetadata) else 0
    return read, counts


def _reader_of(folder: Path) -> Any:
    """torch's reader of a folder, but for the index, which it would read with plain pickle."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import StorageMeta

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            try:
                index = read_index(folder / ".metadata")
            except ValueError as error:
                raise ValueError(
                    f"{folder} is not a checkpoint of torch.distributed.checkpoint that adopt reads: .metadata "
                    f"({error})"
                ) from None
            index.storage_meta = index.storage_meta or StorageMeta()
            index.storage_meta.load_id = self.load_id
            return index

    return Reader(folder)
