"""A pretraining run's DeepSpeed config: the JSON that the run names, completed with what the run says itself.

Batch sizes, clipping, precision and the optimizer are the run's. A JSON may repeat them, or say "auto"; where it says
something else, it is refused, for one of the two would silently not be what is trained with.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from ....errors import nearest
from ....hyperparameters import check_eps
from ... import optimizers
from ...config.optimizer_options import WHOLE_NAMES
from ...config.settings import Run
from . import json_settings as deepspeed_json

#: The settings with which an optimizer gets whole parameters.
WHOLE = "deepspeed.config= training.precision=fp32"

_REFUSED = {
    "scheduler": "the learning rate is set by the run's schedule section",
    "amp": "the precision is the run's: training.precision",
    "torch_autocast": "the precision is the run's: training.precision",
    "tensor_parallel": "this engine is data-parallel; for tensor parallelism set engine: megatron",
}

#: Keys that change what is trained, and how. DeepSpeed ignores one that is misspelt; others may be anybody's.
_KNOWN = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("zero_optimization", "bf16", "bfloat16", "fp16", "data_types", "optimizer", "scheduler", "checkpoint"),
    *("prescale_gradients", "gradient_predivide_factor", "communication_data_type", "activation_checkpointing"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "managed_gradient_accumulation", "aio"),
    *("disable_allgather", "sparse_gradients", "seq_parallel_communication_data_type", "gradient_allreduce_op"),
)


def deepspeed_config(run: Run, data_parallel: int) -> dict[str, Any]:
    """The dictionary for ``deepspeed.initialize``.

    Args:
        run: with ``deepspeed.config`` "" for DeepSpeed without a JSON, which is ZeRO stage 0.
        data_parallel: number of ranks.

    Raises:
        ValueError: the JSON cannot be read, or says something else than the run, or something that this engine does
            not do.
    """
    config = deepspeed_json.read(run.deepspeed.config)
    _refuse(config)
    training = run.training
    _agree(config, "train_batch_size", training.global_batch, "training.global_batch")
    _agree(config, "train_micro_batch_size_per_gpu", training.micro_batch, "training.micro_batch")
    steps = (
        f"global_batch / (micro_batch x ranks) = {training.global_batch} / ({training.micro_batch} x {data_parallel})"
    )
    _agree(config, "gradient_accumulation_steps", run.accumulation(data_parallel), steps)
    _agree(config, "gradient_clipping", training.clip, "training.clip")
    _agree(config, "managed_gradient_accumulation", True, "accumulation, which DeepSpeed counts")
    if "bfloat16" in config:  # an older spelling, which DeepSpeed reads only where "bf16" is missing
        config.setdefault("bf16", config.pop("bfloat16"))
    for precision in ("bf16", "fp16"):
        section = config[precision] = config.get(precision) or {}
        wanted = training.precision == precision
        _agree(section, "enabled", wanted, f"training.precision={training.precision}, so {precision}", f"{precision}.")
    if training.precision == "fp16" and deepspeed_json.zero_stage(config) == 0:
        raise ValueError(
            "fp16 needs ZeRO: without it DeepSpeed does not scale the loss. Name a JSON with stage 1 or more in "
            "deepspeed.config, such as configs/deepspeed/pretrain-stage1.json, or set training.precision: bf16"
        )
    _optimizer(config, run)
    stage = deepspeed_json.zero_stage(config)
    if run.optimizer.name in WHOLE_NAMES and (stage or training.precision != "fp32"):
        raise ValueError(
            f"{run.optimizer.name} looks at whole parameters, and this run has ZeRO stage {stage} in "
            f"{training.precision}, which hands optimizers pieces of them. Add to the command: {WHOLE}"
        )
    return config


def refuse_what_deepspeed_refuses(config: dict[str, Any], name: str) -> None:
    """Have DeepSpeed read a config, for its errors are of many kinds, and come late.

    Raises:
        ValueError: it does not take it.
    """
    from deepspeed.runtime.config import DeepSpeedConfig  # a dry run reads this module without DeepSpeed

    try:
        DeepSpeedConfig(copy.deepcopy(config))
    except Exception as error:  # assertions, pydantic's, TypeError and KeyError from wrong types
        said = " ".join(str(error).split())
        raise ValueError(
            f"deepspeed.config: DeepSpeed does not take {name or 'what the run says'}: {type(error).__name__}: "
            f"{said[:400]}"
        ) from error


def _refuse(config: Mapping[str, Any]) -> None:
    for key, reason in _REFUSED.items():
        section = config.get(key)
        if section and not (isinstance(section, dict) and section.get("enabled") is False):
            raise ValueError(f'remove "{key}" from the DeepSpeed JSON: {reason}')
    for key in config:
        near = "" if key in _KNOWN else nearest(key, _KNOWN, cutoff=0.85)
        if near:
            name = json.dumps(key)
            raise ValueError(f'the DeepSpeed JSON has {name}, which DeepSpeed would ignore; did you mean "{near}"?')
    checkpoint = config.get("checkpoint")
    if isinstance(checkpoint, dict) and checkpoint.get("load_universal"):
        raise ValueError(
            'remove "checkpoint": {"load_universal": true} from the DeepSpeed JSON: checkpoints are converted when the '
            "number of ranks has changed, and only then"
        )


def _agree(section: dict[str, Any], key: str, ours: Any, setting: str, where: str = "") -> None:
    """Fill in a value, or refuse another one that is there already."""
    theirs = section.get(key, "auto")
    if theirs in ("auto", None):
        section[key] = ours
    elif theirs != ours:
        raise ValueError(
            f'the DeepSpeed JSON has "{where}{key}": {json.dumps(theirs)}, and the run has {json.dumps(ours)} '
            f"({setting}); remove it from the JSON, or make them equal"
        )


def _optimizer(config: dict[str, Any], run: Run) -> None:
    """DeepSpeed is given the optimizer, so the config names none."""
    arguments = optimizers.arguments(run)
    kind = "ALTO" if run.optimizer.name in optimizers.ALTO_NAMES else run.optimizer.name
    theirs = config.pop("optimizer", None)
    if theirs is not None:
        _compare(theirs, kind, arguments)
    if run.optimizer.name in optimizers.THIRD_PARTY:
        # Those that ZeRO gets treat each element by itself, so a shard is exact; DeepSpeed asks because others do not.
        config["zero_allow_untested_optimizer"] = True
    # Offloaded, it steps on the CPU: slower than DeepSpeed's own Adam, and the optimizer that the run names.
    config.setdefault("zero_force_ds_cpu_optimizer", False)


def _compare(theirs: Any, kind: str, arguments: Mapping[str, Any]) -> None:
    if not isinstance(theirs, dict) or not isinstance(theirs.get("params") or {}, dict):
        raise ValueError(
            'the DeepSpeed JSON\'s "optimizer" should be an object like {"type": "ALTO", "params": {...}}; remove it'
        )
    named = theirs.get("type")
    if str(named).lower() != kind.lower():
        raise ValueError(
            f'the DeepSpeed JSON has "optimizer" of type {json.dumps(named)}, and the run has {kind}; remove '
            '"optimizer" from the JSON'
        )
    params = theirs.get("params") or {}
    for key, value in params.items():
        if key not in arguments:
            raise ValueError(
                f'the DeepSpeed JSON\'s "optimizer.params" has "{key}", which is no option of {kind} here; remove it '
                f"(known: {', '.join(arguments)})"
            )
        ours = _plain(arguments[key])
        if key == "eps" and isinstance(ours, list) and isinstance(value, (int, float)):
            value = list(check_eps(value))
        _agree({key: value}, key, ours, f"optimizer, {key}", "optimizer.params.")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
