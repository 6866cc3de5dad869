"""What differs between releases of DeepSpeed, and which of them are known to work.

A release is not refused for its number. What ALTO wraps or calls must be there; it is looked up by name. How ZeRO lays
out its shards is verified against the model's weights when an engine is built (:mod:`..sharding.proof`).
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.lr_schedules import OneCycle
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ..errors import UnsupportedVersion
from ..sharding.collective import everyone

#: Releases in which the tests ran (scripts/matrix.py), oldest first. Others warn.
SUPPORTED_VERSIONS = (
    "0.16.9", "0.17.6", "0.18.0", "0.18.1", "0.18.2", "0.18.3", "0.18.4", "0.18.5", "0.18.6",
    "0.19.0", "0.19.1", "0.19.2", "0.19.3", "0.19.4", "0.19.5", "0.19.6", "0.19.7", "0.19.8",
)  # fmt: skip

#: Methods that are wrapped or called.
_METHODS: dict[type, tuple[str, ...]] = {
    DeepSpeedConfig: ("_initialize_params",),
    OneCycle: ("_initialize_momentum",),
    DeepSpeedEngine: (
        "_configure_optimizer",
        "_do_sanity_check",
        "_configure_basic_optimizer",
        "_configure_fp16_optimizer",
        "_take_model_step",
        "load_checkpoint",
    ),
    BF16_Optimizer: ("state_dict", "_lazy_init_hp_params_optimizer_state"),
    DeepSpeedZeroOptimizer: (
        "load_state_dict",
        "_restore_base_optimizer_state",
        "_lazy_init_hp_params_optimizer_state",
    ),
    DeepSpeedZeroOptimizer_Stage3: (
        "load_hp_checkpoint_state",
        "load_hp_checkpoint_state_from_checkpoint_dir_stage3",
        "offload_states",
        "reload_states",
        "_configure_offloading",
        "_create_fp32_partitions",
    ),
}


def check_version() -> None:
    """Raise an UnsupportedVersion if the installed DeepSpeed lacks a method that ALTO needs."""
    for owner, names in _METHODS.items():
        for name in names:
            if not hasattr(owner, name):
                raise missing(f"{owner.__name__} has no method {name}")


def missing(what: str) -> UnsupportedVersion:
    """The error for a name that is not there."""
    return UnsupportedVersion(
        f"ALTO does not work with DeepSpeed {deepspeed.__version__}: {what}. Install a supported version; "
        f"pip install deepspeed=={SUPPORTED_VERSIONS[-1]}"
    )


def is_tested() -> bool:
    """Whether the tests ran with the installed release."""
    return deepspeed.__version__.split("+")[0] in SUPPORTED_VERSIONS


def warn_if_untested() -> None:
    """Say once that the tests did not run with the installed release."""
    if not is_tested():
        warnings.warn(
            f"ALTO: the tests ran with DeepSpeed {SUPPORTED_VERSIONS[0]} to {SUPPORTED_VERSIONS[-1]}, and "
            f"{deepspeed.__version__} is installed. What ALTO reads from it is verified; the rest is untested.",
            stacklevel=2,
        )


# -- by feature ----------------------------------------------------------------------------------------


def starts_in_buffers(wrapper: Any) -> Sequence[Sequence[int] | None]:
    """Stages 1 and 2: where parameters begin in each flat group; None where they lie end to end (before 0.19.7)."""
    starts: Sequence[Sequence[int]] | None = getattr(wrapper, "round_robin_bit16_offsets", None)
    return starts if starts is not None else [None] * len(wrapper.round_robin_bit16_groups)


def sub_group_process_groups(wrapper: Any) -> Sequence[Any]:
    """Stage 3: the process group of each sub-group; before 0.19.4 that of its parameters."""
    groups: Sequence[Any] | None = getattr(wrapper, "sub_group_process_groups", None)
    return groups if groups is not None else [params[0].ds_process_group for params in wrapper.fp16_groups]


def load_state(wrapper: Any, folder: str, key: str, param: torch.Tensor) -> Any:
    """Stage 3: this rank's part of a state in a universal checkpoint; the parameter is asked for from 0.19.4 on."""
    method = wrapper.load_hp_checkpoint_state
    return method(folder, key, param=param) if "param" in inspect.signature(method).parameters else method(folder, key)


