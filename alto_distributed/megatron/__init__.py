"""Megatron: ``OptimizerConfig(optimizer="alto")`` or ``--optimizer alto``, exact however the model is sharded.

Importing this module makes ``megatron.core.optimizer.get_megatron_optimizer`` accept ``alto``, once. Other
optimizers are not touched.
"""

from ..extras import require

require("megatron.core")

from .versions import check_version  # noqa: E402

check_version()  # before the imports below, which another version may not have

from .build import altos, diagnostics  # noqa: E402
from .config import AltoOptimizerConfig  # noqa: E402
from .register import register  # noqa: E402

__all__ = ["AltoOptimizerConfig", "altos", "diagnostics", "register"]

register()
