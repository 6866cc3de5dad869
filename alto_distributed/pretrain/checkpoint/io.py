"""For engines that write a checkpoint: what is in which file, and failing only when all ranks are through."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Written:
    """What is known about a file of a checkpoint."""

    rank: int
    """Who wrote it."""
    states: Mapping[str, str]
    """Name of each tensor in it, and its type and shape: ``float32[1024, 64]``."""


def describe(value: Any, where: str = "") -> dict[str, str]:
    """Every tensor in dicts, lists and tuples: its path, and its type and shape."""
    if isinstance(value, torch.Tensor):
        return {where or "tensor": shape_of(value.dtype, value.shape)}
    if isinstance(value, Mapping):
        items: Iterator[tuple[Any, Any]] = iter(value.items())
    elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        items = enumerate(value)
    else:
        return {}
    found: dict[str, str] = {}
    for key, inner in items:
        found.update(describe(inner, f"{where}.{key}" if where else str(key)))
    return found


def shape_of(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


@contextlib.contextmanager
def failing_late(*methods: tuple[Any, str]) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """While an engine writes with these methods, (owner, name) each: a disk's error is raised when all is done.

    What it gives calls a function in the same way.

    Frameworks put barriers between their writes. A rank that left at its first error would leave the others there.

    Raises:
        OSError: one of them failed. torch.save says RuntimeError when the disk is full, so that is one too.
    """
    problems: list[str] = []

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def attempt(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except (OSError, RuntimeError) as error:
                # The message alone: the error's frames would keep the file open, and the full disk full.
                problems.append(str(error).partition("\n")[0])  # torch appends the C++ stack
                return None

        return attempt

    try:
        with contextlib.ExitStack() as stack:
            for owner, name in methods:
                stack.enter_context(replaced(owner, name, noting(getattr(owner, name))))
            yield lambda work: noting(work)()
    except Exception as error:
        if not problems:
            raise
        raise OSError(problems[0]) from error  # which is a consequence
    if problems:
        raise OSError(problems[0])


@contextlib.contextmanager
def replaced(owner: Any, name: str, by: Any) -> Iterator[None]:
    """An attribute of an object, class or module is another one meanwhile."""
    own = name in vars(owner)
    before = vars(owner)[name] if own else None
    setattr(owner, name, by)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
