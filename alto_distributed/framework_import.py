"""What to do when a framework is installed and cannot be imported, for example because torch is too new for it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import sys
from collections.abc import Iterator

import torch

from .errors import UnsupportedVersion, one_line


@contextlib.contextmanager
def explained(module: str, package: str) -> Iterator[None]:
    """Imports of a framework. If it fails in its own code, the error is one line that says what to do.

    Args:
        module: the framework's, such as "megatron.core".
        package: its name for pip.

    Raises:
        UnsupportedVersion: it cannot be imported. Not if it is not installed at all: that is Python's own error.
    """
    try:
        yield
    except UnsupportedVersion:
        raise
    except Exception as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name in (module, module.partition(".")[0])
        if absent or module in sys.modules:
            raise
        raise UnsupportedVersion(
            f"{package} cannot be imported with torch {torch.__version__} ({one_line(error)}); {advice(package)}"
        ) from error


def advice(package: str) -> str:
    """What to do about a package that cannot be imported."""
    unmet = conflicts(package)
    if unmet:
        return unmet[0]
    return f"pip install another release of it that fits this torch, or pip uninstall {package}"


def conflicts(package: str) -> list[str]:
    """Requirements of an installed package that are not met, each with what to do."""
    try:
        from packaging.requirements import InvalidRequirement, Requirement
        from packaging.version import Version

        lines = importlib.metadata.requires(package) or []
    except (ImportError, importlib.metadata.PackageNotFoundError):
        return []
    found = []
    for line in lines:
        try:
            needed = Requirement(line)
        except InvalidRequirement:
            continue
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        wanted = f"{needed.name}{needed.specifier}"
        try:
            have = importlib.metadata.version(needed.name)
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} requires {wanted}, which is not installed; pip install '{wanted}'")
            continue
        # To pip, NVIDIA's 2.10.0a0+...nv is older than 2.10. It is that release, as they built it.
        release = Version(have).base_version if re.search(r"\+.*nv", have) else have
        if not needed.specifier.contains(release, prereleases=True):
            found.append(f"{package} requires {wanted}, and {have} is installed; pip install '{wanted}'")
    return found
