"""The torch that this package needs, looked at before anything else of it is imported."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def doctor_is_asked() -> bool:
    """Whether this process is ``python -m alto_distributed doctor`` or ``alto doctor``."""
    program, *arguments = sys.argv or [""]
    ours = Path(program).stem == "alto" or (program == "-m" and "alto_distributed" in sys.orig_argv)
    return ours and arguments[:1] == ["doctor"]


try:
    import torch
except Exception as error:  # none, or one whose libraries are missing
    if not doctor_is_asked():
        raise
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    raise SystemExit(
        f"alto_distributed doctor: torch cannot be imported ({reason}); install it anew: "
        "pip install --force-reinstall torch"
    ) from None

from .errors import UnsupportedVersion  # noqa: E402  (it imports torch too)

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


try:
    check_torch(str(torch.__version__))
except UnsupportedVersion:
    if not doctor_is_asked():
        raise
    # The rest of the package cannot be imported, and this is what the doctor is to say.
    from .doctor import main

    raise SystemExit(main(sys.argv[2:])) from None
