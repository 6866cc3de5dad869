"""Work that ranks do each for themselves, or the first for all, and that ends in the same way on all of them.

A rank that fails alone leaves the others waiting in their next collective. Here what came of the work is exchanged
first: all ranks return, or all of them raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from ...sharding.agreement import require_agreement
from ...sharding.collective import everyone
from ..config.settings import Run

Result = TypeVar("Result")

#: Errors that keep their kind on the way to other ranks; any other is a RuntimeError there.
_KINDS: dict[str, type[Exception]] = {"OSError": OSError, "ValueError": ValueError}


#: Settings that name places: those of a rank's own machine may well be others.
_PLACES = ("data.directory", "deepspeed.config")


def same_settings(run: Run) -> None:
    """All ranks must run the same settings. One small collective.

    Raises:
        ValueError: on all ranks; names the settings that differ, and the ranks.
    """
    world = everyone()
    if world is not None:
        require_agreement(world, {name: said for name, said in _flat(run.as_dict()) if name not in _PLACES})


def _flat(settings: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{where}{key}.")
        else:
            yield f"{where}{key}", repr(value)


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


def run_on_rank0(work: Callable[[], Result]) -> Result:
    """What ``work`` returns on rank 0, on all of them. One collective.

    Raises:
        OSError, ValueError, RuntimeError: on all ranks, if it failed there.
    """
    result, failure, error = _attempt(work) if dist.get_rank() == 0 else (None, None, None)
    outcome: list[Any] = [(result, failure)]
    dist.broadcast_object_list(outcome, src=0)
    answer: Result = outcome[0][0]
    if outcome[0][1] is not None:
        _raise({0: outcome[0][1]}, error)
    return answer


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
