"""AMD's own description of an instruction, run as it is written, for one lane.

tinygrad ships the pseudocode of AMD's manuals. It is turned into Python line by line. Numbers carry their type, as
``S0.f32`` says, and are exact where the manual is. It is slow: the emulator is tested against it, and does not use it.
"""

from __future__ import annotations

import functools
import importlib
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

_FLOATS = {"f16": (np.float16, 16, 11), "f32": (np.float32, 32, 24), "f64": (np.float64, 64, 53)}


def rounded(value: Fraction, kind: str) -> int:
    """The bits of the float nearest to an exact number, ties to even."""
    width, digits = _FLOATS[kind][1:]
    bias = (1 << width - digits - 1) - 1
    sign = (1 if value < 0 else 0) << width - 1
    value = abs(value)
    if not value:
        return sign
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > value
    exponent = max(exponent, 1 - bias)
    steps = round(value / Fraction(2) ** (exponent - digits + 1))  # Python rounds ties to even
    # Where the steps overflow their digits, the exponent grows by one: adding does just that.
    bits = (exponent + bias - 1 << digits - 1) + steps
    return sign | min(bits, 2 * bias + 1 << digits - 1)


class Number:
    """Bits of a type: f, i, u or b, and a width."""

    def __init__(self, kind: str, bits: int) -> None:
        self.kind, self.width = kind, int(kind[1:])
        self.bits = int(bits) & (1 << self.width) - 1

    @property
    def value(self) -> Any:
        if self.kind in _FLOATS:
            return np.array([self.bits], f"u{self.width // 8}").view(_FLOATS[self.kind][0])[0]
        if self.kind[0] == "i" and self.bits >> self.width - 1:
            return self.bits - (1 << self.width)
        return self.bits

    @classmethod
    def of(cls, kind: str, value: Any) -> Number:
        if kind not in _FLOATS:
            return cls(kind, int(value))
        if isinstance(value, Fraction):
            return cls(kind, rounded(value, kind))
        return cls(kind, int.from_bytes(_FLOATS[kind][0](value).tobytes(), "little"))

    def __getattr__(self, kind: str) -> Number:
        if re.fullmatch(r"[fiub]\d+", kind):
            return Number(kind, self.bits)
        raise AttributeError(kind)

    def __getitem__(self, place: Any) -> Number:
        if isinstance(place, tuple):
            high, low = place
            if high < low:  # in reversed order
                return Number(f"u{low - high + 1}", int(f"{self.bits:0{self.width}b}"[::-1], 2) >> high)
            return Number(f"u{high - low + 1}", self.bits >> low)
        return Number("u1", self.bits >> int(place))

    def __bool__(self) -> bool:
        return bool(self.value)

    def __index__(self) -> int:
        return int(self.value)

    def __neg__(self) -> Number:
        if self.kind in _FLOATS:
            return Number(self.kind, self.bits ^ 1 << self.width - 1)
        return Number.of(self.kind, -self.value)

    def __invert__(self) -> Number:
        return Number(self.kind, ~self.bits)

    def __rpow__(self, base: float) -> Fraction:
        return Fraction(base) ** max(-5000, min(5000, self.value))

    def __hash__(self) -> int:
        return hash(self.bits)


def _plain(other: Any) -> Any:
    return other.value if isinstance(other, Number) else other


def _arithmetic(function: Callable[..., Any], reverse: bool = False) -> Callable[..., Number]:
    def run(self: Number, other: Any) -> Number:
        a, b = self.value, _plain(other)
        if isinstance(b, Fraction):
            if not np.isfinite(a) or a == 0:
                return self
            a = Fraction(float(a))
        elif self.kind in _FLOATS:
            b = _FLOATS[self.kind][0](b)
        with np.errstate(all="ignore"):
            return Number.of(self.kind, function(b, a) if reverse else function(a, b))

    return run


def _comparison(function: Callable[[Any, Any], Any]) -> Callable[..., bool]:
    return lambda self, other: bool(function(self.value, _plain(other)))


