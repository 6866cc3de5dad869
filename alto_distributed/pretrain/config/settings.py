"""The settings of a pretraining run: a YAML file, command-line overrides, and one check of both.

A file is a section for each dataclass below. ``extends: other.yaml`` starts from another file, relative to
itself. An override is ``section.key=value``. A name that does not exist is refused with the nearest that
does, and so is a value of the wrong type.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from ...errors import did_you_mean, shown
from .parsing import check_size_limits, parse_yaml, read_settings

ENGINES = ("deepspeed", "megatron")
PRECISIONS = ("bf16", "fp16", "fp32")
SCHEDULES = ("constant", "cosine", "poly")
_LONGEST_CHAIN = 16  # of files that extend each other
_LONGEST_WAIT = 10_000_000  # seconds: four months, which every backend can count


@dataclass(frozen=True)
class Model:
    """A GPT-2."""

    layers: int = 24
    hidden: int = 1024
    heads: int = 16
    sequence: int = 1024
    """Tokens in a sample, and rows of the position embedding."""
    vocabulary: int = 50304
    """Rows of the token embedding: those of the tokenizer or more. A multiple of 128 x tensor_parallel keeps
    Megatron from padding it, so that the model is the same in every layout."""
    dropout: float = 0.1
    init_std: float = 0.02


@dataclass(frozen=True)
class Data:
    directory: str = "data/stdlib"
    """What ``python -m alto_distributed prepare`` wrote."""
    verify: bool = True
    """Read it once at every start, on the first rank, and compare its checksums: about a second a gigabyte."""


@dataclass(frozen=True)
class Training:
    iterations: int = 5000
    """Optimizer steps."""
    global_batch: int = 4096
    """Samples in a step, over all ranks and accumulation: the paper's batch size."""
    micro_batch: int = 4
    """Samples that one rank puts through the model at a time."""
    precision: str = "bf16"
    """"bf16", "fp16" (with dynamic loss scaling) or "fp32". Master weights are float32 always."""
    clip: float = 1.0
    """Global norm to which gradients are clipped; 0 for never."""
    seed: int = 1234
    """Fixes the initial weights and the order of the data."""
    skip_nonfinite: bool = True
    """With alto and lamb: skip a step, on all ranks, if any gradient is not finite. (fp16 always does.) Nothing is
    changed by a skipped step, its batch is not used again, and the schedule goes on."""
    max_skipped: int = 20
    """End the run with an error after so many skipped steps in a row; 0 for never."""
    recompute: bool = False
    """Keep only the inputs of each layer for the backward pass and compute the rest again: less memory, a third more
    arithmetic, the same numbers."""
    timeout: float = 1800.0
    """Seconds that a rank waits for the others in one exchange before it gives the run up (docs/reliability.md). It
    must be longer than the slowest rank lags behind the fastest, checkpoints included."""


@dataclass(frozen=True)
class Optimizer:
    name: str = "alto"
    """See :mod:`alto_distributed.pretrain.optimizers`."""
    lr: float = 1e-2
    weight_decay: float = 1e-4
    options: dict[str, Any] = field(default_factory=dict)
    """Everything else that the optimizer takes, by its own names: ``alpha``, ``betas``, ``eps`` ..."""


@dataclass(frozen=True)
class Schedule:
    kind: str = "cosine"
    """After the warm-up: "constant", "cosine", or "poly", which falls with ``power``."""
    warmup: int = 50
    """Steps over which the rate rises linearly from 0."""
    final: float = 0.01
    """The last step's rate, as a share of ``optimizer.lr``."""
    power: float = 1.0


@dataclass(frozen=True)
class Evaluation:
    every: int = 100
    """Steps between validations; there is one at the start and one at the end as well. 0 for those two only."""
    samples: int = 256
    """Samples of the validation split, the same each time, and of the test split at the end; 0 for all."""


@dataclass(frozen=True)
class Checkpoints:
    every: int = 500
    """Steps between checkpoints; there is one at the end as well. 0 for that one only."""
    keep: int = 2
    """How many are kept; the newest whole one always is."""


