"""How a method of DeepSpeed's is wrapped: in one way everywhere, and loudly when it is not there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap_method(cls: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace ``cls.name`` by ``wrapper(original, self, *args, **kwargs)``, with the original already bound.

    Raises:
        ValueError: the class has no such method; this version of DeepSpeed is not the one we know.
    """
    original = getattr(cls, name, None)
    if original is None:
        raise ValueError(
            f"DeepSpeed's {cls.__name__} has no method {name}, which alto_distributed wraps; install a version of "
            "DeepSpeed that it supports"
        )

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(functools.partial(original, self), self, *args, **kwargs)

    method.knows_alto = True  # type: ignore[attr-defined]
    setattr(cls, name, method)
