"""Where documents come from: text files, JSON lines, tables, and the Python standard library's own sources."""

from __future__ import annotations

import codecs
import json
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import shown
from ..integrity import checksum

if TYPE_CHECKING:
    from .cuts import ByteRange

TEXT_KEY = "text"
JSON_LINES = (".jsonl", ".ndjson", ".json")
#: Files to unpack first (:mod:`.unpack`): compressed text and JSON lines, and tables, whose rows become JSON lines.
COMPRESSED = (".gz", ".zst")
TABLES = (".parquet", ".arrow")
PACKED = COMPRESSED + TABLES
TEXT = (".txt", ".text", ".md", ".rst", ".py")

#: Folders of the standard library that are not its sources, or that are data for its tests.
_NOT_SOURCES = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
#: In a directory that Dataset.save_to_disk of Hugging Face's `datasets` wrote.
_SAVED_DATASET = "state.json"
#: Files that tell about a dataset, beside its tables or JSON lines.
_ABOUT_DATASET = ("readme.md", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
#: What datasets call their splits, as folders and at the end of file names.
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("valid", "validation", "val", "dev"), "valid"),
    "test": "test",
}
#: "train.jsonl", "wiki.test.txt", "validation-00000-of-00002.parquet", "data_train_3.jsonl".
_NAMED_SPLIT = re.compile(rf"(?:.*[._-])?({'|'.join(_SPLITS)})(?:[._-]?\d+)*(?:-of-\d+)?", re.IGNORECASE)
#: In which "test" means something else.
_NO_SPLITS = (".py", ".md", ".rst")
_BLOCK = 1 << 20
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
    packed: str = ""
    """How it is packed, :data:`PACKED`; "" if it can be read as it is."""
    not_utf8: int = 0
    """Of a text: the first line that is not UTF-8; 0 for none, or if nobody has looked."""
    split: str = ""
    """Its split, if the input is divided into several: "train", "valid" or "test"."""

    @property
    def is_held_out(self) -> bool:
        """Its documents are for valid or test."""
        return self.split not in ("", "train")

    def checksum(self) -> str:
        return checksum(self.path)


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

    A file that is named is read as JSON lines or as a table if its name says so and as text otherwise. In a directory,
    files with no such name are left alone, and hidden ones too, and what describes a dataset beside its files.

    If folders or file names divide the input into train and others, each source has its split.

    Returns:
        The sources, and the names of the files in directories that were left alone.

    Raises:
        ValueError: an input does not exist or is given twice, or there are no files, or all are empty.
    """
    if not inputs:
        return stdlib(), []
    sources: list[Source] = []
    ignored, seen = list[str](), set[Path]()
    for given in map(Path, inputs):
        if not given.exists():
            raise ValueError(f"the input {given} does not exist")
        listed = [given] if given.is_file() else _files_in(given)
        is_dataset = any(_is_known(path) and _is_rows(path) for path in listed)
        for path in listed:
            inside = path.relative_to(given)
            if not path.is_file() or any(part.startswith(".") for part in inside.parts):
                continue
            name = given.name if path == given else (Path(given.resolve().name) / inside).as_posix()
            if path != given and (not _is_known(path) or (is_dataset and path.name.lower() in _ABOUT_DATASET)):
                ignored.append(name)
                continue
            if path.resolve() in seen:
                raise ValueError(f"the input {path} is given twice; its documents would be counted twice")
            seen.add(path.resolve())
            above = given.absolute().parent if path == given else given.absolute()
            split = _split_of(Path(above.name) / (Path(path.name) if path == given else inside))
            sources.append(replace(_source(name, path), split=split))
    if not sources:
        raise ValueError(
            f"there is nothing to read in {', '.join(map(str, inputs))}: give text files, JSON lines "
            f"({', '.join(JSON_LINES)}), either compressed ({', '.join(COMPRESSED)}), tables ({', '.join(TABLES)}), or "
            f"directories of files whose names end in {', '.join(JSON_LINES + TEXT + PACKED)}"
        )
    if not any(source.size for source in sources):
        raise ValueError(f"the input is empty: every file in {', '.join(map(str, inputs))} has 0 bytes")
    named = {source.split for source in sources} - {""}
    # A name alone divides nothing: all is one split then, and is divided by shares.
    if "train" not in named or len(named) == 1:
        sources = [replace(source, split="") for source in sources]
    return sources, ignored


def _split_of(inside: Path) -> str:
    """The split that a file's name or a folder above it names; "" for none."""
    if inside.suffix.lower() in _NO_SPLITS:
        return ""
    stem = Path(inside.stem).stem if inside.suffix.lower() in COMPRESSED else inside.stem
    found = _NAMED_SPLIT.fullmatch(stem)
    folders = [_SPLITS[part.lower()] for part in inside.parts[:-1] if part.lower() in _SPLITS]
    return _SPLITS[found[1].lower()] if found else folders[-1] if folders else ""


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


