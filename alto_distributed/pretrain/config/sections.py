"""The sections of a run's settings, each a dataclass with a docstring under every field."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, Literal

from ...hyperparameters import DEFAULT_LR, Hyperparameters
from .checking import Amount, Count, Flag, Natural, Seconds, Share, Text, checked
from .optimizer_options import resolve

Precision = Literal["bf16", "fp16", "fp32"]
ModelKind = Literal["gpt2", "llama"]
ScheduleKind = Literal["constant", "cosine", "poly", "wsd"]
CheckpointFormat = Literal["fully_reshardable", "dp_reshardable"]


@checked
@dataclass(frozen=True)
class Model:
    """A GPT-2, or a Llama-style model: RMSNorm, SwiGLU, rotary positions, grouped-query attention, an output layer of
    its own and no biases."""

    kind: ModelKind = "gpt2"
    """"gpt2" or "llama"."""
    layers: Count = 24
    """Transformer blocks."""
    hidden: Count = 1024
    """Width of the residual stream; a multiple of ``heads``."""
    heads: Count = 16
    """Attention heads of a layer."""
    kv_heads: Natural = 0
    """Of "llama": heads of keys and values, each shared by ``heads / kv_heads`` heads of queries; 0 for one each."""
    feed_forward: Natural = 0
    """Width inside the feed-forward block; 0 for 4 x hidden in "gpt2", and in "llama" for 8/3 x hidden, rounded up to a
    multiple of 64."""
    sequence: Count = 1024
    """Tokens in a sample, and rows of GPT-2's position embedding."""
    vocabulary: Count = 50304
    """Rows of the token embedding: those of the tokenizer or more. A multiple of 128 x tensor_parallel keeps
    Megatron from padding it, so that the model is the same in every layout."""
    dropout: Share = 0.1
    """Share of activations that are dropped in training: after the embedding, in attention and after each block."""
    init_std: Amount = 0.02
    """Standard deviation of the initial weights."""
    rope_theta: Count = 10000
    """Of "llama": base of the rotary positions."""

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"model.hidden={self.hidden} must be a multiple of model.heads={self.heads}")
        if self.kind == "gpt2" and self.kv_heads not in (0, self.heads):
            raise ValueError(
                f"model.kv_heads={self.kv_heads} is for model.kind: llama; GPT-2 has as many as heads. Leave it out"
            )
        if self.heads % self.groups:
            raise ValueError(f"model.heads={self.heads} must be a multiple of model.kv_heads={self.kv_heads}")
        if self.kind == "llama" and self.hidden // self.heads % 2:
            raise ValueError(
                f"model.hidden={self.hidden} / model.heads={self.heads} = {self.hidden // self.heads} must be even: "
                "rotary positions turn pairs"
            )

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def inner(self) -> int:
        """Width inside the feed-forward block."""
        if self.feed_forward:
            return self.feed_forward
        return 4 * self.hidden if self.kind == "gpt2" else -(-8 * self.hidden // (3 * 64)) * 64


@checked
@dataclass(frozen=True)
class Data:
    """What is trained on."""

    directory: Text = "data/stdlib"
    """What ``python -m alto_distributed prepare`` wrote."""
    document_mask: Flag = False
    """Let a token see only its own document: attention stops at document ends, and positions count from 0 there."""
    verify: Flag = True
    """Read it at every start, once a machine, and compare its checksums: about a second a gigabyte."""


@checked
@dataclass(frozen=True)
class BatchRamp:
    """A global batch that begins small and grows, step by step, to ``training.global_batch``."""

    start: Natural = 0
    """Samples of the first steps; 0 for no ramp."""
    step: Natural = 0
    """Samples by which it grows each time."""
    every: Natural = 0
    """Steps after which it grows."""

    def __post_init__(self) -> None:
        if self.start and not (self.step and self.every):
            raise ValueError(
                f"training.batch_ramp.start={self.start} with step={self.step} and every={self.every}: the batch would "
                "never grow; set step, in samples, and every, in optimizer steps"
            )
        if not self.start and (self.step or self.every):
            raise ValueError("training.batch_ramp has no start: set the samples of the first steps")

    def sizes_below(self, whole: int) -> int:
        """How many sizes there are before ``whole`` samples are reached."""
        return -(-(whole - self.start) // self.step)


@checked
@dataclass(frozen=True)
class Training:
    """Steps, batches, precision and what to do when something goes wrong."""

    iterations: Count = 5000
    """Optimizer steps."""
    global_batch: Count = 4096
    """Samples in a step, over all ranks and accumulation: the paper's batch size."""
    batch_ramp: BatchRamp = field(default_factory=BatchRamp)
    """How the batch grows to ``global_batch``, if it does not begin with it."""
    micro_batch: Count = 4
    """Samples that one rank puts through the model at a time."""
    precision: Precision = "bf16"
    """"bf16", "fp16" (with dynamic loss scaling) or "fp32". Master weights are float32 always."""
    clip: Amount = 1.0
    """Global norm to which gradients are clipped; 0 for never."""
    seed: Natural = 1234
    """Fixes the initial weights and the order of the data."""
    skip_nonfinite: Flag = True
    """With alto and lamb: skip a step, on all ranks, if any gradient is not finite. (fp16 always does.) Nothing is
    changed by a skipped step, its batch is not used again, and the schedule goes on."""
    max_skipped: Natural = 20
    """End the run with an error after so many skipped steps in a row; 0 for never."""
    recompute: Flag = False
    """Keep only the inputs of each layer for the backward pass and compute the rest again: less memory, a third more
    arithmetic, the same numbers."""
    timeout: Seconds = 1800.0
    """Seconds that a rank waits for the others in one exchange before it gives the run up (docs/reliability.md). It
    must be longer than the slowest rank lags behind the fastest, checkpoints included."""

    def __post_init__(self) -> None:
        if self.batch_ramp.start >= self.global_batch and self.batch_ramp.start:
            raise ValueError(
                f"training.batch_ramp.start={self.batch_ramp.start} must be less than "
                f"training.global_batch={self.global_batch}, to which the batch grows"
            )


@checked
@dataclass(frozen=True)
class Optimizer:
    """The optimizer and its options."""

    name: Text = "alto"
    """See :mod:`alto_distributed.pretrain.config.optimizer_options`."""
    lr: Amount = DEFAULT_LR
    """Learning rate after the warm-up; each optimizer has a default of its own, and this is ALTO's."""
    weight_decay: Amount = Hyperparameters.weight_decay
    """Decay of matrices; biases and norm layers are not decayed. Each optimizer has a default of its own."""
    preset: Text = ""
    """Of alto: where lr, weight_decay and options come from that are not set; see :func:`alto_distributed.recipe`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Everything else that the optimizer takes, by its own names: ``alpha``, ``betas``, ``eps`` ..."""

    @functools.cached_property
    def resolved(self) -> dict[str, Any]:
        """``lr``, ``weight_decay`` and every option of the optimizer, checked, with defaults filled in.

        Raises:
            ValueError: the optimizer or one of its options does not exist or has no such value.
        """
        return resolve(self.name, self.lr, self.weight_decay, self.options)


@checked
@dataclass(frozen=True)
class Schedule:
    """The learning rate over the steps."""

    kind: ScheduleKind = "cosine"
    """After the warm-up: "constant", "cosine", "poly", which falls with ``power``, or "wsd", which is constant and then
    falls in a straight line over the last ``decay`` of the steps."""
    warmup: Natural = 50
    """Steps over which the rate rises linearly from 0."""
    final: Share = 0.01
    """The last step's rate, as a share of ``optimizer.lr``. With "wsd" the default is 0."""
    power: Amount = 1.0
    """Exponent of "poly"; 1 falls in a straight line."""
    decay: Share = 0.2
    """Of "wsd": the share of all steps over which the rate falls, to ``final`` at the last one."""


@checked
@dataclass(frozen=True)
class Evaluation:
    """Validation, and the test at the end."""

    every: Natural = 100
    """Steps between validations; there is one at the start and one at the end as well. 0 for those two only."""
    samples: Natural = 256
    """Samples of the validation split, the same each time, and of the test split at the end; 0 for all."""


@checked
@dataclass(frozen=True)
class Checkpoints:
    """When checkpoints are written, and how many stay."""

    every: Natural = 500
    """Steps between checkpoints; there is one at the end as well. 0 for that one only."""
    keep: Count = 2
    """How many are kept; the newest whole one always is."""


@checked
@dataclass(frozen=True)
class Logs:
    """What is written down."""

    every: Count = 10
    """Steps between lines of the log."""
    tensorboard: Flag = True
    """Write events for TensorBoard beside metrics.jsonl and metrics.csv."""
    wandb: Text = ""
    """Also log to this project of Weights & Biases; "" for not. ``WANDB_MODE=offline`` needs no network."""
    mlflow: Text = ""
    """Also log to this experiment of MLflow; "" for not. ``MLFLOW_TRACKING_URI`` says where."""
    diagnostics_every: Natural = 0
    """Steps between readings of ALTO's trust ratios, norms and acceleration, by parameter; 0 for never."""
    report: Flag = True
    """Write the report when the run is complete."""


@checked
@dataclass(frozen=True)
class DeepSpeed:
    """For ``engine: deepspeed``."""

    config: Text = ""
    """A plain DeepSpeed JSON, relative to the file that names it. Batch sizes, precision, clipping and the optimizer
    may be left out there: they are this run's. If they are there, they must be the same."""


@checked
@dataclass(frozen=True)
class Megatron:
    """For ``engine: megatron``."""

    tensor_parallel: Count = 1
    """Ranks that share each layer."""
    pipeline_parallel: Count = 1
    """Stages that the layers are dealt to."""
    sequence_parallel: Flag = False
    """Split activations between the tensor-parallel regions along the sequence."""
    distributed_optimizer: Flag = True
    """Shard states and master weights over the data-parallel ranks."""
    overlap: Flag = True
    """Communicate gradients and parameters while the passes run."""
    checkpoint_format: CheckpointFormat = "fully_reshardable"
    """Or "dp_reshardable": faster, and only the number of data-parallel ranks may change."""
