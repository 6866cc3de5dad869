"""Steps stay outside of the graphs of ``torch.compile``, which may hold a whole training step."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar
from weakref import WeakSet

import torch
from torch.optim import Optimizer

_Own = TypeVar("_Own", bound="EagerStep")


class EagerStep(Optimizer):
    """An optimizer whose step, hooks included, is called as it is where a compiled function calls it."""

    #: All that exist, so that a plugin notices one that its engine was never given.
    alive: ClassVar[WeakSet[EagerStep]] = WeakSet()

    def __new__(cls: type[_Own], *_args: Any, **_options: Any) -> _Own:
        self = super().__new__(cls)
        EagerStep.alive.add(self)
        return self

    def _patch_step_function(self) -> None:
        # Here torch puts its hooks around the class's step, once. Not at import: the compiler takes a second to load,
        # and building any optimizer loads it.
        super()._patch_step_function()
        cls = type(self)
        if not getattr(cls.step, "is_eager", False):
            cls.step = torch.compiler.disable(cls.step)  # type: ignore[method-assign,no-untyped-call]
            cls.step.is_eager = True  # type: ignore[attr-defined]
