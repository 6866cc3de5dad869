"""Frameworks that ALTO cannot be registered with, for example because of their version.

Such a framework works as if this package were not there, until a program asks it for ALTO. Then ALTO is refused, with
the reason. It is not refused earlier: many programs import DeepSpeed or Megatron without using ALTO there.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch.optim import Optimizer

from .errors import UnsupportedVersion

#: Names under which an engine may be asked for one of our optimizers, in lower case.
NAMES = ("alto", "alto_lamb", "eadamw", "esgd")

#: Framework -> where a program asks it for an optimizer: module, class or "", function.
DOORS = {
    "deepspeed": ("deepspeed.runtime.engine", "DeepSpeedEngine", "__init__"),
    "megatron.core": ("megatron.core.optimizer", "", "get_megatron_optimizer"),
}


def refuse_when_asked(framework: str, reason: Exception) -> str | None:
    """Refuse ALTO in ``framework`` from now on.

    Returns:
        The module that has to be imported before this can be done, or None if it is done.

    Raises:
        UnsupportedVersion: the command line asks for ALTO already.
    """
    error = reason if isinstance(reason, UnsupportedVersion) else UnsupportedVersion(_unknown(framework, reason))
    if framework not in DOORS:  # Megatron-LM's scripts: their command line is the door
        if _asked_by_command_line(sys.argv):
            raise error from reason
        return None
    module, owner, name = DOORS[framework]
    loaded = sys.modules.get(module)
    if loaded is None:
        return module
    place: Any = getattr(loaded, owner, None) if owner else loaded
    if hasattr(place, name):  # else it is too old to be asked
        _replace(place, name, _refusing(getattr(place, name), error))
    return None


def _unknown(framework: str, reason: Exception) -> str:
    said = " ".join(str(reason).split())
    return f"alto_distributed does not know this version of {framework} ({type(reason).__name__}: {said})"


def _refusing(function: Callable[..., Any], error: UnsupportedVersion) -> Callable[..., Any]:
    """``function``, unless one of its arguments asks for ALTO or it has built an engine with one."""
    if getattr(function, "refuses_alto", False):
        return function

    @functools.wraps(function)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        if any(map(_asks, (*args, *kwargs.values()))):
            raise error
        result = function(*args, **kwargs)
        if args and _is_ours(getattr(args[0], "basic_optimizer", None)):  # an engine whose client gave a callable
            raise error
        return result

    refusing.refuses_alto = True  # type: ignore[attr-defined]
    return refusing


def _replace(place: Any, name: str, by: Callable[..., Any]) -> None:
    """Replace an attribute of a class, or a function of a module wherever it has been imported to."""
    original = getattr(place, name)
    setattr(place, name, by)
    if isinstance(place, ModuleType):
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is original:
                setattr(module, name, by)


def _asks(value: Any) -> bool:
    """Whether an argument is one of our optimizers, or a configuration that names one."""
    if _is_ours(value):
        return True
    named = value.get("optimizer") if isinstance(value, dict) else None
    name: Any = named.get("type") if isinstance(named, dict) else None
    if not isinstance(value, dict):
        # DeepSpeed's configuration has the one, Megatron's the other.
        name = getattr(value, "optimizer_name", None) or getattr(value, "optimizer", None)
    return isinstance(name, str) and name.lower() in NAMES


def _is_ours(value: Any) -> bool:
    bases = type(value).__mro__ if isinstance(value, Optimizer) else ()
    return any(cls.__module__.partition(".")[0] == __package__ for cls in bases)


def _asked_by_command_line(arguments: list[str]) -> bool:
    given = "\n".join(arguments).replace("--optimizer=", "--optimizer\n").split("\n")
    return any(flag == "--optimizer" and name.lower() in NAMES for flag, name in itertools.pairwise(given))
