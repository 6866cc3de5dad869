"""Bytes that a run will need on each rank, from its settings alone.

Weights, gradients, master weights and optimizer states follow from the engine's way of sharding; activations
are a rough figure, for orientation.
"""

from __future__ import annotations

import json
import resource
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from .config import Run

#: Float32 state tensors that an optimizer keeps for each parameter.
STATES = {"alto": 3, "lamb": 2, "adamw": 2, "adam": 2, "adabelief": 2, "lion": 1}


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    weights: float
    gradients: float
    master: float
    states: float
    activations: float

    @property
    def total(self) -> float:
        return float(sum(getattr(self, f.name) for f in fields(self)))


def parameter_count(run: Run) -> int:
    """Of the whole model: embeddings (the output's is tied), layers, last norm."""
    m = run.model
    layer = 12 * m.hidden**2 + 13 * m.hidden
    return (m.vocabulary + m.sequence) * m.hidden + m.layers * layer + 2 * m.hidden


def estimate(run: Run, world: int) -> Memory:
    """What one of ``world`` ranks needs."""
    if run.engine == "megatron":
        weights_over = gradients_over = 1
        states_over = world // run.model_parallel if run.megatron.distributed_optimizer else 1
    else:
        stage = zero_stage(run)
        weights_over, gradients_over, states_over = (world if stage >= least else 1 for least in (3, 2, 1))
    here = parameter_count(run) / run.model_parallel
    half = run.training.precision != "fp32"
    return Memory(
        weights=here * (2 if half else 4) / weights_over,
        gradients=here * 4 / gradients_over,
        master=here * 4 / states_over if half else 0.0,
        states=here * 4 * STATES.get(run.optimizer.name, 2) / states_over,
        activations=_activations(run, half) / run.model_parallel,
    )


def peak(device: torch.device) -> int:
    """The most bytes that this process has had: of the GPU's memory, as torch counts it; on a CPU, of main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def zero_stage(run: Run) -> int:
    """The ZeRO stage that the run's DeepSpeed JSON names."""
    if not run.deepspeed.config:
        return 0
    try:
        zero = json.loads(Path(run.deepspeed.config).read_text()).get("zero_optimization", {})
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"the DeepSpeed JSON {run.deepspeed.config} cannot be read: {error}") from None
    return int(zero.get("stage", 0))


def _activations(run: Run, half: bool) -> float:
    """What a micro-batch leaves behind for the backward pass, without recomputation, attention's matrix not kept."""
    m = run.model
    tokens = run.training.micro_batch * m.sequence
    in_layers = 34 * m.layers * m.hidden * (1 if half else 2)
    logits = m.vocabulary * (2 if half else 4) + m.vocabulary * 4  # and their float32 copy in the loss
    return float(tokens * (in_layers + logits))
