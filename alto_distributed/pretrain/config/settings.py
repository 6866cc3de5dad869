"""The settings of a pretraining run: a YAML file, command-line overrides, and one check of both.

A file has a section for each dataclass of :mod:`.sections`. ``extends: other.yaml`` starts from another file, relative
to itself. An override is ``section.key=value``. A preset that a file or an override names replaces the alpha, betas,
eps and vector_lr of the files before it; lr stays. A name that does not exist is refused with the nearest that does,
and so is a value of the wrong type or out of range (:mod:`.checking`).
"""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from ...errors import shown
from ...presets import PRESET_NAMES, recipe
from .checking import checked, refusal
from .optimizer_options import DEFAULT_DECAYS, DEFAULT_RATES, check_run_betas
from .parsing import check_size_limits, parse_yaml, read_settings
from .sections import (
    Checkpoints,
    Data,
    DeepSpeed,
    Evaluation,
    Logs,
    Megatron,
    Model,
    Optimizer,
    Schedule,
    Training,
)

EngineName = Literal["deepspeed", "megatron"]
ENGINES: tuple[EngineName, ...] = typing.get_args(EngineName)
_LONGEST_CHAIN = 16  # of files that extend each other


@checked
@dataclass(frozen=True)
class Run:
    """All of it."""

    engine: EngineName = "deepspeed"
    """What trains: "deepspeed" or "megatron"."""
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
        warmup, iterations = self.schedule.warmup, self.training.iterations
        if warmup > iterations:
            raise ValueError(f"schedule.warmup={warmup} is longer than training.iterations={iterations}")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def model_parallel(self) -> int:
        """Ranks that share one copy of the model."""
        return self.megatron.tensor_parallel * self.megatron.pipeline_parallel if self.engine == "megatron" else 1

    def data_parallel(self, world: int) -> int:
        """Copies of the model on ``world`` ranks.

        Raises:
            ValueError: there are no ranks, or they do not divide by those of one copy.
        """
        if not 1 <= world < 2**31:
            raise ValueError(f"{world} ranks (--world, --ranks): there must be between 1 and 2**31 - 1")
        if world % self.model_parallel:
            raise ValueError(
                f"{world} ranks are not a multiple of tensor_parallel x pipeline_parallel = {self.model_parallel}; add "
                "ranks, or set megatron.tensor_parallel and megatron.pipeline_parallel"
            )
        return world // self.model_parallel

    def accumulation(self, data_parallel: int) -> int:
        """Micro-batches that each rank adds up in a step, at the end of a batch ramp."""
        t = self.training
        at_once, ramp = t.micro_batch * data_parallel, t.batch_ramp
        sizes = {"training.global_batch": t.global_batch}
        if ramp.start:
            sizes["training.batch_ramp.start"] = ramp.start
            if ramp.sizes_below(t.global_batch) > 1:
                sizes["training.batch_ramp.step"] = ramp.step
        for name, size in sizes.items():
            if size % at_once:
                lower = size // at_once * at_once
                raise ValueError(
                    f"{name}={size} is not a multiple of micro_batch x data-parallel ranks = "
                    f"{t.micro_batch} x {data_parallel} = {at_once}; the nearest that are: "
                    f"{', '.join(str(n) for n in (lower, lower + at_once) if n)}"
                )
        return t.global_batch // at_once


_RUN = TypeAdapter(Run)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """A run's settings from a file and overrides ``section.key=value``.

    Raises:
        ValueError: something in them is not as it should be; the message says what and where.
    """
    settings = _read(Path(path))
    if any(override.partition("=")[0].strip() == "optimizer.preset" for override in overrides):
        settings = _without_preset(settings)
    for override in overrides:
        name, equals, value = override.partition("=")
        section, dot, key = name.strip().partition(".")
        if not equals or not section or (dot and not key):
            raise ValueError(
                f"{shown(override)} is not an override; write section.key=value, like training.iterations=100"
            )
        # Nothing behind the "=" is an empty text; to YAML it is null.
        parsed = parse_yaml(value, f"the value of {shown(override)}") if value.strip() else ""
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


