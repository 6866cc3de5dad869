"""The errors a user can cause, each a ValueError.

Five of them also carry the type that PyTorch or Python would have raised at the same place, so that
code written against ``torch.optim`` keeps catching them.
"""

import difflib
from collections.abc import Sequence
from typing import Any

import torch

_LONGEST = 200


def shown(value: Any) -> str:
    """A value for a message: its repr on one line, cut where it gets long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def named(name: str) -> str:
    """A name for a message: as it is, unless it has what does not belong into one line."""
    return name if name.isprintable() and len(name) <= _LONGEST else shown(name)


def did_you_mean(name: Any, known: Sequence[str], cutoff: float = 0.5) -> str:
    """The end of a message about an unknown name: the nearest known one, or nothing."""
    near = difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def is_one_of(value: Any, known: Sequence[str]) -> bool:
    """Whether a value is one of some words. A plain ``in`` would ask an array whether it equals one: it cannot say."""
    return isinstance(value, str) and value in known


class UnknownHyperparameter(ValueError, TypeError):
    """A name that ALTO does not have. Python itself raises TypeError for an unexpected argument."""


class UnsupportedVersion(ValueError, ImportError):
    """A framework that this package was not made for. Found out at import, where Python raises ImportError."""


class MissingExtra(ValueError, ModuleNotFoundError):
    """A module that one of this package's extras installs."""


class UnsupportedTensor(ValueError, RuntimeError):
    """A sparse or complex tensor. ``torch.optim`` raises RuntimeError for a sparse gradient."""


class MisfittingTensor(ValueError, RuntimeError):
    """A parameter of another size or device than its states. ``torch.optim`` raises RuntimeError for it."""


def refuse_unsupported_gradient(who: str, grad: torch.Tensor) -> None:
    """Raise for a gradient that is sparse or complex."""
    if grad.layout != torch.strided:
        raise UnsupportedTensor(
            f"{who} does not support sparse gradients: its states are dense. Build the embedding with sparse=False"
        )
    if grad.is_complex():
        raise UnsupportedTensor(f"{who} does not support complex gradients; use torch.view_as_real")


def one_line(error: BaseException) -> str:
    """An exception in one line: its type and what it says, cut where that gets long."""
    said = " ".join(str(error).split())
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return text if len(text) <= 2 * _LONGEST else f"{text[: 2 * _LONGEST]}..."
