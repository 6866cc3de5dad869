"""DeepSpeed: ``"optimizer": {"type": "ALTO"}`` in the JSON, exact in every ZeRO stage.

Importing this module registers ALTO, EAdamW and ESGD (any letter case) with DeepSpeed, once. A client-built
``ALTO`` passed to ``deepspeed.initialize`` is served as well. Other optimizers are not touched.
"""

from ..extras import require
from ..framework_import import explained

require("deepspeed")

with explained("deepspeed", "deepspeed"):
    from .versions import check_version

    check_version()  # before the imports below, which another version may not have

from .build import ESGD  # noqa: E402
from .data_classes import only_data  # noqa: E402
from .register import register  # noqa: E402

__all__ = ["ESGD", "only_data", "register"]

register()
