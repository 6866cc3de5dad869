"""Pretraining with megatron-core: its GPTModel, schedules, gradient buffers, distributed optimizer and checkpoints."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module

from ....diagnostics import Reading
from ....megatron.build import diagnostics
from ....megatron.config import AltoOptimizerConfig
from ....megatron.param_gather import finish_param_gather
from ...checkpoint.io import Written
from ...config.settings import Run
from ...model import document_end, initial_weights, inputs_of, seed_from
from ...optimizers import ALTO_NAMES, arguments
from ...runtime.same_settings import same_settings
from ...runtime.stopwatch import Stopwatch
from ..base import Step
from . import checkpoint
from .checks import check_optimizer
from .model import build_model, layers_before, transformer_config
from .translate import name_in_run

#: Where the names of a model's parameters begin.
_PARTS = ("embedding.", "decoder.", "output_layer.")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def build(run: Run) -> MegatronTraining:
    """The engine of :mod:`alto_distributed.pretrain.engines.base`. Called by all ranks."""
    device = _device()
    if not dist.is_initialized():
        limit = timedelta(seconds=run.training.timeout)
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl", timeout=limit)
    same_settings(run)
    layout = run.megatron
    parallel_state.initialize_model_parallel(layout.tensor_parallel, layout.pipeline_parallel)
    return MegatronTraining(run, device)


class MegatronTraining:
    """See :class:`alto_distributed.pretrain.engines.base.Engine`."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self.run, self.device = run, device
        self.data_parallel_rank = parallel_state.get_data_parallel_rank()
        self.data_parallel_size = parallel_state.get_data_parallel_world_size()
        run.accumulation(self.data_parallel_size)
        self._document_end = document_end(run)
        self._steps = 0
        dtype = _DTYPES[run.training.precision]
        config = transformer_config(run, dtype)
        model_parallel_cuda_manual_seed(run.training.seed)
        model: Any = build_model(run, config, initial_weights(run)).to(device)
        if dtype != torch.float32:
            model = Float16Module(config, model)
        layout = run.megatron
        self._model = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=layout.distributed_optimizer,
                overlap_grad_reduce=layout.overlap,
                overlap_param_gather=layout.overlap and layout.distributed_optimizer,
            ),
            model,
        )
        self._optimizer = get_megatron_optimizer(optimizer_config(run, dtype), [self._model])
        self._set_decay()
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self._optimizer.scale_loss
        if layout.overlap:
            config.no_sync_func = self._model.no_sync
        self._passes = get_forward_backward_func()

    def _set_decay(self) -> None:
        """There is no scheduler of Megatron's that would do it."""
        for group in self._optimizer.param_groups:
            group["weight_decay"] = self.run.optimizer.weight_decay * group.get("wd_mult", 1.0)

    def train(self, micro_batches: Sequence[torch.Tensor], lr: float) -> Step:
        self._model.train()
        # Dropout follows from the seed, the step and the rank, so that a resumed run draws the same.
        seed = seed_from(self.run.training.seed, "dropout", self._steps, self.data_parallel_rank)
        model_parallel_cuda_manual_seed(seed % 2**31, force_reset_rng=True)
        self._steps += 1
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        watch = Stopwatch(self.device)
        with watch.measuring("forward_backward"):
            loss = self._run(micro_batches, forward_only=False)
        with watch.measuring("optimizer"):
            done, norm, _ = self._optimizer.step()
        return Step(loss, math.nan if norm is None else float(norm), not done, watch.seconds())

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[torch.Tensor]) -> float:
        self._model.eval()
        return self._run(micro_batches, forward_only=True)

    def _run(self, micro_batches: Sequence[torch.Tensor], forward_only: bool) -> float:
        """The passes over this rank's micro-batches; the mean loss over the tokens of all ranks."""
        losses = self._passes(
            forward_step_func=functools.partial(_forward, self._document_end),
            data_iterator=iter([batch.to(self.device) for batch in micro_batches]),
            model=[self._model],
            num_microbatches=len(micro_batches),
            seq_length=self.run.model.sequence,
            micro_batch_size=len(micro_batches[0]),
            forward_only=forward_only,
        )
        # Only the last pipeline stage has a loss, and all of its tensor-parallel ranks have the same.
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        if losses:
            values = torch.stack([entry["loss"] for entry in losses]).double()
            weights = torch.tensor(
                [float(len(batch)) for batch in micro_batches], dtype=torch.float64, device=self.device
            )
            sums[0], sums[1] = (values * weights).sum(), weights.sum()
        dist.all_reduce(sums)
        return float(sums[0] / sums[1])

    def save(self, directory: Path) -> Mapping[Path, Written]:
        finish_param_gather([self._model])
        metadata = self._metadata()
        state = self._described(metadata, is_loading=False)
        state["steps"] = self._steps
        return checkpoint.save(state, directory, metadata)

    def load(self, directory: Path, saved_by: int) -> None:
        metadata = self._metadata()
        loaded = checkpoint.load(self._described(metadata, is_loading=True), directory)
        self._module().load_state_dict(loaded["model"])
        self._optimizer.load_state_dict(loaded["optimizer"])
        self._set_decay()  # the run's: what was loaded is that of the run that saved
        self._steps = loaded["steps"]
        if self.run.megatron.distributed_optimizer:
            self._weights_from_masters()

    @torch.no_grad()
    def _weights_from_masters(self) -> None:
        """Round the float32 weights to the model's: version 0.1.0 saved a model that mixed two steps, with overlap."""
        for wrapper in self._optimizer.chained_optimizers:
            wrapper._copy_main_params_to_model_params()
        self._model.start_param_sync(force_sync=True)

    def _described(self, metadata: dict[str, Any], is_loading: bool) -> dict[str, Any]:
        model = self._module().sharded_state_dict(metadata=metadata)
        optimizer = self._optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}

    def _metadata(self) -> dict[str, Any]:
        metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        if self.run.megatron.distributed_optimizer:
            metadata["distrib_optim_sharding_type"] = self.run.megatron.checkpoint_format
        return metadata

    def _module(self) -> Any:
        module = self._model.module
        return module.module if isinstance(module, Float16Module) else module

    def diagnostics(self) -> Mapping[str, Reading]:
        # Under the names of the run's model, which are those of the other engine: Megatron's begin with its wrappers'.
        before, m = layers_before(self._module()), self.run.model
        found = {}
        for name, reading in diagnostics(self._optimizer).items():
            inner = name[min(name.find(part) for part in _PARTS if part in name) :]
            found[name_in_run(m, inner, before)] = reading
        return found

    def close(self) -> None:
        # Gradient hooks hold the wrapper in a cycle through autograd, which the collector cannot see. The wrapper holds
        # the model, its buffers and all process groups.
        vars(self._model).clear()