def refuse_universal_stage3() -> None:
    """Raise a ValueError where universal checkpoints of stage 3 have the first sub-group alone (before 0.18.0)."""
    method = DeepSpeedZeroOptimizer_Stage3.load_hp_checkpoint_state_from_checkpoint_dir_stage3
    if "param_shapes" in inspect.signature(inspect.unwrap(method)).parameters:
        raise ValueError(
            f"DeepSpeed {deepspeed.__version__} converts and loads the first parameter group of ZeRO stage 3 alone, "
            "with any optimizer; use 0.18.0 or later for it"
        )


def faults(engine: Any, stage: int) -> Iterator[str]:
    """Settings in which the installed release computes wrong gradients, with any optimizer: docs/versions.md."""
    version = _numbers(deepspeed.__version__)
    if version is None:
        return
    if (0, 18, 7) <= version < (0, 19) and stage in (1, 2) and everyone() is not None and _torch_cuts_views():
        yield (
            f"DeepSpeed {deepspeed.__version__} fails at ZeRO stages 1 and 2 over several ranks under torch "
            f'{torch.__version__} ("Output 0 of Split is a view"), with any optimizer; use DeepSpeed 0.18.6 or 0.19.8'
        )
    wrong = f"gives wrong gradients in DeepSpeed {deepspeed.__version__}, with any optimizer"
    if version < (0, 19, 8) and stage in (1, 2) and not engine.zero_contiguous_gradients():
        yield f'"contiguous_gradients": false {wrong}; remove it, or use 0.19.8'
    if (0, 17) <= version < (0, 18, 3) and stage == 2 and engine.gradient_accumulation_steps() > 1:
        yield f"gradient accumulation at ZeRO stage 2 {wrong}; use stage 1, or 0.19.8"
    if engine.bfloat16_enabled():
        if (0, 17) <= version < (0, 18, 9) and stage == 0:
            yield f"bf16 at ZeRO stage 0 {wrong}; use stage 1, or 0.19.8"
        if (0, 17) <= version < (0, 19) and stage == 1 and engine.get_data_types()[1] == torch.float32:
            yield f'bf16 with "grad_accum_dtype": "fp32" at ZeRO stage 1 {wrong}; use stage 2, or 0.19.8'


def warn_of_gloo(engine: Any) -> None:
    """Before 0.19.8 stage 3 waits for one of several all-gathers. NCCL runs them in order, gloo does not."""
    version, group = _numbers(deepspeed.__version__), everyone()
    if version is None or version >= (0, 19, 8) or group is None or engine.zero_optimization_stage() < 3:
        return
    if "gloo" in str(torch.distributed.get_backend(group)):
        warnings.warn(
            f"DeepSpeed {deepspeed.__version__} at ZeRO stage 3 over gloo may use weights before they have arrived, "
            "with any optimizer; use 0.19.8, NCCL, or stage 2",
            stacklevel=2,
        )


def _numbers(version: str) -> tuple[int, ...] | None:
    found = re.match(r"(\d+)\.(\d+)\.?(\d*)", version)
    return None if found is None else tuple(int(number or 0) for number in found.groups())


def _torch_cuts_views() -> bool:
    """Whether ``all_gather_single`` refuses a piece of a split tensor."""
    return (_numbers(torch.__version__) or (0,)) >= (2, 11)


def option(engine: Any, name: str) -> Any:
    """What an engine says about an option, or None where the release does not have it."""
    value = getattr(engine, name, None)
    return value() if callable(value) else value
