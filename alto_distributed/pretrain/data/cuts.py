"""Where the input is cut into chunks, so that neither reading nor tokenizing takes more memory than a chunk.

JSON lines are cut between lines. A long text is cut where its tokens stay the same: between a lone newline and a
visible character. If there is no such place for a mebibyte, as in a text of one line, it is cut between two characters.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import IO

from .sources import Source

_SEARCH = 1 << 20
_LONGEST_LINE = 1 << 12
_NEWLINE = re.compile(rb"\n")
_LONGEST_CHARACTER = 4
_CONTINUATION = bytes(range(0x80, 0xC0))


@dataclass(frozen=True)
class ByteRange:
    """The documents that begin in some bytes of a source, or a piece of the one that it is."""

    source: int
    """Its number in the list of sources."""
    start: int
    stop: int
    ends: bool = True
    """Of a text: the document ends with these bytes; otherwise the next range goes on with it."""
    split: int = -1
    """The number of the split that it belongs to; -1 if that is drawn for each document."""


def chunks(
    sources: Sequence[Source], size: int, shares: Sequence[Fraction] | None = None
) -> list[tuple[ByteRange, ...]]:
    """The sources cut into chunks of about ``size`` bytes, in order. It depends on the files and on nothing else.

    Args:
        shares: have each text's beginning, middle and end in train, valid and test, but of those that are of valid or
            test by name. Otherwise a text is one document.
    """
    cut: list[tuple[ByteRange, ...]] = []
    open_chunk: list[ByteRange] = []
    room = size
    for number, source in enumerate(sources):
        for span in _spans(number, source, size, room, None if source.is_held_out else shares):
            open_chunk.append(span)
            room -= span.stop - span.start
            if room <= 0:
                cut.append(tuple(open_chunk))
                open_chunk, room = [], size
    return [*cut, tuple(open_chunk)] if open_chunk else cut


def _spans(number: int, source: Source, size: int, room: int, shares: Sequence[Fraction] | None) -> list[ByteRange]:
    """Those of one source; the first of JSON lines fills the chunk that is open."""
    if source.json_lines:
        stops = [*range(room, source.size, size), source.size]
        return [ByteRange(number, *span) for span in itertools.pairwise((0, *stops))]
    if source.not_utf8:
        return [ByteRange(number, 0, source.size)]
    ranges = [(0, source.size, -1)] if shares is None else _by_share(source, shares)
    return [span for start, stop, split in ranges for span in _pieces(number, source, start, stop, split, size)]


def _pieces(number: int, source: Source, start: int, stop: int, split: int, size: int) -> list[ByteRange]:
    """One document of a text in pieces."""
    with open(source.path, "rb") as file:
        places = [start, *(_place(file, at) for at in range(start + size, stop, size)), stop]
    pairs = [(begin, min(end, stop)) for begin, end in itertools.pairwise(places) if begin < min(end, stop)]
    pairs = pairs or [(start, stop)]
    return [ByteRange(number, begin, end, end == stop, split) for begin, end in pairs]


def _by_share(source: Source, shares: Sequence[Fraction]) -> list[tuple[int, int, int]]:
    """Start, stop and split of the parts of a text that go to each split.

    Raises:
        ValueError: it is too short for them.
    """
    ends = [int(sum(shares[: i + 1], Fraction()) * source.size) for i in range(len(shares))]
    with open(source.path, "rb") as file:
        places = [0, *(_line_end(file, end) for end in ends[:-1]), source.size]
    parts = [(start, stop, split) for split, (start, stop) in enumerate(itertools.pairwise(places)) if shares[split]]
    if any(start >= stop for start, stop, _ in parts):
        raise ValueError(
            f"{source.path} has {source.size} bytes, too few to be cut into shares of "
            f"{', '.join(f'{float(share):g}' for share in shares)}: give more text, or a share of 0 to omit a split"
        )
    return parts


def _place(file: IO[bytes], at: int) -> int:
    """The first place from byte ``at`` on where a text may be cut; if there is none soon, the next character."""
    before = min(at, _LONGEST_CHARACTER)
    file.seek(at - before)
    content = file.read(before + _SEARCH + _LONGEST_CHARACTER)
    for found in _NEWLINE.finditer(content, before, before + _SEARCH):
        left = content[max(found.start() - _LONGEST_CHARACTER, 0) : found.start()].decode(errors="ignore")[-1:]
        right = content[found.end() : found.end() + _LONGEST_CHARACTER].decode(errors="ignore")[:1]
        if left and right and not left.isspace() and not right.isspace():
            return at - before + found.end()
    if len(content) < before + _SEARCH:  # the rest is short
        return at - before + len(content)
    return at + _within_character(content[before:])


def _line_end(file: IO[bytes], at: int) -> int:
    """The first end of a line from byte ``at`` on; if there is none soon, the next character."""
    file.seek(at)
    content = file.read(_LONGEST_LINE)
    return at + (content.find(b"\n") + 1 or _within_character(content))


def _within_character(content: bytes) -> int:
    """How many bytes belong to a character that began before."""
    return len(content) - len(content.lstrip(_CONTINUATION))
