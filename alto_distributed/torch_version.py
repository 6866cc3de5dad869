"""The torch that this package needs, looked at before anything else of it is imported."""

from __future__ import annotations

import re

import torch

from .errors import UnsupportedVersion

#: The first with the public ``fully_shard``. pyproject.toml and README.md say the same.
OLDEST = (2, 6)


def check_torch(version: str) -> None:
    """Raise unless a version of torch is one that this package can work with.

    Raises:
        UnsupportedVersion: it is older; a ValueError and an ImportError.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or tuple(map(int, found.groups())) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise UnsupportedVersion(
            f"alto_distributed needs torch {needed} or newer, and {version} is installed; pip install 'torch>={needed}'"
        )


check_torch(str(torch.__version__))
