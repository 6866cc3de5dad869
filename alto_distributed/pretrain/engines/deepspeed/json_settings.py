"""The DeepSpeed JSON that a run names, read and looked through. The engine completes it, and refuses more."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ....errors import shown
from ...config.parsing import check_size_limits, parse_json, read_settings

#: Keys whose values are objects; several programs read them.
_SECTIONS = ("zero_optimization", "bf16", "bfloat16", "fp16", "data_types", "checkpoint")

_SECRET = re.compile(r"(^|_)(api_?key|access_?key|password|passwd|secret|secret_key|token)$", re.IGNORECASE)


def read(name: str) -> dict[str, Any]:
    """The settings in a DeepSpeed JSON; none for "".

    Raises:
        ValueError: it cannot be read, is not an object, or holds a secret.
    """
    if not name:
        return {}
    what = f"deepspeed.config: {name}"
    config = parse_json(read_settings(Path(name), what), what)
    check_size_limits(config, what)
    if not isinstance(config, dict):
        raise ValueError(f"{what} holds a {type(config).__name__}, and should hold an object")
    for key in _SECTIONS:
        if config.get(key) is not None and not isinstance(config[key], dict):
            raise ValueError(f'{what}: "{key}" should be an object, not {shown(config[key])}')
    for secret in _secrets(config):
        raise ValueError(
            f'{what}: remove "{secret}". DeepSpeed prints its settings and writes them into every checkpoint, which '
            "is no place for a secret; the programs that want one take it from the environment (COMET_API_KEY, "
            "WANDB_API_KEY)"
        )
    zero_stage(config)
    return config


def zero_stage(config: Mapping[str, Any]) -> int:
    """The ZeRO stage that a config asks for."""
    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage <= 3:
        raise ValueError(f'the DeepSpeed JSON has "zero_optimization.stage": {shown(stage)}, and it must be 0 to 3')
    return stage


def _secrets(value: Any, where: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            name = f"{where}.{key}" if where else str(key)
            if isinstance(inner, str) and inner and _SECRET.search(str(key)):
                yield name
            yield from _secrets(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _secrets(inner, where)