for _name, _function in {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
}.items():
    setattr(Number, f"__{_name}__", _arithmetic(_function))
    setattr(Number, f"__r{_name}__", _arithmetic(_function, reverse=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Number, f"__{_name}__", _comparison(getattr(operator, _name)))


# -- functions of the manual ------------------------------------------------------------------------------


def _cast(kind: str, value: Any) -> Number:
    """Such as 64'U(x): the same value in another type."""
    if not isinstance(value, Number) or kind not in _FLOATS or value.kind not in _FLOATS or not np.isnan(value.value):
        return Number.of(kind, _plain(value))
    digits, width = _FLOATS[kind][2], _FLOATS[kind][1]
    moved = digits - _FLOATS[value.kind][2]  # a NaN keeps its sign, and what makes it a signaling one
    payload = value.bits & (1 << _FLOATS[value.kind][2] - 1) - 1
    payload = payload << moved if moved >= 0 else payload >> -moved
    exponent = (1 << width - digits) - 1 << digits - 1
    return Number(kind, (value.bits >> value.width - 1) << width - 1 | exponent | payload)


def _converted(kind: str) -> Callable[[Number], Number]:
    def convert(x: Number) -> Number:
        with np.errstate(all="ignore"):
            return Number.of(kind, x.value)

    return convert


def _f64_to_u32(x: Number) -> Number:
    return Number("u32", 0 if np.isnan(x.value) else int(min(max(x.value, 0), 2**32 - 1)))


def _fma(a: Number, b: Number, c: Number) -> Number:
    values = [x.value for x in (a, b, c)]
    if not np.isfinite(values).all():
        with np.errstate(all="ignore"):
            return Number.of(a.kind, values[0] * values[1] + values[2])
    exact = Fraction(float(values[0])) * Fraction(float(values[1])) + Fraction(float(values[2]))
    if not exact:  # the sign of zero is that of a sum of zeros
        return Number.of(a.kind, values[0] * values[1] + values[2])
    return Number(a.kind, rounded(exact, a.kind))


def _sign_from_bit(x: Number, width: Number) -> Number:
    count = width.value
    if count and x.bits >> count - 1 & 1:
        return Number(x.kind, x.bits | -1 << count)
    return x


def _is_nan(x: Number, quiet: tuple[bool, ...]) -> bool:
    return bool(np.isnan(x.value)) and bool(x.bits >> _FLOATS[x.kind][2] - 2 & 1) in quiet


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "cast": _cast,
    "fma": _fma,
    "signext": lambda x: Number.of("i64", x.value),
    "signext_from_bit": _sign_from_bit,
    "f16_to_f32": _converted("f32"),
    "f32_to_f16": _converted("f16"),
    "f32_to_f64": _converted("f64"),
    "f64_to_f32": _converted("f32"),
    "i32_to_f64": _converted("f64"),
    "f64_to_u32": _f64_to_u32,
    "trunc": lambda x: Number.of(x.kind, np.trunc(x.value)),
    "sqrt": lambda x: Number.of(x.kind, np.sqrt(x.value)),
    "abs": lambda x: Number(x.kind, x.bits & ~(1 << x.width - 1)),
    "sign": lambda x: x.bits >> x.width - 1,
    "exponent": lambda x: x.bits >> _FLOATS[x.kind][2] - 1 & (1 << x.width - _FLOATS[x.kind][2]) - 1,
    "isNAN": lambda x: _is_nan(x, (False, True)),
    "isQuietNAN": lambda x: _is_nan(x, (True,)),
    "isSignalNAN": lambda x: _is_nan(x, (False,)),
}


# -- the text -----------------------------------------------------------------------------------------------


class NotThere(Exception):
    """The manual has no pseudocode of an instruction, or none that says what it does."""


@functools.cache
def text_of(architecture: str, name: str) -> str:
    """The pseudocode of an instruction, by its name without the encoding."""
    table = importlib.import_module(f"tinygrad.runtime.autogen.amd.{architecture}.str_pcode").PCODE
    for operation, text in table.items():
        if re.sub(r"_E(32|64)$", "", operation.name) == name:
            return str(text)
    raise NotThere(f"{architecture} {name}")


