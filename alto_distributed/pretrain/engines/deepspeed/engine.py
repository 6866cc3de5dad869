"""DeepSpeed as the engine of a pretraining run: data-parallel, with the ZeRO stage of the run's JSON."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from ....deepspeed.register import not_stepping, register
from ....diagnostics import Reading
from ....errors import Diverged
from ....optimizer import ALTO
from ... import optimizers
from ...checkpoint.io import Written
from ...config.settings import Run
from ...model import build_model, document_end, inputs_of, next_token_loss, seed_dropout
from ...runtime.same_settings import same_settings
from ...runtime.stopwatch import Stopwatch
from ..base import Step
from . import checkpoint
from .config import deepspeed_config, refuse_what_deepspeed_refuses


def build(run: Run) -> DeepSpeedTraining:
    """The engine, with fresh weights. Called by all ranks, under torchrun or what sets its variables.

    Raises:
        ValueError: the run or its JSON is not one that this engine can train.
    """
    register()
    if not torch.distributed.is_initialized():
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ValueError(f"{', '.join(missing)} not set: start the run with torchrun, deepspeed or mpirun")
    _set_device()
    with _nothing_compiled():
        limit = timedelta(seconds=run.training.timeout)
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False, timeout=limit)
    same_settings(run)
    return DeepSpeedTraining(run)


def _set_device() -> None:
    """Before the first collective: NCCL refuses a tensor on another device than the one this rank is bound to."""
    accelerator = get_accelerator()
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if accelerator.device_name() != "cpu":
        # Some schedulers show each task its own GPU only, as number 0. DeepSpeed goes by LOCAL_RANK as well.
        index %= accelerator.device_count()
        os.environ["LOCAL_RANK"] = str(index)
    accelerator.set_device(index)


@contextlib.contextmanager
def _nothing_compiled() -> Iterator[None]:
    """On CPUs DeepSpeed compiles its shared-memory all-reduce as ranks connect: a minute of g++, or an error where
    there is none, for something that inference and AutoTP use, and we do not."""
    usable, name = deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm"
    before = usable.get(name, False)
    usable[name] = False
    try:
        yield
    finally:
        usable[name] = before


@contextlib.contextmanager
def _diverging() -> Iterator[None]:
    """What DeepSpeed's loss scaler says, in an Exception of no type of its own, when it can go no lower."""
    try:
        yield
    except Exception as error:
        if "loss scale already at minimum" not in str(error):
            raise
        raise Diverged(
            "gradients overflow fp16 at the lowest loss scale: lower optimizer.lr, look at the data, or set "
            "training.precision=bf16"
        ) from error


class DeepSpeedTraining:
    """See :class:`alto_distributed.pretrain.engines.base.Engine`."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.data_parallel_rank = int(dist.get_rank())
        self.data_parallel_size = int(dist.get_world_size())
        config = deepspeed_config(run, self.data_parallel_size)
        self._accumulation = int(config["gradient_accumulation_steps"])
        refuse_what_deepspeed_refuses(config, run.deepspeed.config)
        self._document_end = document_end(run)
        model = build_model(run)
        groups = optimizers.build_groups(run, model)
        optimizer = optimizers.build_optimizer(run, groups)
        # Stage 0 takes a step with zero gradients when it is built, which would decay weights and count.
        with not_stepping(optimizer):
            self._engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        self.device = torch.device(self._engine.device)
        if self._engine.dp_world_size != self.data_parallel_size:
            raise ValueError(
                f"the DeepSpeed JSON leaves {self._engine.dp_world_size} of {self.data_parallel_size} ranks to data "
                "parallelism; remove other kinds of parallelism from it, or set engine: megatron"
            )
        if getattr(self._engine.checkpoint_engine, "is_decoupled", bool)():  # not there before 0.17
            raise ValueError('remove "checkpoint": {"writer": ...} from the DeepSpeed JSON: a checkpoint must be on '
                             "disk when save() returns")  # fmt: skip

    def train(self, micro_batches: Sequence[torch.Tensor], lr: float) -> Step:
        engine, wanted = self._engine, len(micro_batches)
        if wanted != self._accumulation:
            self._accumulate(wanted)
        # The wrappers of all stages step with these very groups.
        for group in engine.basic_optimizer.param_groups:
            group["lr"] = lr
        engine.train()
        seed_dropout(self._run, engine.global_steps, self.data_parallel_rank)
        watch = Stopwatch(self.device)
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        for tokens in micro_batches:
            with watch.measuring("forward"):
                loss = self._loss(tokens)
            with watch.measuring("backward"):
                engine.backward(loss)
            with watch.measuring("optimizer"), _diverging():
                engine.step()  # before the last micro-batch it only counts
            total += loss.detach() / wanted
        dist.all_reduce(total)
        norm = engine.get_global_grad_norm()
        return Step(
            loss=total.item() / self.data_parallel_size,
            grad_norm=math.nan if norm is None else float(norm),
            skipped=not engine.was_step_applied(),
            seconds=watch.seconds(),
        )

    def _accumulate(self, micro_batches: int) -> None:
        """Take so many micro-batches in the next steps."""
        if not micro_batches or not self._run.training.batch_ramp.start:
            raise ValueError(
                f"{micro_batches} micro-batches, and a step of this run has {self._accumulation} on each rank"
            )
        engine = self._engine
        engine.set_train_batch_size(micro_batches * engine.train_micro_batch_size_per_gpu() * self.data_parallel_size)
        # DeepSpeed finds the last micro-batch of a step by counting them all, as if every step had had as many.
        engine.micro_steps = 0
        if hasattr(engine.optimizer, "gradient_accumulation_steps"):  # ZeRO's, with offload, decides by its own copy
            engine.optimizer.gradient_accumulation_steps = micro_batches
        self._accumulation = micro_batches

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[torch.Tensor]) -> float:
        self._engine.eval()
        # Weighted by tokens, in float64: the mean must not depend on how samples were put into micro-batches.
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for tokens in micro_batches:
            count = tokens[:, 1:].numel()
            sums[0] += self._loss(tokens).double() * count
            sums[1] += count
        self._engine.train()
        dist.all_reduce(sums)
        loss, count = sums.tolist()
        if not count:
            raise ValueError("there is nothing to evaluate: no rank has a micro-batch")
        return float(loss / count)

    def save(self, directory: Path) -> Mapping[Path, Written]:
        return checkpoint.save(self._engine, self._run, directory)

    def load(self, directory: Path, saved_by: int) -> None:
        checkpoint.load(self._engine, self._run, directory, saved_by)

    def diagnostics(self) -> Mapping[str, Reading]:
        optimizer = self._engine.basic_optimizer
        return optimizer.diagnostics() if isinstance(optimizer, ALTO) else {}

    def close(self) -> None:
        self._engine.destroy()

    def _loss(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens.to(self.device, torch.long, non_blocking=True)
        return next_token_loss(self._engine(**inputs_of(tokens, self._document_end)).logits, tokens)
