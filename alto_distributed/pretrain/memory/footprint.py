"""What an engine keeps on each rank, in bytes: read from its code, and held against real runs in the tests.

Gradients are the most that are held at once, at the end of a backward pass or in the optimizer's step, when a step has
several micro-batches. Buffers are what an engine sets aside for communication. Not counted: activations, parameters
that ZeRO-3 or FSDP has gathered for the moment, and what lives for one operation only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace

from .shapes import Groups, count

ENGINES = ("deepspeed", "megatron", "plain", "ddp", "fsdp")
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

#: Bytes that an optimizer keeps for an element of its float32 parameters, by state. "more" is whatever has no column.
STATES: Mapping[str, Mapping[str, int]] = {
    "alto": {"exp_avg": 4, "exp_avg_sq": 4, "grad_ema": 4},
    "lamb": {"exp_avg": 4, "exp_avg_sq": 4},
    "adamw": {"exp_avg": 4, "exp_avg_sq": 4},
    "adam": {"exp_avg": 4, "exp_avg_sq": 4},
    "adabelief": {"exp_avg": 4, "exp_avg_sq": 4},
    "lion": {"exp_avg": 4},
    "ademamix": {"exp_avg": 4, "exp_avg_sq": 4, "more": 4},
    "muon": {"exp_avg": 4, "exp_avg_sq": 4},  # matrices have one of them
    "mars": {"exp_avg": 4, "exp_avg_sq": 4, "more": 4},
    "soap": {"exp_avg": 4, "exp_avg_sq": 4, "more": 34},  # two squares for each side of a matrix of 4 to 1; others less
    # e-optimizer-adaptor 0.1.0: also the previous gradient, the acceleration, and both moments corrected for bias.
    "official": {"exp_avg": 4, "exp_avg_sq": 4, "more": 16},
}


@dataclass(frozen=True)
class Footprint:
    """Bytes on the fullest rank."""

    weights: float
    gradients: float
    buffers: float = 0.0
    master: float = 0.0
    exp_avg: float = 0.0
    exp_avg_sq: float = 0.0
    grad_ema: float = 0.0
    more: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(getattr(self, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Setting:
    """How a model is trained, as far as memory is concerned."""

    engine: str = "deepspeed"
    data_parallel: int = 1
    precision: str = "bf16"
    stage: int = 0
    """DeepSpeed's."""
    accumulate_in: str = ""
    """DeepSpeed's grad_accum_dtype; "" for the model's precision."""
    bucket: int = 500_000_000
    """Elements: DeepSpeed's reduce_bucket_size; 0 for contiguous_gradients turned off."""
    overlap: bool | None = None
    """DeepSpeed's overlap_comm; None for its default."""
    persistent: int = 100_000
    """Elements: DeepSpeed's stage3_param_persistence_threshold."""
    sub_group: int = 1_000_000_000
    """Elements: DeepSpeed's sub_group_size."""
    distributed_optimizer: bool = True
    """Megatron's."""
    states: Mapping[str, int] = field(default_factory=lambda: STATES["alto"])
    """Bytes an element, by state."""
    states_like_parameters: bool = False
    """The optimizer keeps states in the parameters' precision, as torch.optim does. (Masters are float32.)"""

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise ValueError(problem)

    def unsharded(self) -> Setting:
        """The same with everything on every rank, for an optimizer whose norms are wrong on pieces."""
        engine = "ddp" if self.engine == "fsdp" else self.engine
        return replace(self, engine=engine, stage=0, accumulate_in="", distributed_optimizer=False)


def footprint(setting: Setting, groups: Groups) -> Footprint:
    """Bytes on the fullest rank, given the parameters that one copy of the model has there."""
    engines = {"deepspeed": _deepspeed, "megatron": _megatron}
    return engines.get(setting.engine, _torch)(setting, groups)


def checkpoint(setting: Setting, groups: Groups) -> float:
    """Bytes of a checkpoint, all ranks' files together, of one copy of the model with these parameters."""
    whole, width = count(groups), BYTES[setting.precision]
    if setting.engine == "megatron":
        # The distributed optimizer saves what it steps, also where that is the model's own float32 weights.
        master = 4 if width < 4 or setting.distributed_optimizer else 0
    elif setting.engine == "deepspeed":
        master = 4 if width < 4 or setting.stage else 0
        width = 0 if setting.stage == 3 else width  # stage 3 saves the masters alone
    else:
        master, width = 0, 4 if setting.engine == "fsdp" else width
    return float(whole * (width + master + sum(_state_bytes(setting).values())))


def _torch(setting: Setting, groups: Groups) -> Footprint:
    """One process, DDP, or FSDP2: no master weights; under FSDP bf16 is a policy, and what is sharded is float32."""
    whole, width = count(groups), BYTES[setting.precision]
    if setting.engine == "fsdp":
        here = whole / setting.data_parallel
        return _with_states(setting, here, Footprint(weights=4 * here, gradients=4 * here))
    buckets = width * whole if setting.engine == "ddp" and setting.data_parallel > 1 else 0
    return _with_states(setting, whole, Footprint(width * whole, width * whole, buckets))


