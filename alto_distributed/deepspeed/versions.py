"""The versions of DeepSpeed that this folder was made for."""

from __future__ import annotations

import deepspeed

from ..errors import UnsupportedVersion

#: The layouts of flat shards are read from private fields of the ZeRO wrappers, and the hooks sit in
#: private methods of the engine; both change between releases without notice.
SUPPORTED_VERSIONS = ("0.19.8",)


def check_version() -> None:
    """Raise an UnsupportedVersion if the installed DeepSpeed is another."""
    if deepspeed.__version__.split("+")[0] not in SUPPORTED_VERSIONS:
        raise UnsupportedVersion(
            f"alto_distributed supports DeepSpeed {', '.join(SUPPORTED_VERSIONS)}, and {deepspeed.__version__} is "
            "installed. It reads how ZeRO's private buffers are laid out, which changes between releases; "
            f"pip install deepspeed=={SUPPORTED_VERSIONS[-1]}"
        )