def optimizer_config(run: Run, dtype: torch.dtype) -> OptimizerConfig:
    """Megatron's configuration of a run's optimizer.

    Raises:
        ValueError: Megatron has no such optimizer, or it has no such option.
    """
    check_optimizer(run)
    name, options = run.optimizer.name, arguments(run)
    common: dict[str, Any] = {
        "lr": options.pop("lr"),
        "weight_decay": options.pop("weight_decay"),
        "clip_grad": run.training.clip,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "params_dtype": dtype,
        "use_distributed_optimizer": run.megatron.distributed_optimizer,
        "overlap_param_gather": run.megatron.overlap and run.megatron.distributed_optimizer,
        "initial_loss_scale": 2.0**16,
    }
    if name in ALTO_NAMES:
        format_ = run.megatron.checkpoint_format if run.megatron.distributed_optimizer else ""
        ours = {f"alto_{option}": value for option, value in options.items()}
        return AltoOptimizerConfig(**common, **ours, alto_checkpoint_format=format_)
    (beta1, beta2), eps = options["betas"], options["eps"]
    return OptimizerConfig(
        optimizer="adam",
        adam_beta1=beta1,
        adam_beta2=beta2,
        adam_eps=eps,
        decoupled_weight_decay=name == "adamw",
        **common,
    )


def _forward(document_end: int | None, batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    """What Megatron's schedules call for each micro-batch."""
    tokens = next(batches)
    inputs = inputs_of(tokens, document_end)
    ids = inputs["input_ids"].contiguous()
    positions = inputs.get("position_ids")
    if positions is None:
        positions = torch.arange(ids.shape[1], dtype=torch.long, device=ids.device).expand(len(ids), -1)
    visible = inputs.get("attention_mask")
    hidden = None if visible is None else ~visible  # Megatron's masks are True where a token may not look
    output = model(ids, positions, hidden, labels=tokens[:, 1:].contiguous())

    def mean(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = output.float().mean()
        return loss, {
            "loss": loss.detach().clone()
        }  # Megatron divides the first by the number of micro-batches in place

    return output, mean


def _device() -> torch.device:
    """Megatron asks torch.cuda for it everywhere, so there must be an answer."""
    if torch.cuda.is_available():
        # Modulo: some schedulers show each task its own GPU only, as number 0.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    try:
        # A number is that of an accelerator.
        return torch.empty(0, dtype=torch.float32, device=torch.cuda.current_device()).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            "Megatron needs CUDA. To try it on CPUs, start through the shims of this repository: "
            "torchrun ... scripts/megatron_on_cpu.py pretrain --engine megatron ..."
        ) from error
