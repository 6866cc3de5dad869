"""Registration with the frameworks: now for those that are loaded, at their import for the others.

Nothing is imported that the user's program does not import itself.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

#: Framework -> the folder here that knows it. Importing the folder registers.
FRAMEWORKS = {"deepspeed": "alto_distributed.deepspeed"}


def register() -> None:
    """Make ALTO known to DeepSpeed, in either order of imports. Calling it again changes nothing.

    Raises:
        ValueError: a framework that is loaded already is of a version this package was not made for.
    """
    for framework, folder in FRAMEWORKS.items():
        if framework in sys.modules:
            importlib.import_module(folder)
    if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def register_loaded() -> None:
    """Called when an ALTO is built: a client-built optimizer must never reach an engine that does not know it.

    A framework of an unknown version may be loaded without ever seeing this optimizer, so that is a
    warning here and an error in :func:`register`.
    """
    for framework, folder in FRAMEWORKS.items():
        if framework in sys.modules and folder not in sys.modules:
            try:
                importlib.import_module(folder)
            except ValueError as error:
                warnings.warn(f"ALTO is not registered with {framework}, do not use it there: {error}", stacklevel=4)


class _Watch(importlib.abc.MetaPathFinder):
    """Sees a framework's import begin, and registers when it has ended."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in FRAMEWORKS:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                _register_after(spec.loader, FRAMEWORKS[fullname])
                return spec
        return None


def _register_after(loader: Any, folder: str) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        importlib.import_module(folder)

    loader.exec_module = exec_module
