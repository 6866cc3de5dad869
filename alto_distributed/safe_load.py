"""Loading files of ``torch.save`` without running code from them.

``torch.save`` writes pickles, and a pickle can name any function and have it called. torch's restricted unpickler
(``weights_only=True``) takes tensors, containers and the classes that it is told of, and calls nothing else.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

_FORCE, _FORCE_NOT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


@contextlib.contextmanager
def only_data(classes: Sequence[Any]) -> Iterator[None]:
    """Every ``torch.load`` in here takes tensors, containers and these classes, and refuses the rest.

    Also one that asks for ``weights_only=False``, as frameworks do, and those of processes that are forked in here.
    """
    before = {name: os.environ.pop(name, None) for name in (_FORCE, _FORCE_NOT)}
    os.environ[_FORCE] = "1"
    # At its end a block takes out what it has put in, also where the block around it had put in the same.
    known = list(torch.serialization.get_safe_globals())
    try:
        with torch.serialization.safe_globals([c for c in classes if c not in known]):
            yield
    finally:
        del os.environ[_FORCE]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def more_than_data(path: Path) -> str | None:
    """What a file of ``torch.save`` holds that :func:`only_data` refuses; None if it is data. Call it in there.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        # On the meta device no tensor is read, only what says which tensors there are.
        torch.load(path, map_location="meta", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        return f"{path.name} ({_names(path) or str(error).strip().partition(chr(10))[0]})"
    return None


def _names(path: Path) -> str:
    """The functions and classes that it asks for."""
    try:
        return ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path)))
    except Exception:  # it may not even be a file of torch.save
        return ""