@dataclass(frozen=True)
class Logs:
    every: int = 10
    """Steps between lines of the log."""
    tensorboard: bool = True
    diagnostics_every: int = 0
    """Steps between summaries of ALTO's trust ratios; 0 for never."""


@dataclass(frozen=True)
class DeepSpeed:
    config: str = ""
    """A plain DeepSpeed JSON, relative to the file that names it. Batch sizes, precision, clipping and the optimizer
    may be left out there: they are this run's. If they are there, they must be the same."""


@dataclass(frozen=True)
class Megatron:
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = True
    overlap: bool = True
    """Communicate gradients and parameters while the passes run."""
    checkpoint_format: str = "fully_reshardable"
    """Or "dp_reshardable": faster, and only the number of data-parallel ranks may change."""


@dataclass(frozen=True)
class Run:
    """All of it."""

    engine: str = "deepspeed"
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    logs: Logs = field(default_factory=Logs)
    deepspeed: DeepSpeed = field(default_factory=DeepSpeed)
    megatron: Megatron = field(default_factory=Megatron)

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise ValueError(problem)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def model_parallel(self) -> int:
        """Ranks that share one copy of the model."""
        return self.megatron.tensor_parallel * self.megatron.pipeline_parallel if self.engine == "megatron" else 1

    def accumulation(self, data_parallel: int) -> int:
        """Micro-batches that each rank adds up in a step."""
        t = self.training
        at_once = t.micro_batch * data_parallel
        if t.global_batch % at_once:
            lower = t.global_batch // at_once * at_once
            raise ValueError(
                f"training.global_batch={t.global_batch} is not a multiple of micro_batch x data-parallel ranks = "
                f"{t.micro_batch} x {data_parallel} = {at_once}; the nearest that are: "
                f"{', '.join(str(n) for n in (lower, lower + at_once) if n)}"
            )
        return t.global_batch // at_once


