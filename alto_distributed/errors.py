"""The errors a user can cause, each a ValueError.

Five of them also carry the type that PyTorch or Python would have raised at the same place, so that
code written against ``torch.optim`` keeps catching them.
"""

import argparse
import difflib
import os
import sys
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

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
    near = nearest(name, known, cutoff)
    return f"; did you mean {near!r}?" if near else ""


def nearest(name: Any, known: Sequence[str], cutoff: float) -> str:
    """The known name that is most like ``name``, in any letter case; "" if none is."""
    return next(iter(difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=cutoff)), "")


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


class Refused(SystemExit):
    """The end of a command, with the message as its only argument."""

    code: int

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Diverged(RuntimeError):
    """The end of a run whose loss or gradients are not finite any more. It is the same on all ranks."""


def refused(command: str, error: Exception | str) -> Refused:
    """What to raise at the end of a command. The message is on stderr, once for all ranks of a machine.

    The exit code is 2 for bad input, and 1 for what the machine lacks (a package, a file, space on its disk) and for
    what came of a run.
    """
    message = f"alto_distributed {command}: {error}" if command else f"alto_distributed: {error}"
    if _is_first_to_say(message):
        print(message, file=sys.stderr, flush=True)
    is_input = isinstance(error, str) or (isinstance(error, ValueError) and not isinstance(error, ImportError))
    return Refused(message, 2 if is_input else 1)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise refused(self.prog.rpartition(" ")[2], f"{message}; see {self.prog} --help")


#: The rank of a process under mpirun, other launchers of MPI, and DeepSpeed's.
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")


def _is_first_to_say(message: str) -> bool:
    """Whether no other rank of this launch on this machine has said the same. A message of one rank alone is said.

    The first to say it leaves a link that points to its rank: it takes one call to make and to read.
    """
    rank = next((os.environ[name] for name in _RANK_VARIABLES if os.environ.get(name)), "")
    if not rank.isdigit():
        return True
    said = f"said-{zlib.crc32(message.encode())}"
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # ATTEMPT/RANK/error.json
    if error_file:
        path = Path(error_file).parent.parent / said
    else:  # ranks of other launchers have the same parent
        path = Path(tempfile.gettempdir()) / f"alto-{os.getuid()}-{os.getppid()}-{_began(os.getppid())}-{said}"
    try:
        path.symlink_to(rank)
        return True
    except FileExistsError:
        pass
    except OSError:
        return True
    try:
        # A link of another user says nothing. One of the same rank is of an earlier start by the same shell.
        return path.lstat().st_uid != os.getuid() or str(path.readlink()) == rank
    except OSError:
        return True


def _began(process: int) -> str:
    """When a process began, in ticks: numbers of processes are used again."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "0"
