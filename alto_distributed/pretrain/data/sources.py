"""Where documents come from: text files, JSON lines, and the Python standard library's own sources."""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..integrity import checksum

JSON_LINES = (".jsonl", ".ndjson", ".json")
TEXT = (".txt", ".text", ".md", ".rst", ".py")

#: Folders of the standard library that are not its sources, or that are data for its tests.
_NOT_SOURCES = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Source:
    """A file of documents."""

    name: str
    """How messages and the manifest call it: without the folders above the input, so that a corpus may move."""
    path: str
    json_lines: bool
    """One JSON object with "text" a line; otherwise the whole file is one document."""
    size: int

    def checksum(self) -> str:
        return checksum(self.path)


@dataclass(frozen=True)
class ByteRange:
    """The documents that begin in some bytes of a source."""

    source: int
    """Its number in the list of sources."""
    start: int
    stop: int


@dataclass(frozen=True)
class Bad:
    """A line that holds no document, and why."""

    line: int
    """Counted from 1."""
    why: str


@dataclass
class Lines:
    """How many lines have been read. Blank ones count, so that numbers are those an editor shows."""

    read: int = 0


def find(inputs: Sequence[str | Path]) -> tuple[list[Source], list[str]]:
    """The sources in files and directories, in the order given and by name in a directory; without any, :func:`stdlib`.

    A file that is named is read as JSON lines if its name says so and as text otherwise. In a directory, files with
    neither kind of name are left alone, and hidden ones too.

    Returns:
        The sources, and the names of the files in directories that were left alone.

    Raises:
        ValueError: an input does not exist or is given twice, or there are no files, or all are empty.
    """
    if not inputs:
        return stdlib(), []
    sources, ignored, seen = [], [], set()
    for given in map(Path, inputs):
        if not given.exists():
            raise ValueError(f"the input {given} does not exist")
        for path in [given] if given.is_file() else sorted(given.rglob("*"), key=lambda p: p.relative_to(given).parts):
            inside = path.relative_to(given)
            if not path.is_file() or any(part.startswith(".") for part in inside.parts):
                continue
            name = given.name if path == given else (Path(given.resolve().name) / inside).as_posix()
            if path != given and path.suffix.lower() not in JSON_LINES + TEXT:
                ignored.append(name)
                continue
            if path.resolve() in seen:
                raise ValueError(f"the input {path} is given twice; its documents would be counted twice")
            seen.add(path.resolve())
            sources.append(_source(name, path))
    if not sources:
        raise ValueError(
            f"there is nothing to read in {', '.join(map(str, inputs))}: give text files, JSON lines "
            f"({', '.join(JSON_LINES)}), or directories of files whose names end in {', '.join(JSON_LINES + TEXT)}"
        )
    if not any(source.size for source in sources):
        raise ValueError(f"the input is empty: every file in {', '.join(map(str, inputs))} has 0 bytes")
    return sources, ignored


def stdlib() -> list[Source]:
    """The sources of this Python's standard library: a corpus that is there without a download.

    Raises:
        ValueError: this Python came without them.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, names in os.walk(root):
        # In place, so that installed packages are not even looked at. config-* and _sysconfigdata* tell of one machine.
        folders[:] = [name for name in folders if name not in _NOT_SOURCES and not name.startswith("config-")]
        wanted = [name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")]
        found += [Path(folder, name).relative_to(root) for name in wanted]
    sources = [
        _source(f"stdlib/{inside.as_posix()}", root / inside) for inside in sorted(found, key=lambda path: path.parts)
    ]
    if not sources:
        raise ValueError(f"this Python has no sources of its standard library in {root}; give input files")
    return sources


def _source(name: str, path: Path) -> Source:
    return Source(name, str(path), path.suffix.lower() in JSON_LINES, path.stat().st_size)


def chunks(sources: Sequence[Source], size: int) -> list[tuple[ByteRange, ...]]:
    """The sources cut into chunks of about ``size`` bytes, in order. It depends on their sizes alone.

    JSON lines are cut anywhere (:func:`read` goes on to the end of a line), text files never.
    """
    cut: list[tuple[ByteRange, ...]] = []
    open_chunk: list[ByteRange] = []
    room = size
    for number, source in enumerate(sources):
        start = 0
        while True:
            stop = min(start + room, source.size) if source.json_lines else source.size
            open_chunk.append(ByteRange(number, start, stop))
            room -= stop - start
            start = stop
            if room <= 0:
                cut.append(tuple(open_chunk))
                open_chunk, room = [], size
            if start >= source.size:
                break
    return [*cut, tuple(open_chunk)] if open_chunk else cut


def read(source: Source, span: ByteRange, lines: Lines) -> Iterator[str | Bad]:
    """The documents that begin in a span, and what is there in place of one, with its line in the span.

    Args:
        lines: counts the lines that begin in the span, as they are read.
    """
    if not source.json_lines:
        lines.read = 1
        yield _whole_file(source)
        return
    with open(source.path, "rb") as file:
        if span.start:
            file.seek(span.start - 1)
            file.readline()  # the end of a line that began before, which may be its newline alone
        while (position := file.tell()) < span.stop and (line := file.readline()):
            lines.read += 1
            if position == 0:
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if line.strip():
                yield _document(line, lines.read)


def _whole_file(source: Source) -> str | Bad:
    content = Path(source.path).read_bytes()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        return Bad(content.count(b"\n", 0, error.start) + 1, "the file is not UTF-8")


def _document(line: bytes, number: int) -> str | Bad:
    try:
        parsed = json.loads(line.decode())
    except UnicodeDecodeError:
        return Bad(number, "not UTF-8")
    except (ValueError, RecursionError):
        return Bad(number, "not JSON")
    if not isinstance(parsed, dict) or "text" not in parsed:
        return Bad(number, 'no "text"')
    text = parsed["text"]
    if not isinstance(text, str):
        return Bad(number, '"text" is not a string')
    try:
        text.encode()
    except UnicodeEncodeError:
        return Bad(number, '"text" has half a surrogate pair')
    return text
