"""What the package needs, by its metadata and that of the installed packages."""

import importlib.metadata

import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .cases import REPO


def required(extras):
    """The names of all that this package with some extras needs here."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    found = {}
    for line in [
        *project["dependencies"],
        *(line for extra in extras for line in project["optional-dependencies"][extra]),
    ]:
        _add_required(Requirement(line), found)
    return found


def _add_required(wanted, found):
    name, extras = canonicalize_name(wanted.name), {"", *wanted.extras}
    if not found.get(name, set()).issuperset(extras):
        found.setdefault(name, set()).update(extras)
        for needed in map(Requirement, importlib.metadata.requires(name) or ()):
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                _add_required(needed, found)