def _files_in(directory: Path) -> list[Path]:
    """All files below a directory, by name. Of a dataset that `datasets` has saved: those with its rows."""
    found = []
    for folder, folders, names in os.walk(directory, onerror=_refuse_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]  # left alone, in place
        found += [Path(folder, name) for name in names]
    found.sort(key=lambda path: path.relative_to(directory).parts)
    saved = {path.parent: path for path in found if path.name == _SAVED_DATASET}
    rows = {parent / name for parent, path in saved.items() for name in _files_of_dataset(path)}
    about = {parent.parent / "dataset_dict.json" for parent in saved}
    return [path for path in found if (path.parent not in saved or path in rows) and path not in about]


def _refuse_unreadable(error: OSError) -> None:
    raise ValueError(
        f"the directory {error.filename} cannot be read ({error.strerror}), and its files would be left out: make it "
        "readable, or name the inputs beside it"
    )


def _files_of_dataset(state: Path) -> list[str]:
    """The files that a dataset's state.json names; others beside them are caches.

    Raises:
        ValueError: it does not name any.
    """
    try:
        return [str(entry["filename"]) for entry in json.loads(state.read_bytes())["_data_files"]]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{state} does not name the files of a dataset, as save_to_disk writes it") from None


def _is_known(path: Path) -> bool:
    """By its name, a file that can be read."""
    suffix, inner = path.suffix.lower(), Path(path.stem).suffix.lower()
    return suffix in JSON_LINES + TEXT + TABLES or (suffix in COMPRESSED and inner in JSON_LINES + TEXT)


def _is_rows(path: Path) -> bool:
    """By its name, a table or JSON lines, and not a description of them."""
    inner = Path(path.stem).suffix.lower() if path.suffix.lower() in COMPRESSED else path.suffix.lower()
    return inner in JSON_LINES + TABLES and path.name.lower() not in _ABOUT_DATASET


def _source(name: str, path: Path) -> Source:
    suffix = path.suffix.lower()
    packed = suffix if suffix in PACKED else ""
    inner = Path(path.stem).suffix.lower() if packed in COMPRESSED else suffix
    return Source(name, str(path), inner in JSON_LINES + TABLES, path.stat().st_size, packed)


def scanned(source: Source) -> Source:
    """A source after a look at its content: whether a text is UTF-8."""
    return source if source.json_lines else replace(source, not_utf8=_line_that_is_not_utf8(source.path))


def read(source: Source, span: ByteRange, lines: Lines, key: str = TEXT_KEY) -> Iterator[str | Bad]:
    """The documents that begin in a span, and what is there in place of one, with its line in the span.

    Of a text, the span is a document or a piece of one.

    Args:
        lines: counts the lines that begin in the span, as they are read.
        key: what has the text, in JSON lines.
    """
    if not source.json_lines:
        lines.read = 1
        yield _text(source, span)
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
                yield _document(line, lines.read, key)


def _text(source: Source, span: ByteRange) -> str | Bad:
    if source.not_utf8:
        return Bad(source.not_utf8, "the file is not UTF-8")
    with open(source.path, "rb") as file:
        file.seek(span.start)
        content = file.read(span.stop - span.start)
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{source.path} was changed while it was read; run the same command again") from None


def _line_that_is_not_utf8(path: str) -> int:
    """The number of the first such line of a file, counted from 1; 0 if there is none."""
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    with open(path, "rb") as file:
        while True:
            block = file.read(_BLOCK)
            waiting = decoder.getstate()[0]
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                return line + (waiting + block).count(b"\n", 0, error.start)
            if not block:
                return 0
            line += block.count(b"\n")


def lines_in(source: Source) -> int:
    """How many lines of JSON a file has, good or bad."""
    with open(source.path, "rb") as file:
        return sum(1 for line in file if line.strip())


def why_no_document(beginning: bytes, key: str) -> str:
    """Of the first lines of JSON lines: why none holds a document; "" if one does, or all are blank."""
    lines = beginning.removeprefix(_BYTE_ORDER_MARK).split(b"\n")
    found = [_document(line, number, key) for number, line in enumerate(lines, 1) if line.strip()]
    bad = [document for document in found if isinstance(document, Bad)]
    if not bad or len(bad) < len(found):
        return ""
    why = f"line {bad[0].line}: {bad[0].why}"
    try:
        row = json.loads(lines[bad[0].line - 1])
    except (ValueError, RecursionError):
        return why
    return f"{why}; name its key with --text-key: {shown(list(row))}" if isinstance(row, dict) else why


def _document(line: bytes, number: int, key: str) -> str | Bad:
    try:
        parsed = json.loads(line.decode())
    except UnicodeDecodeError:
        return Bad(number, "not UTF-8")
    except (ValueError, RecursionError):
        return Bad(number, "not JSON")
    if not isinstance(parsed, dict) or key not in parsed:
        return Bad(number, f'no "{key}"')
    text = parsed[key]
    if not isinstance(text, str):
        return Bad(number, f'"{key}" is not a string')
    try:
        text.encode()
    except UnicodeEncodeError:
        return Bad(number, f'"{key}" has half a surrogate pair')
    return text