def load(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """A run's settings from a file and overrides ``section.key=value``.

    Raises:
        ValueError: something in them is not as it should be; the message says what and where.
    """
    settings = _read(Path(path))
    for override in overrides:
        name, equals, value = override.partition("=")
        section, dot, key = name.strip().partition(".")
        if not equals or not section or (dot and not key):
            raise ValueError(
                f"{shown(override)} is not an override; write section.key=value, like training.iterations=100"
            )
        parsed = parse_yaml(value, f"the value of {shown(override)}")
        if dot:
            inner = settings.setdefault(section, {})
            if not isinstance(inner, dict):
                raise ValueError(f"{section!r} has no keys of its own, so {shown(override)} cannot set one")
            *sections, last = key.split(".")
            for step in sections:
                inner = inner.setdefault(step, {})
                if not isinstance(inner, dict):
                    raise ValueError(f"{shown(override)}: {shown(step)} has no keys of its own")
            inner[last] = parsed
        else:
            settings[section] = parsed
    return parse(settings)


def parse(settings: Mapping[str, Any]) -> Run:
    """A run's settings from nested dictionaries, such as :meth:`Run.as_dict` gives."""
    check_size_limits(settings, "the settings")
    return typing.cast(Run, _build(Run, settings, ""))


def _read(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    try:
        path = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links; a name that is too long, or has a zero byte
        raise ValueError(f"the settings {shown(str(path))} cannot be read: {error}") from None
    if path in seen:
        raise ValueError(f"{path} extends itself, by way of {', '.join(str(p.name) for p in seen)}")
    if len(seen) == _LONGEST_CHAIN:
        raise ValueError(f"{path}: more than {_LONGEST_CHAIN} settings files extend each other")
    settings = parse_yaml(read_settings(path, f"the settings {path}"), str(path))
    settings = {} if settings is None else settings
    if not isinstance(settings, dict):
        raise ValueError(f"{path} holds a {type(settings).__name__}, and should hold sections: model, training, ...")
    json = settings.get("deepspeed", {}).get("config") if isinstance(settings.get("deepspeed", {}), dict) else None
    if isinstance(json, str) and json:
        settings["deepspeed"]["config"] = str(path.parent / json)
    base = settings.pop("extends", None)
    if base is None:
        return settings
    if not isinstance(base, str):
        raise ValueError(f"{path}: extends={shown(base)} should be the name of another settings file")
    return _merged(_read(path.parent / base, (*seen, path)), settings)


def _merged(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        # Another optimizer's options are not a variation of the first one's.
        replaces = key == "optimizer" and isinstance(value, dict) and "name" in value
        merged[key] = _merged(merged[key], value) if both and not replaces else value
    return merged


def _build(cls: type, settings: Any, where: str) -> Any:
    if not isinstance(settings, Mapping):
        raise ValueError(f"{where or 'the settings'} should be a section with keys, not {shown(settings)}")
    hints, known = typing.get_type_hints(cls), [f.name for f in fields(cls)]
    values = {}
    for key, value in settings.items():
        name = f"{where}.{key}" if where else str(key)
        if key not in known:
            hint = did_you_mean(key, known)
            raise ValueError(f"there is no setting {shown(name)}{hint} (known here: {', '.join(known)})")
        values[key] = _build(hints[key], value, name) if is_dataclass(hints[key]) else _value(hints[key], value, name)
    return cls(**values)


def _value(hint: Any, value: Any, name: str) -> Any:
    """``value`` as the type that a field asks for; YAML reads 1e-2 as a string."""
    wanted = typing.get_origin(hint) or hint
    if isinstance(wanted, types.UnionType):
        raise TypeError(f"{name}: unions are not foreseen here")
    if wanted is float and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    elif isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool)):
        return value
    raise ValueError(f"{name}={shown(value)} should be {_KINDS[wanted]}")


_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", dict: "keys with values"}


def _problems(run: Run) -> typing.Iterator[str]:
    m, t, s = run.model, run.training, run.schedule
    choices = {
        "engine": (run.engine, ENGINES),
        "training.precision": (t.precision, PRECISIONS),
        "schedule.kind": (s.kind, SCHEDULES),
        "megatron.checkpoint_format": (run.megatron.checkpoint_format, ("fully_reshardable", "dp_reshardable")),
    }
    for name, (choice, known) in choices.items():
        if choice not in known:
            yield f"{name}={shown(choice)} is not one of {', '.join(known)}"
    at_least: dict[int, dict[str, float]] = {
        1: {
            "model.layers": m.layers,
            "model.hidden": m.hidden,
            "model.heads": m.heads,
            "model.sequence": m.sequence,
            "model.vocabulary": m.vocabulary,
            "training.iterations": t.iterations,
            "training.global_batch": t.global_batch,
            "training.micro_batch": t.micro_batch,
            "training.timeout": t.timeout,
            "checkpoints.keep": run.checkpoints.keep,
            "logs.every": run.logs.every,
            "megatron.tensor_parallel": run.megatron.tensor_parallel,
            "megatron.pipeline_parallel": run.megatron.pipeline_parallel,
        },
        0: {
            "model.init_std": m.init_std,
            "training.clip": t.clip,
            "training.seed": t.seed,
            "training.max_skipped": t.max_skipped,
            "optimizer.lr": run.optimizer.lr,
            "optimizer.weight_decay": run.optimizer.weight_decay,
            "schedule.warmup": s.warmup,
            "schedule.power": s.power,
            "evaluation.every": run.evaluation.every,
            "evaluation.samples": run.evaluation.samples,
            "checkpoints.every": run.checkpoints.every,
            "logs.diagnostics_every": run.logs.diagnostics_every,
        },
    }
    for bound, values in at_least.items():
        for name, value in values.items():
            if not bound <= value < 2**63:  # also refuses NaN
                yield f"{name}={shown(value)} is out of range: it must be a number from {bound} on"
    for name, share in {"model.dropout": m.dropout, "schedule.final": s.final}.items():
        if not 0 <= share <= 1:
            yield f"{name}={share!r} must lie between 0 and 1"
    if t.timeout > _LONGEST_WAIT:
        yield f"training.timeout={t.timeout:g} is out of range: it must be at most {_LONGEST_WAIT} seconds"
    if m.hidden % m.heads:
        yield f"model.hidden={m.hidden} must be a multiple of model.heads={m.heads}"
    if s.warmup > t.iterations:
        yield f"schedule.warmup={s.warmup} is longer than training.iterations={t.iterations}"
