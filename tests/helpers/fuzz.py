"""For tests that feed nonsense to the package: what may come out, and values to feed it."""

import datetime
import decimal
import fractions
import hashlib
import json
import linecache
import math
import traceback
from pathlib import Path

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from alto_distributed import ALTO

from .cases import EXHAUSTIVE, REPO

PACKAGE = REPO / "alto_distributed"


def cases(everyday):
    """So many examples in everyday runs, and twenty times as many in exhaustive ones."""
    slow = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    slow += [HealthCheck.filter_too_much, HealthCheck.large_base_example]
    return settings(max_examples=everyday * (20 if EXHAUSTIVE else 1), suppress_health_check=slow)


def documented(work):
    """(what it returned, None), or (None, the message of its refusal). Any other end of ``work`` fails the test."""
    try:
        return work(), None
    except (ValueError, OSError) as error:
        return None, message_of(error)


def message_of(refusal):
    """What a refusal says, if it is one: a ``raise`` that somebody wrote in this package, with one line of text.

    A ValueError that int() or numpy happened to raise has the right type, and tells the user nothing.
    """
    last = traceback.extract_tb(refusal.__traceback__)[-1]
    line = linecache.getline(last.filename, last.lineno)
    deliberate = PACKAGE in Path(last.filename).parents and line.strip().startswith("raise ")
    assert deliberate or isinstance(refusal, OSError), f"{last.filename}:{last.lineno} {line}: {refusal!r}"
    message = str(refusal)
    assert message.strip(), last
    assert "\n" not in message, message
    assert len(message) < 3000, message[:3000]
    return message


HUGE = [2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 10**400, -(10**400)]
numbers = st.one_of(
    st.integers(-3, 70),
    st.sampled_from(HUGE),
    st.floats(),
    st.sampled_from([0.0, -0.0, 1e-300, 1e300, math.inf, -math.inf, math.nan]),
)
words = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [
            "auto",
            "none",
            "null",
            "1e-3",
            "١٢",
            "1_000",
            "naïve",
            "日本語",
            "\u202e",
            "a\nb",
            "~",
            "..",
            "/",
            "=",
            "x" * 500,
        ]
    ),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, words)
#: What JSON can say.
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4), max_leaves=8
)
#: And what YAML can say besides.
yaml_values = st.one_of(
    json_values, st.dates(), st.datetimes(), st.binary(max_size=8), st.sets(st.integers(), max_size=3)
)

#: And what Python can say besides.
objects = st.one_of(
    json_values,
    st.binary(max_size=4),
    st.tuples(numbers, numbers, numbers),
    st.sampled_from(
        [
            *(fractions.Fraction(1, 3), decimal.Decimal("0.1"), 1j, np.float64(0.5), np.int64(3), np.float16("nan")),
            *(np.ones(3), np.array("x"), np.bool_(True), torch.tensor(0.5), torch.tensor([1.0, 2.0]), torch.tensor(1j)),
            *(torch.tensor(True), torch.tensor(3), torch.ones(2, 2).to_sparse(), torch.float16, object, object(), len),
            *(datetime.date(2026, 1, 1), range(3), (0.9, 0.9, 0.9), [0.5, "x", None], {"a"}, frozenset(), slice(3)),
        ]
    ),
)


def paths(value, where=()):
    """The places in nested containers."""
    yield where
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, inner in items:
        yield from paths(inner, (*where, key))


def changed(value, where, change):
    """A copy of nested containers in which one place holds what ``change`` makes of what it held."""
    if not where:
        return change(value)
    key, *rest = where
    if isinstance(value, dict):
        return {k: changed(v, rest, change) if k == key else v for k, v in value.items()}
    return type(value)(changed(v, rest, change) if k == key else v for k, v in enumerate(value))


@st.composite
def mutated(draw, original, values=json_values, most=3):
    """Nested containers with a few places changed: another value, a missing key, a key more."""
    value = original
    for _ in range(draw(st.integers(1, most))):
        where = draw(st.sampled_from(list(paths(value))))
        kind, new, key = draw(st.sampled_from(["replace", "drop", "add"])), draw(values), draw(words)

        def change(old, kind=kind, new=new, key=key):
            if kind == "replace" or not isinstance(old, (dict, list)) or not old:
                return new
            if kind == "drop":
                return dict(list(old.items())[1:]) if isinstance(old, dict) else old[1:]
            return {**old, key: new} if isinstance(old, dict) else [*old, new]

        value = changed(value, where, change)
    return value


@st.composite
def damaged(draw, content):
    """Bytes with a bit flipped, a piece missing, inserted, repeated or overwritten, or cut short."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(content) - 1, 0)))
        to = min(at + draw(st.integers(1, 40)), len(content))
        new = draw(st.binary(min_size=1, max_size=12))
        kinds = {
            "flip": content[:at]
            + bytes([(content[at] if content else 0) ^ (1 << draw(st.integers(0, 7)))])
            + content[at + 1 :],
            "cut": content[:at],
            "remove": content[:at] + content[to:],
            "insert": content[:at] + new + content[at:],
            "repeat": content[:to] + content[at:],
            "overwrite": content[:at] + new + content[at + len(new) :],
        }
        content = kinds[draw(st.sampled_from(sorted(kinds)))]
    return content


#: Files of a checkpoint as far as manifests are concerned.
CONTENTS = {"saved/shard_0.pt": b"0" * 50, "saved/shard_1.pt": b"1" * 60, "run.json": b"{}"}


def encoded(content):
    """With the checksum that fits: anyone can write one."""
    if isinstance(content, dict):
        content = {key: value for key, value in content.items() if key != "checksum"}
        content["checksum"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps(content).encode()


def parameters():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(4))]


def trained(steps=2, **options):
    tensors = parameters()
    optimizer = ALTO([{"params": tensors[:1]}, {"params": tensors[1:], "weight_decay": 0.0}], lr=1e-2, **options)
    for _ in range(steps):
        for tensor in tensors:
            tensor.grad = torch.ones_like(tensor)
        optimizer.step()
    return optimizer
