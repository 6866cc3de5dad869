"""What the training loop asks of an engine. Each framework's folder has one, in ``engine.py``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch

from ...diagnostics import Reading
from ..checkpoint.io import Written
from ..config.settings import Run


@dataclass
class Step:
    """What came of one optimizer step. Equal on all ranks."""

    loss: float
    """Mean over the tokens of the global batch, before the step, in nats."""
    grad_norm: float
    """Of the whole model, before clipping; NaN where the engine does not tell."""
    skipped: bool = False
    """Some gradient was not finite: nothing was changed."""
    seconds: Mapping[str, float] | None = None
    """Where the time went on this rank: "forward", "backward", "optimizer", as far as the engine can tell."""


class Engine(Protocol):
    """A model, its optimizer and the ranks they are spread over."""

    data_parallel_rank: int
    """Which part of the batch is this rank's. Ranks of one tensor- or pipeline-parallel group share it."""
    data_parallel_size: int
    device: torch.device

    def train(self, micro_batches: Sequence[torch.Tensor], lr: float) -> Step:
        """One optimizer step on this rank's micro-batches, each [samples, sequence + 1] of token ids.

        Raises:
            Diverged: on all ranks, if there can be no step any more.
        """

    def evaluate(self, micro_batches: Sequence[torch.Tensor]) -> float:
        """Mean loss over the tokens of all ranks' micro-batches. All ranks have as many."""

    def save(self, directory: Path) -> Mapping[Path, Written]:
        """Write weights, states, step count and loss scale into an empty directory. Called by all ranks.

        Returns:
            Files with tensors, by path, as far as this rank knows what is in them.
        """

    def load(self, directory: Path, saved_by: int) -> None:
        """Continue from what :meth:`save` wrote. Called by all ranks.

        Args:
            directory: that was saved into.
            saved_by: how many ranks saved it; perhaps others than these.
        """

    def diagnostics(self) -> Mapping[str, Reading]:
        """ALTO's readings of the parameters that this rank knows about; empty for other optimizers."""

    def close(self) -> None:
        """Give back the framework's memory and hooks. The engine cannot be used afterwards."""


def build(run: Run) -> Engine:
    """The engine that a run names, with freshly initialized weights. Called by all ranks."""
    module = importlib.import_module(f"alto_distributed.pretrain.engines.{run.engine}.engine")
    return cast(Engine, module.build(run))


def check(run: Run, data_parallel: int) -> None:
    """Refuse what the engine of a run would refuse, as far as that needs neither the framework nor ranks.

    Raises:
        ValueError: as :func:`build`.
    """
    importlib.import_module(f"alto_distributed.pretrain.engines.{run.engine}.checks").check(run, data_parallel)


def read_weights(run: Run, directory: Path) -> dict[str, torch.Tensor]:
    """The whole weights of a checkpoint that :meth:`Engine.save` wrote, by the names of the run's model, on the CPU.

    In the precision in which the run trained. Called by one process, without ranks.

    Raises:
        ValueError: a file holds more than data, or not the weights of this model.
    """
    module = importlib.import_module(f"alto_distributed.pretrain.engines.{run.engine}.weights")
    return cast("dict[str, torch.Tensor]", module.read(run, directory))
