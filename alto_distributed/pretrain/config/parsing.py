"""Text that people or other programs wrote, as values: YAML and JSON, or a ValueError with one line that says why not.

Both libraries take the second of two equal keys in silence, and let through what only hurts later: values nested
without end, or a few lines whose aliases stand for billions of values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from ...errors import shown

_LONGEST_FILE = 1 << 20
_MOST_VALUES = 10_000
_DEEPEST = 32
_LONGEST_SHOWN = 400


def read_settings(path: Path, what: str) -> str:
    """The text of a settings file.

    Raises:
        ValueError: it cannot be read, is not text, or is too long to be one; ``what`` names it in the message.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_LONGEST_FILE + 1)
        if len(content) > _LONGEST_FILE:
            raise ValueError(f"it has more than {_LONGEST_FILE:,} bytes, and settings never do")
        return content.decode()
    except (OSError, ValueError) as error:
        raise ValueError(f"{what} cannot be read: {error}") from None


def parse_yaml(text: str, what: str) -> Any:
    """The value of a YAML document.

    Raises:
        ValueError: it is not YAML, has a key twice, or is too large.
    """
    try:
        value = yaml.load(text, Loader=_Loader)  # a SafeLoader
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply") from None
    except Exception as error:  # beside its own errors PyYAML lets KeyError, IndexError and others out
        raise ValueError(f"{what} is not YAML: {_one_line(error)}") from None
    check_size_limits(value, what)
    return value


def parse_json(text: str | bytes, what: str) -> Any:
    """The value of a JSON document.

    Raises:
        ValueError: it is not JSON, has a key twice, or is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{what} cannot be read as JSON: {_one_line(error)}") from None


def check_size_limits(value: Any, what: str) -> None:
    """Raise for what is nested deeper, or stands for more values, than any settings do; aliases count each time."""
    seen, waiting = 0, [(value, 1)]
    while waiting:
        inner, depth = waiting.pop()
        seen += 1
        if depth > _DEEPEST:
            raise ValueError(f"{what} is nested too deeply: settings never have more than {_DEEPEST} levels")
        if seen > _MOST_VALUES:
            raise ValueError(f"{what} holds more than {_MOST_VALUES:,} values, aliases counted each time")
        if isinstance(inner, Mapping):
            waiting += [(each, depth + 1) for each in inner.values()]
        elif isinstance(inner, (list, tuple, set)):
            waiting += [(each, depth + 1) for each in inner]


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        _refuse_twice(str(key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        return node


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_twice(key for key, _ in pairs)
    return dict(pairs)


def _refuse_twice(keys: Iterable[str]) -> None:
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            raise ValueError(f"it has the key {shown(key)} twice")
        seen.add(key)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number that JSON has")
