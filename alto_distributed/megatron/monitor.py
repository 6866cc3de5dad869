"""Diagnostics in Megatron-LM's log, in TensorBoard and in W&B: the smallest, middle and largest of each reading.

They go where Megatron-LM's own go: the last rank prints, and has the writers. That rank knows the parameters of which
it holds a piece; their norms are those of whole parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from statistics import median
from typing import Any

import torch

from ..diagnostics import Reading
from ..optimizer import ALTO

_watched: weakref.WeakSet[ALTO] = weakref.WeakSet()


def watch(optimizers: Iterable[ALTO]) -> None:
    """Show the diagnostics of these from now on."""
    _watched.clear()
    _watched.update(optimizers)


def show(iteration: int, writers: Iterable[Any]) -> None:
    """Write what has been measured since the last call, if this is the last rank.

    Args:
        iteration: of the training.
        writers: TensorBoard's and W&B's, as Megatron-LM keeps them; None for one that is not used.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != torch.distributed.get_world_size() - 1:
        return
    fresh = [alto for alto in _watched if alto.has_new_diagnostics()]
    readings = [reading for alto in fresh for reading in alto.diagnostics().values()]
    if not readings:
        return
    scalars = summary(readings)
    words = " | ".join(f"{name}: {value:.3E}" for name, value in scalars.items())
    print(f" [ALTO] iteration {iteration:8d} | {words} |", flush=True)
    tagged = {f"alto/{name.replace(' ', '_')}": value for name, value in scalars.items()}
    for writer in writers:
        if hasattr(writer, "add_scalar"):
            for tag, value in tagged.items():
                writer.add_scalar(tag, value, iteration)
        elif writer is not None:
            writer.log(tagged, iteration)


def summary(readings: Iterable[Reading]) -> dict[str, float]:
    """The smallest, middle and largest of each field, such as ``trust_ratio median``."""
    columns = zip(*readings, strict=True)
    return {
        f"{field} {name}": float(pick(column))
        for field, column in zip(Reading._fields, columns, strict=True)
        for name, pick in (("min", min), ("median", median), ("max", max))
    }
