"""Megatron: ``OptimizerConfig(optimizer="alto")`` or ``--optimizer alto``, exact however the model is sharded.

Importing this module makes ``megatron.core.optimizer.get_megatron_optimizer`` accept ``alto``, once. Other
optimizers are not touched.
"""

from ..apex import warn_of_namesake
from ..extras import require
from ..framework_import import explained

require("megatron.core")

with explained("megatron.core", "megatron-core"):
    from .versions import check_version

    check_version()  # before the imports below, which another version may not have
warn_of_namesake()

from .build import altos, diagnostics  # noqa: E402
from .config import AltoOptimizerConfig  # noqa: E402
from .register import register  # noqa: E402

__all__ = ["AltoOptimizerConfig", "altos", "diagnostics", "register"]

register()
