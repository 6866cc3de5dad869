"""Work that ranks do each for themselves, or the first for all, and that ends in the same way on all of them.

A rank that fails alone leaves the others waiting in their next collective. Here what came of the work is exchanged
first: all ranks return, or all of them raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Result = TypeVar("Result")

#: Errors that keep their kind on the way to other ranks; any other is a RuntimeError there.
_KINDS: dict[str, type[Exception]] = {"OSError": OSError, "ValueError": ValueError}


def run_on_every_rank(work: Callable[[], Result]) -> list[Result]:
    """What ``work`` returns on each rank, on all of them. One collective.

    Raises:
        OSError, ValueError, RuntimeError: on all ranks, if it failed on any; the message says on which.
    """
    result, failure, error = _attempt(work)
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (result, failure))
    failures = {rank: outcome[1] for rank, outcome in enumerate(outcomes) if outcome[1] is not None}
    if failures:
        _raise(failures, error)
    return [outcome[0] for outcome in outcomes]


def run_on_rank0(work: Callable[[], Result], group: ProcessGroup | None = None) -> Result:
    """What ``work`` returns on rank 0 of ``group``, by default all ranks, on all of its ranks. One collective.

    Raises:
        OSError, ValueError, RuntimeError: on all ranks, if it failed there.
    """
    first = 0 if group is None else dist.get_global_rank(group, 0)
    result, failure, error = _attempt(work) if dist.get_rank() == first else (None, None, None)
    outcome: list[Any] = [(result, failure)]
    dist.broadcast_object_list(outcome, src=first, group=group)
    answer: Result = outcome[0][0]
    if outcome[0][1] is not None:
        _raise({0: outcome[0][1]}, error)
    return answer


def gather_on_rank0(value: Result) -> list[Result]:
    """The values of all ranks, on rank 0; none on the others. One collective."""
    values: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values)
    return values or []


def _attempt(work: Callable[[], Result]) -> tuple[Result | None, tuple[str, str] | None, Exception | None]:
    try:
        return work(), None, None
    except OSError as error:
        return None, ("OSError", str(error)), error
    except ValueError as error:
        return None, ("ValueError", str(error)), error
    except Exception as error:
        return None, ("RuntimeError", f"{type(error).__name__}: {error}"), error


def _raise(failures: dict[int, tuple[str, str]], own: Exception | None) -> None:
    """The same error on all ranks: a bug anywhere is one everywhere, then comes what a user can mend."""
    kinds = {kind for kind, _ in failures.values()}
    kind = next((kind for kind in ("RuntimeError", "ValueError", "OSError") if kind in kinds), "RuntimeError")
    by_message: dict[str, list[int]] = {}
    for rank, (_, message) in failures.items():
        by_message.setdefault(message, []).append(rank)
    everywhere = len(by_message) == 1 and (len(failures) == dist.get_world_size() or list(failures) == [0])
    parts = [
        message if everywhere else f"rank {', '.join(map(str, ranks))}: {message}"
        for message, ranks in by_message.items()
    ]
    raise _KINDS.get(kind, RuntimeError)("; ".join(parts)) from own
