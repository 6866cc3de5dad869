"""Which documents are for training, validation and test."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from .files import SPLITS
from .permutation import mix

_ALL = 2**63


def shares(split: Sequence[str | float]) -> tuple[Fraction, ...]:
    """The shares of train, valid and test as exact numbers: "0.98" or "1/3".

    Raises:
        ValueError: they are not three, or one is negative, or they do not sum to 1.
    """
    try:
        exact = tuple(Fraction(str(share).strip()) for share in split)
    except (ValueError, ZeroDivisionError):
        exact = ()
    if len(exact) != len(SPLITS) or any(share < 0 for share in exact):
        raise ValueError(f"split={split!r} should be three shares for {', '.join(SPLITS)}, like 0.98,0.01,0.01")
    if any(share > 1 for share in exact):
        raise ValueError(f"split={split!r} has a share above 1; the three should sum to 1")
    if sum(exact) != 1:
        raise ValueError(f"the shares of split={split!r} sum to {float(sum(exact)):g} and should sum to 1")
    if not exact[0]:
        raise ValueError(f"split={split!r} leaves nothing for training")
    return exact


def without(exact: Sequence[Fraction], named: Collection[str]) -> tuple[Fraction, ...]:
    """The shares by which the other documents are drawn, if the input itself has the splits ``named``."""
    left = [Fraction(0) if name in named else share for name, share in zip(SPLITS[1:], exact[1:], strict=True)]
    return 1 - sum(left, Fraction()), *left


def assign(first: int, count: int, seed: int, exact: Sequence[Fraction]) -> NDArray[np.int64]:
    """The split, as a number, of ``count`` documents from number ``first`` on.

    Each is drawn by a hash of the seed and its own number, so it does not matter who reads how much at a time.
    """
    drawn = mix(np.arange(first, first + count, dtype=np.uint64), seed) >> np.uint64(1)
    ends = np.array([int(sum(exact[:i], Fraction()) * _ALL) for i in range(1, len(exact))], dtype=np.uint64)
    chosen: NDArray[np.int64] = np.searchsorted(ends, drawn, side="right")
    return chosen


def leaves_none_empty(documents: int, seed: int, exact: Sequence[Fraction]) -> bool:
    """Whether of so many documents, or fewer, each split can get one."""
    counts = np.bincount(assign(0, documents, seed, exact), minlength=len(exact))
    return all(count or not share for count, share in zip(counts, exact, strict=True))


def check_filled(documents: Sequence[int], exact: Sequence[Fraction]) -> None:
    """Raise a ValueError if a split that should have documents got none."""
    for name, share, got in zip(SPLITS, exact, documents, strict=True):
        if share and not got:
            raise ValueError(
                f"of {sum(documents)} documents none fell to {name}, whose share is {float(share):g}. Give it a larger "
                "share, or 0 to do without, or try another --seed. (A text file is one document; a JSON line is one)"
            )
