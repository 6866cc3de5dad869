"""Registration with the frameworks: now for those that are loaded, at their import for the others.

Nothing is imported that the user's program does not import itself, and no program fails at import because of us: where
ALTO cannot be registered, it is refused when it is asked for (:mod:`.unregistered`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from .unregistered import refuse_when_asked

#: Module of a framework -> what makes ALTO known to it: a module here, which registers when it is imported,
#: or a function of one, for a framework that arrives in several parts.
FRAMEWORKS = {
    "deepspeed": "alto_distributed.deepspeed",
    # The whole of it: its optimizers are imported while it is still being imported itself.
    "megatron.core": "alto_distributed.megatron",
    # Megatron-LM's scripts; each of the two may be imported without the other, and in either order.
    "megatron.training.arguments": "alto_distributed.megatron.command_line:patch_arguments",
    "megatron.training.training": "alto_distributed.megatron.command_line:patch_training",
}

#: Those that ALTO could not be registered with: they are not tried again.
_unregistered: dict[str, ModuleType] = {}


def register() -> None:
    """Make ALTO known to DeepSpeed and Megatron, in either order of imports. Calling it again changes nothing."""
    register_loaded()
    if not any(isinstance(finder, _Frameworks) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Frameworks())


def register_loaded() -> None:
    """Register with the frameworks that are loaded.

    Building an ALTO calls this too: a client-built optimizer must never reach an engine that does not know it.
    """
    for framework in FRAMEWORKS:
        if framework in sys.modules and sys.modules[framework] is not _unregistered.get(framework):
            _register_with(framework)


def _register_with(framework: str) -> None:
    module, _, function = FRAMEWORKS[framework].partition(":")
    try:
        loaded = importlib.import_module(module)
        if function:
            getattr(loaded, function)()
    except Exception as reason:  # another release may fail in any way, and its users may not want ALTO at all
        _unregistered[framework] = sys.modules[framework]
        _refuse_when_asked(framework, reason)


def _refuse_when_asked(framework: str, reason: Exception) -> None:
    missing = refuse_when_asked(framework, reason)
    if missing is not None:
        sys.meta_path.insert(0, AfterImport({missing: lambda: _refuse_when_asked(framework, reason)}))


class AfterImport(importlib.abc.MetaPathFinder):
    """Sees a module's import begin, and acts when it has ended. To be put first in ``sys.meta_path``.

    Args:
        actions: name of a module -> what to do after it has been imported.
    """

    def __init__(self, actions: dict[str, Callable[[], None]]) -> None:
        self._actions = actions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._actions:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                _act_after(spec.loader, self._actions[fullname])
                return spec
        return None


class _Frameworks(AfterImport):
    def __init__(self) -> None:
        super().__init__({framework: functools.partial(_register_with, framework) for framework in FRAMEWORKS})


def _act_after(loader: Any, action: Callable[[], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        package, _, name = module.__name__.rpartition(".")
        if package:  # Python binds it there when this has returned, and the action may want to say package.name
            setattr(sys.modules[package], name, module)
        action()

    loader.exec_module = exec_module
