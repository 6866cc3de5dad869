"""What is said to an optimizer besides hyperparameters: choices for all groups, and the keys of other optimizers.

Frameworks hand over options in two ways: to the constructor, or as keys of every parameter group. Each key is done, or
has no meaning and is accepted, or is refused.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

import torch

from .errors import shown
from .hyperparameters import HYPERPARAMETER_NAMES, refuse_near_misses, refuse_unknown

#: Choices for all groups. They are not in checkpoints.
OPTIONS = ("kernel", "diagnostics_every", "skip_nonfinite", "grad_ema_dtype", "exp_avg_dtype", "capturable")

#: Of torch.optim: how a step is computed. The kernel says that here, and the result is the same.
WITHOUT_MEANING = ("foreach", "fused")

#: Values that say what is so anyway.
_OFF, _ON = (None, False), (None, True)

#: Of torch.optim: name -> such values, and why others cannot be.
_OF_TORCH: dict[str, tuple[tuple[Any, ...], str]] = {
    "differentiable": (_OFF, "a step is not recorded by autograd"),
    "amsgrad": (_OFF, "there is no largest second moment"),
    "nesterov": (_OFF, "alpha does that: see docs/algorithm.md, What alpha does"),
    "decoupled_weight_decay": (_ON, "the decay would go into the moments"),
}

_CLIP = "clip_grad_norm_ before step(), or the engine's clipping, does that"
_DECAYED = 'write "decayed": True into the groups whose parameters are to have the ratio without decay'
_INSIDE_THE_RATIO = "the decay is inside the layer-wise ratio"
_NOT_THERE = "there is no such variant"

#: The same of other LAMBs: docs/lamb.md says what to write instead.
_OF_LAMBS: dict[str, tuple[tuple[Any, ...], str]] = {
    "max_grad_norm": ((None, 0, math.inf), _CLIP),
    "pre_norm": (_OFF, _CLIP),
    "use_nvlamb": (_OFF, _DECAYED),
    "always_adapt": (_OFF, _DECAYED),
    "adam_w_mode": (_ON, "the decay would go into the moments"),
    "grad_averaging": (_ON, "the first moment is an average"),
    "eps_inside_sqrt": (_OFF, "eps is outside of the root; eps=sqrt(eps) is a start"),
    "decoupled_decay": (_OFF, _INSIDE_THE_RATIO),
    "corrected_weight_decay": (_OFF, _INSIDE_THE_RATIO),
    "weight_decouple": (_OFF, _INSIDE_THE_RATIO),
    "fixed_decay": (_OFF, _INSIDE_THE_RATIO),
    "caution": (_OFF, _NOT_THERE),
    "rectify": (_OFF, _NOT_THERE),
    "adanorm": (_OFF, _NOT_THERE),
    "adam": (_OFF, 'layerwise="none" does that'),
}

_OF_OTHERS = {**_OF_TORCH, **_OF_LAMBS}

KNOWN = (*HYPERPARAMETER_NAMES, *OPTIONS, *WITHOUT_MEANING, *_OF_TORCH, "decayed")

_P = ParamSpec("_P")


def refusing_unknown(init: Callable[_P, None]) -> Callable[_P, None]:
    """A constructor that says what a name it does not know was meant to be. Type checkers see its own signature.

    Options of other optimizers are treated as in groups: what says what is so anyway has no effect.
    """
    names = list(inspect.signature(init).parameters)[2:]  # without self and params

    @functools.wraps(init)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> None:
        others = [name for name in kwargs if name in _OF_OTHERS and name not in names]
        check_torch_options({name: kwargs.pop(name) for name in others})
        unknown = (name for name in kwargs if name != "params" and name not in names)
        refuse_unknown(unknown, names, type(args[0]).__name__)
        init(*args, **kwargs)

    return checked


def check_torch_options(options: Mapping[str, Any]) -> None:
    """Raise for an option of torch.optim, or of another LAMB, that would not do what it says."""
    for name in WITHOUT_MEANING:
        if not isinstance(options.get(name), (bool, type(None))):
            raise ValueError(f"{name}={shown(options[name])} must be True, False or None; it has no effect on ALTO")
    for name, (harmless, reason) in _OF_OTHERS.items():
        value = options.get(name)  # None is what is so anyway, for all of them
        if not (isinstance(value, (bool, int, float, type(None))) and value in harmless):
            raise ValueError(f"{name}={shown(value)} is not possible with ALTO: {reason}. Leave {name!r} out")


def check_capturable(options: Mapping[str, Any]) -> bool:
    """Whether steps may be captured in CUDA graphs, given the other options of an optimizer."""
    capturable = options["capturable"]
    if not isinstance(capturable, bool):
        raise ValueError(f"capturable={shown(capturable)} must be True or False")
    if capturable and options["diagnostics_every"]:
        raise ValueError("diagnostics_every with capturable=True: a graph cannot tell which of its steps to measure")
    if capturable and options["kernel"] == "reference":
        raise ValueError('kernel="reference" with capturable=True: it takes the step count from the host; use "auto"')
    return capturable


def for_all_groups(given: Mapping[str, Any], groups: Sequence[Any]) -> dict[str, Any]:
    """The options of an optimizer: those given to its constructor, unless all of its groups say otherwise.

    Args:
        given: all ``OPTIONS``, as the constructor got them.
        groups: what the constructor got as ``params``.
    """
    chosen = dict(given)
    dicts = [group for group in groups if isinstance(group, dict)]
    for name in OPTIONS:
        values = [group.get(name, given[name]) for group in dicts]
        for g, value in enumerate(values):
            if _word(value) != _word(values[0]):
                raise ValueError(
                    f"{name}={shown(values[0])} in parameter group 0 and {shown(value)} in group {g}: it is one for "
                    f"all groups. Give {name} to ALTO, or the same to all groups"
                )
        if values:
            chosen[name] = values[0]
    return chosen


def without_options(group: dict[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """A group without options, which are checked: they must be the optimizer's own, ``current``."""
    refuse_near_misses((name for name in group if name not in _OF_LAMBS), KNOWN)
    check_torch_options(group)
    for name, value in current.items():
        if name in group and _word(group[name]) != _word(value):
            raise ValueError(
                f"{name}={shown(group[name])} in a parameter group, {shown(value)} in the optimizer: it is one for all "
                "groups. Leave it out of the group, or build the optimizer with it"
            )
    return {key: value for key, value in group.items() if key not in OPTIONS} if _has_option(group) else group


def refuse_in_mid_run(group: Mapping[str, Any]) -> None:
    """Raise for an option that somebody wrote into a group of a finished optimizer, where nothing would read it."""
    if _has_option(group):
        name = next(name for name in OPTIONS if name in group)
        raise ValueError(
            f"{name}={shown(group[name])} was written into a parameter group of a finished ALTO, where it has no "
            f"effect. Delete it from the group; build an ALTO with {name} to have it"
        )


def _has_option(group: Mapping[str, Any]) -> bool:
    return not _OPTION_SET.isdisjoint(group)


_OPTION_SET = frozenset(OPTIONS)


def _word(value: Any) -> str:
    """For comparison: torch.bfloat16 and "bfloat16" are one."""
    return (str(value) if isinstance(value, (str, torch.dtype)) else shown(value)).removeprefix("torch.")