def parse(settings: dict[str, Any]) -> Run:
    """A run's settings from nested dictionaries, such as :meth:`Run.as_dict` gives."""
    check_size_limits(settings, "the settings")
    _refuse_ramp_as_batch(settings)
    try:
        return _RUN.validate_python(_with_schedule(_with_optimizer(_with_preset(settings))))
    except ValidationError as error:
        raise ValueError(refusal(error, Run)) from None


def _refuse_ramp_as_batch(settings: dict[str, Any]) -> None:
    training: Any = settings.get("training") if isinstance(settings, dict) else None
    batch = training.get("global_batch") if isinstance(training, dict) else None
    if isinstance(batch, dict):
        raise ValueError(
            f"training.global_batch={shown(batch)} should be a whole number, the batch at the end; how it grows to "
            "that is training.batch_ramp={start: ..., step: ..., every: ...}"
        )


def _with_preset(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with what ``optimizer.preset`` says and they do not."""
    optimizer: Any = settings.get("optimizer") if isinstance(settings, dict) else None
    preset = optimizer.get("preset") if isinstance(optimizer, dict) else None
    if not preset:
        return settings
    if optimizer.get("name", Optimizer.name) != "alto":
        raise ValueError(f"optimizer.preset={shown(preset)} is alto's, and optimizer.name={shown(optimizer['name'])}")
    training, options = settings.get("training"), optimizer.get("options")
    batch = training.get("global_batch", Training.global_batch) if isinstance(training, dict) else Training.global_batch
    if not isinstance(batch, int) or batch < 1 or not isinstance(options, (dict, type(None))):
        return settings  # refused in its own words
    given = options or {}
    betas = {"betas": check_run_betas("alto", given["betas"])} if "betas" in given and "alpha" not in given else {}
    try:
        # Lists, as files have them: settings are compared with saved ones.
        chosen = {name: list(x) if isinstance(x, tuple) else x for name, x in recipe(batch, preset, **betas).items()}
    except ValueError as error:
        where = "optimizer" if str(error).startswith("preset") else "optimizer.options"
        raise ValueError(f"{where}.{error}") from None
    own = {name: chosen.pop(name) for name in ("lr", "weight_decay") if name in chosen}
    return {**settings, "optimizer": {**own, **optimizer, "options": {**chosen, **given}}}


def _without_preset(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without what a preset says, for one that is named after them: lr and other options stay."""
    optimizer: Any = settings.get("optimizer")
    options = optimizer.get("options") if isinstance(optimizer, dict) else None
    if not isinstance(options, dict):
        return settings
    kept = {name: value for name, value in options.items() if name not in PRESET_NAMES}
    return {**settings, "optimizer": {**optimizer, "options": kept}}


def _with_optimizer(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with the default rate and decay of their optimizer, where they name none."""
    optimizer: Any = settings.get("optimizer") if isinstance(settings, dict) else None
    name = optimizer.get("name") if isinstance(optimizer, dict) else None
    if not isinstance(name, str) or name not in DEFAULT_RATES:
        return settings
    own = {"lr": DEFAULT_RATES[name], "weight_decay": DEFAULT_DECAYS[name]}
    return {**settings, "optimizer": {**own, **optimizer}}


def _with_schedule(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with the default end of their schedule, if they name none."""
    schedule: Any = settings.get("schedule") if isinstance(settings, dict) else None
    if not isinstance(schedule, dict) or schedule.get("kind") != "wsd" or "final" in schedule:
        return settings
    return {**settings, "schedule": {**schedule, "final": 0.0}}


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
    own = over.get("optimizer")
    merged = _without_preset(base) if isinstance(own, dict) and own.get("preset") else dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        # Another optimizer's options are not a variation of the first one's.
        replaces = key == "optimizer" and isinstance(value, dict) and "name" in value
        merged[key] = _merged(merged[key], value) if both and not replaces else value
    return merged


__all__ = ["ENGINES", "Model", "Run", "load", "parse"]
