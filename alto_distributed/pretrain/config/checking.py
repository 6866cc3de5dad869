"""Checks of settings: pydantic finds what is wrong, and one function says it in one line.

A message says which setting is wrong, what it was, and what it may be.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError
from pydantic.dataclasses import dataclass as validated_dataclass
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from ...errors import did_you_mean, shown

Section = TypeVar("Section")


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("number", "true and false are no numbers")
    return value


Flag = StrictBool
Text = StrictStr
#: Whole numbers: from 1 on, and from 0 on.
Count = Annotated[StrictInt, Field(ge=1, lt=2**63)]
Natural = Annotated[StrictInt, Field(ge=0, lt=2**63)]
#: Numbers. They may be text: YAML reads 1e-2 as such.
Amount = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, lt=2**63)]
Share = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, le=1)]
#: Four months at most, which every backend can count.
Seconds = Annotated[float, BeforeValidator(_no_bool), Field(ge=1, le=10_000_000)]

_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", dict: "keys with values"}
_UNKNOWN = ("unexpected_keyword_argument", "invalid_key")
_OUT_OF_RANGE = ("greater_than_equal", "less_than", "less_than_equal")


def checked(cls: type[Section]) -> type[Section]:
    """Have pydantic check a frozen dataclass whenever one is built.

    The constructor raises ValueError with one line about the first value that is wrong.
    """
    made: Any = validated_dataclass(frozen=True, config=ConfigDict(extra="forbid"))(cls)
    validate = made.__init__

    @functools.wraps(validate)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            validate(self, *args, **kwargs)
        except ValidationError as error:
            raise ValueError(refusal(error, made)) from None

    made.__init__, made.__doc__ = __init__, cls.__doc__
    return typing.cast("type[Section]", made)


def refusal(error: ValidationError, cls: Any) -> str:
    """What to say about settings that are not a ``cls``: the first unknown name, or else the first wrong value."""
    problems = error.errors(include_url=False)
    problem = next((p for p in problems if p["type"] in _UNKNOWN), problems[0])
    kind, place, value = problem["type"], problem["loc"], problem["input"]
    name = ".".join(map(str, place))
    if kind in _UNKNOWN:
        known = list(_fields_at(cls, place[:-1]))
        return f"there is no setting {shown(name)}{did_you_mean(place[-1], known)} (known here: {', '.join(known)})"
    if kind == "value_error":  # what a section says itself
        return str(problem["ctx"]["error"])
    if kind == "dataclass_type":
        return f"{name or 'the settings'} should be a section with keys, not {shown(value)}"
    if place[-1] == "[key]":
        return f"{'.'.join(map(str, place[:-2]))} has the key {shown(value)}, and keys should be text"
    field = _fields_at(cls, place[:-1])[str(place[-1])]
    if kind == "literal_error":
        return f"{name}={shown(value)} is not one of {', '.join(typing.get_args(field.annotation))}"
    if kind in _OUT_OF_RANGE:
        number = float(value) if field.annotation is float else value
        return f"{name}={shown(number)} is out of range: it must {_allowed(field)}"
    wanted: Any = typing.get_origin(field.annotation) or field.annotation
    return f"{name}={shown(value)} should be {_KINDS[wanted]}"


def _fields_at(cls: Any, place: Sequence[int | str]) -> dict[str, FieldInfo]:
    """The settings of a section."""
    for key in place:
        cls = cls.__pydantic_fields__[str(key)].annotation
    found: dict[str, FieldInfo] = cls.__pydantic_fields__
    return found


def _allowed(field: FieldInfo) -> str:
    limits = {kind: getattr(limit, kind) for limit in field.metadata for kind in ("ge", "le") if hasattr(limit, kind)}
    return "lie between {ge} and {le}".format(**limits) if "le" in limits else f"be a number from {limits['ge']} on"