def _expression(text: str) -> str:
    text = re.sub(r"(\d+)'([UIFB])\(", lambda m: f"cast('{m[2].lower()}{m[1]}', ", text)
    text = re.sub(r"\d+'(\d+)U?\b", r"\1", text)
    text = re.sub(r"\b(0x[0-9a-fA-F]+?|\d+)(?:ULL|LL|U)\b", r"\1", text)
    text = re.sub(r"\b(\d+\.\d+)F\b", r"\1", text)
    text = re.sub(r"\[(\d+) : (\d+)\]", r"[\1, \2]", text)
    text = text.replace("&&", " and ").replace("||", " or ").replace("<>", "!=")
    text = re.sub(r"!(?!=)", " not ", text)
    choice = re.fullmatch(r"(.*?) \? (.*) : (.*)", text)  # of a whole expression, or of one in brackets of an index
    if choice and choice[1].count("[") == choice[1].count("]"):
        return f"({choice[2]}) if ({choice[1]}) else ({choice[3]})"
    return re.sub(r"\[([^\[\]]*) \? (\d+) : (\d+)\]", r"[\2 if \1 else \3]", text)


_TARGET = re.compile(r"(\w+)(?:\.([a-z]\d+))?(?:\[([^\]]+)\])?(?:\.([a-z]\d+))?")


@functools.cache
def _compiled(text: str) -> Any:
    lines, depth = [], 0
    for line in text.split("\n"):
        statement = line.strip().rstrip(";")
        word = statement.partition(" ")[0]
        if not statement or statement.startswith("//") or word == "declare":
            continue
        if word in ("if", "elsif"):
            depth -= word == "elsif"
            condition = _expression(statement.removeprefix(word).removesuffix("then").strip())
            lines.append("  " * depth + f"{'if' if word == 'if' else 'elif'} {condition}:")
            depth += 1
        elif statement == "else":
            lines.append("  " * (depth - 1) + "else:")
        elif statement == "endif":
            depth -= 1
        else:
            lines.append("  " * depth + _assignment(statement))
    return compile("\n".join(lines), "pseudocode", "exec")


def _assignment(statement: str) -> str:
    found = re.fullmatch(r"(\S.*?) (\+?)= (.*)", statement)
    target = found and _TARGET.fullmatch(found[1])
    if not found or not target:
        raise NotThere(statement)
    value = _expression(found[3])
    if found[2]:
        value = f"{found[1]} + ({value})"
    name, kind, place, part = target.groups()
    place = None if place is None else place.replace(":", ",")
    return (
        f"put({name!r}, {kind or part!r}, ({place},), {value})" if place else f"put({name!r}, {kind!r}, None, {value})"
    )


def run(architecture: str, name: str, variables: dict[str, Any]) -> dict[str, Any]:
    """The variables after an instruction. Registers are :class:`Number`; ``laneId`` is a plain number."""
    known = {"tmp": Number("b64", 0), **variables}

    def put(target: str, kind: str | None, place: tuple[int, ...] | None, value: Any) -> None:
        if place is not None:
            high, low = (int(place[0]), int(place[-1]))
            before = known.get(target, Number("b64", 0))
            count = high - low + 1
            bits = value.bits if isinstance(value, Number) else int(value)
            mask = (1 << count) - 1 << low
            known[target] = Number(before.kind, before.bits & ~mask | bits << low & mask)
        elif kind is None:
            known[target] = value if isinstance(value, Number) else Number("u64", int(value))
        elif isinstance(value, Number) and (value.kind == kind or kind not in _FLOATS):
            known[target] = Number(kind, value.bits)
        else:
            known[target] = Number.of(kind, _plain(value))
        scope[target] = known[target]

    scope: dict[str, Any] = {**FUNCTIONS, "put": put, **known}
    exec(_compiled(text_of(architecture, name)), scope)
    return known
