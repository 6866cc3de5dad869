"""The torch that this package needs, looked at before anything else of it is imported."""

from __future__ import annotations

import re

import torch

from .errors import UnsupportedVersion

#: The first with the public ``fully_shard``. pyproject.toml and README.md say the same.
OLDEST = (2, 6)

#: The first whose ``torch.load(weights_only=True)`` can be trusted with a file of unknown origin: before it, a crafted
#: one could corrupt memory (CVE-2026-24747).
OLDEST_THAT_LOADS_SAFELY = (2, 10)


def check_torch(version: str, oldest: tuple[int, int] = OLDEST, who: str = "alto_distributed") -> None:
    """Raise unless a version of torch is one that this package, or ``who`` of it, can work with.

    Raises:
        UnsupportedVersion: it is older; a ValueError and an ImportError.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or tuple(map(int, found.groups())) < oldest:
        needed = ".".join(map(str, oldest))
        raise UnsupportedVersion(
            f"{who} needs torch {needed} or newer, and {version} is installed; pip install 'torch>={needed}'"
        )


check_torch(str(torch.__version__))
