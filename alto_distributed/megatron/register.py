"""Registration: one function of Megatron's is wrapped, wherever it has been imported to."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

from megatron.core import optimizer as core_optimizer
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

from ..param_groups import know_embedding
from .build import build
from .config import NAMES
from .other_optimizers import refuse_altos_checkpoints
from .precision_aware import accept_in_plain_configs
from .versions import check_version

_FUNCTION = "get_megatron_optimizer"


def register() -> None:
    """Register with the megatron-core that is installed. Idempotent.

    Raises:
        ValueError: megatron-core is of a version this package was not made for.
    """
    original = getattr(core_optimizer, _FUNCTION)
    if getattr(original, "knows_alto", False):
        return
    check_version()
    know_embedding(VocabParallelEmbedding)
    accept_in_plain_configs(NAMES)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_megatron_optimizer(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        if str(bound.arguments["config"].optimizer).lower() in NAMES:
            return build(original, bound)
        return refuse_altos_checkpoints(original(*args, **kwargs))

    get_megatron_optimizer.knows_alto = True  # type: ignore[attr-defined]
    # "from megatron.core.optimizer import get_megatron_optimizer" may have been run before we came.
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(_FUNCTION) is original:
            setattr(module, _FUNCTION, get_megatron_optimizer)
