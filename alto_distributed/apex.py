"""NVIDIA's apex, or another package of that name.

``pip install apex`` brings an unrelated project. Megatron takes any package of that name for NVIDIA's, and fails when
it builds a norm.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import warnings

ADVICE = (
    'the package "apex" here is not NVIDIA\'s. Megatron takes it for that and fails when it builds a norm ("Apex must '
    "be installed\"); pip uninstall apex, and install NVIDIA's from github.com/NVIDIA/apex if you need it"
)


def origin() -> str | None:
    """The directory of the package, or None if there is none. It is not imported."""
    try:
        spec = importlib.util.find_spec("apex")
    except (ImportError, ValueError):  # a program may have put something else in its place
        return None
    return next(iter(spec.submodule_search_locations or [spec.origin or ""]), "") if spec else None


def is_namesake() -> bool:
    """Whether there is a package of that name that is not NVIDIA's: it lacks ``apex.multi_tensor_apply``."""
    place = origin()
    return place is not None and importlib.machinery.PathFinder.find_spec("apex.multi_tensor_apply", [place]) is None


def warn_of_namesake() -> None:
    """One warning, where a program is about to use Megatron."""
    if is_namesake():
        warnings.warn(ADVICE, stacklevel=2)