def _megatron(setting: Setting, groups: Groups) -> Footprint:
    """All weights, all gradients in float32; the distributed optimizer cuts masters and states."""
    width = BYTES[setting.precision]
    over = setting.data_parallel if setting.distributed_optimizer else 1
    # The distributed optimizer has each parameter begin at a multiple of 64 elements.
    whole = sum(-(-n // 64) * 64 for group in groups for n in group) if over > 1 else count(groups)
    here = count(groups) / over
    master = 4 * here if width < 4 else 0
    return _with_states(setting, here, Footprint(width * whole, 4 * whole, master=master))


def _deepspeed(setting: Setting, groups: Groups) -> Footprint:
    whole, width = count(groups), BYTES[setting.precision]
    accumulated, ranks = BYTES[setting.accumulate_in or setting.precision], setting.data_parallel
    if setting.stage == 0:
        if width == 4:
            return _with_states(setting, whole, Footprint(4 * whole, 4 * whole))
        # The step works on float32 copies of all gradients, beside the gradients themselves.
        return _with_states(setting, whole, Footprint(width * whole, (width + 4) * whole, master=4 * whole))
    if setting.stage == 3:
        return _zero3(setting, groups, width, accumulated)

    partitions = [-(-sum(group) // (2 * ranks)) * 2 for group in groups]
    here, padded = sum(partitions), ranks * sum(partitions)
    separate, fp32_buckets = accumulated != width, False
    if setting.stage == 1 and setting.precision == "bf16" and accumulated == 4:
        # BF16_Optimizer: a float32 buffer for the whole model, which stays, beside the micro-batch's gradients.
        parts = Footprint(width * padded, width * whole + 4 * padded, master=4 * here)
        return _with_states(setting, here, parts)
    if separate:
        gradients = accumulated * whole if setting.stage == 1 else accumulated * here
        fp32_buckets = setting.stage == 1
    else:
        # Whole gradients of all parameters with a piece here, and a float32 partition of the group that is stepped.
        in_step = width * _touched(groups, partitions, ranks) + 4 * max(partitions)
        gradients = max(in_step, width * whole if setting.stage == 1 else 0)
    buckets = setting.bucket * (accumulated if fp32_buckets else width) * (2 if setting.overlap else 1)
    return _with_states(setting, here, Footprint(width * padded, gradients, buckets, 4 * here))


def _zero3(setting: Setting, groups: Groups, width: int, accumulated: int) -> Footprint:
    """Every parameter is cut by itself; small ones are on every rank as well."""
    pieces = [[-(-n // setting.data_parallel) for n in group] for group in groups]
    here = sum(map(sum, pieces))
    stays = sum(n for group in groups for n in group if n <= setting.persistent)
    stepped = max(_sub_groups(pieces, setting.sub_group))  # a float32 copy of its gradients, made for its step
    parts = Footprint(
        weights=width * (here + stays),
        gradients=accumulated * here + 4 * stepped,
        buffers=setting.bucket * width,
        master=4 * here,
    )
    return _with_states(setting, here, parts)


def _sub_groups(groups: list[list[int]], limit: int) -> Iterator[int]:
    """Sizes of the runs of parameters that stage 3 steps at a time."""
    for pieces in groups:
        running = 0
        for piece in pieces:
            running += piece
            if running >= limit:
                yield running
                running = 0
        yield running


def _touched(groups: Groups, partitions: list[int], ranks: int) -> int:
    """Elements of all parameters with a piece on a rank, on the rank where that is most: at least its partition."""
    most = [0] * ranks
    for group, partition in zip(groups, partitions, strict=True):
        begin = 0
        for n in group if len(group) > 1 else ():
            for rank in range(begin // partition, -(-(begin + n) // partition)):
                most[rank] += n
            begin += n
    return max(*most, sum(partitions))


def _with_states(setting: Setting, elements: float, parts: Footprint) -> Footprint:
    return replace(parts, **{name: width * elements for name, width in _state_bytes(setting).items()})


def _state_bytes(setting: Setting) -> dict[str, int]:
    """Bytes an element; in float32 wherever the optimizer steps float32 masters, or is ALTO."""
    no_master = setting.engine in ("plain", "ddp")
    half = setting.states_like_parameters and no_master and BYTES[setting.precision] < 4
    return {name: width // 2 if half else width for name, width in setting.states.items()}


def _problems(setting: Setting) -> Iterator[str]:
    if setting.engine not in ENGINES:
        yield f"engine {setting.engine!r} is not one of {', '.join(ENGINES)}"
    if setting.precision not in BYTES or (setting.accumulate_in and setting.accumulate_in not in BYTES):
        yield f"precision {setting.precision!r} (gradients: {setting.accumulate_in!r}) is not one of {', '.join(BYTES)}"
    if setting.stage not in (0, 1, 2, 3):
        yield f"ZeRO has no stage {setting.stage}: choose 0, 1, 2 or 3"
    if setting.data_parallel < 1:
        yield f"{setting.data_parallel} data-parallel ranks: there must be one at least"
    if setting.engine == "deepspeed" and setting.stage == 0 and setting.accumulate_in not in ("", setting.precision):
        yield (
            f"DeepSpeed does not train in {setting.precision} with gradients in {setting.accumulate_in} at stage 0; "
            "choose stage 1, or leave out grad_accum_dtype"
        )
