"""``use_precision_aware_optimizer``: the precision that it asks for, in ALTO's own states.

Megatron leaves the float32 weights to TransformerEngine's Adam then, and hands it 16-bit weights with gradients in
``decoupled_grad``. ALTO keeps Megatron's usual float32 shards. Gradients that were summed in bf16 become float32 before
they are clipped, which loses nothing. So Megatron itself never sees the setting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig

FLAG = "use_precision_aware_optimizer"

#: Megatron's fields -> the precisions in which ALTO has that tensor.
_SUPPORTED: dict[str, tuple[torch.dtype, ...]] = {
    "main_params_dtype": (torch.float32,),
    "main_grads_dtype": (torch.float32, torch.bfloat16),
    "exp_avg_dtype": (torch.float32, torch.bfloat16),
    "exp_avg_sq_dtype": (torch.float32,),
}

FIELDS = (FLAG, *_SUPPORTED)

_WORDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "fp8"}


def check(settings: Any) -> None:
    """Raise a ValueError for a precision that ALTO does not have.

    Args:
        settings: a config, or arguments of the command line that Megatron has validated.
    """
    for name, supported in _SUPPORTED.items():
        dtype = getattr(settings, name, torch.float32)
        if getattr(settings, FLAG, False) and dtype not in supported:
            words = " or ".join(_WORDS[known] for known in supported)
            raise ValueError(
                f"ALTO under Megatron: {name}={_WORDS.get(dtype, dtype)} is not supported; set it to {words} "
                f"(--{name.replace('_', '-')} {_WORDS[supported[-1]]})"
            )


def asks_for_bf16(config: OptimizerConfig, field: str) -> bool:
    """Whether Megatron's own field asks for bf16, such as ``exp_avg_dtype``."""
    return bool(getattr(config, FLAG)) and getattr(config, field, None) == torch.bfloat16


@contextmanager
def hidden(settings: Any) -> Iterator[None]:
    """While Megatron looks at settings: they say nothing of precision."""
    given = {name: getattr(settings, name) for name in FIELDS if hasattr(settings, name)}
    for name in given:
        setattr(settings, name, False if name == FLAG else torch.float32)
    try:
        yield
    finally:
        for name, value in given.items():
            setattr(settings, name, value)


def accept_in_plain_configs(names: tuple[str, ...]) -> None:
    """Let ``OptimizerConfig(optimizer="alto", use_precision_aware_optimizer=True)`` be built. Idempotent.

    Args:
        names: the optimizers that are ALTO. Configs of others are checked by Megatron alone.
    """
    original: Callable[[OptimizerConfig], None] = OptimizerConfig.__post_init__
    if getattr(original, "knows_alto", False):
        return

    @functools.wraps(original)
    def __post_init__(config: OptimizerConfig) -> None:
        if str(config.optimizer).lower() not in names:
            return original(config)
        check(config)
        with hidden(config):
            original(config)

    __post_init__.knows_alto = True  # type: ignore[attr-defined]
    OptimizerConfig.__post_init__ = __post_init__
