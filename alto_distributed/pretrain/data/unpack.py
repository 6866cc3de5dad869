"""Compressed files and tables as plain text and JSON lines, which everything else reads.

A file is unpacked piece by piece into the folder of the preparation, so it takes disk and no memory. zstandard and
pyarrow, which the extra ``data`` installs, are imported for files that need them.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from ...errors import one_line
from ...extras import require
from ..integrity import sync
from .sources import COMPRESSED, JSON_LINES, TABLES, Source, why_no_document

PREFIX = "input-"
_BLOCK = 1 << 20
_ROWS = 1024


def check(sources: Sequence[Source], key: str) -> None:
    """Open all that is packed, before anything is written.

    Raises:
        ValueError: one of them is not what its name says, or has no texts under ``key``.
        MissingExtra: the package that reads it is not installed.
    """
    for source in sources:
        with _refused(source):
            if source.packed in COMPRESSED:
                with _plain(source) as file:
                    file.read(1)
            elif source.packed:
                next(_rows(source, key), None)


def check_key(sources: Sequence[Source], key: str) -> None:
    """Look for a document where JSON lines begin, before they are read whole.

    Raises:
        ValueError: there is none, and no other kind of source: most likely the key is another.
    """
    why = ""
    for source in sources:
        if not source.json_lines or source.packed in TABLES:
            return
        with _refused(source), _plain(source) as file:
            beginning = file.read(_BLOCK)
            if file.read(1):
                beginning = beginning[: beginning.rfind(b"\n") + 1]
        reason = why_no_document(beginning, key)
        if not reason:
            return
        why = why or f"{source.path} {reason}"
    if why:
        raise ValueError(f"there are no documents in the input: {why}")


def unpacked(source: Source, number: int, folder: Path, key: str) -> Source:
    """The source as a plain file in ``folder``; one that an interrupted run has finished there is used.

    Raises:
        ValueError: it is damaged.
    """
    if not source.packed:
        return source
    path = folder / f"{PREFIX}{number:07d}{JSON_LINES[0] if source.json_lines else '.txt'}"
    if not path.exists():
        beside = path.with_name(f"beside-{path.name}")
        with _refused(source), open(beside, "wb") as target:
            if source.packed in COMPRESSED:
                with _plain(source) as file:
                    shutil.copyfileobj(file, target, _BLOCK)
            else:
                for text in _rows(source, key):
                    target.write(json.dumps({key: text}).encode() + b"\n")
        sync(beside)
        beside.replace(path)
    return replace(source, path=str(path), size=path.stat().st_size, packed="")


@contextlib.contextmanager
def _plain(source: Source) -> Iterator[IO[bytes]]:
    if not source.packed:
        with open(source.path, "rb") as plain:
            yield plain
        return
    if source.packed == ".gz":
        with gzip.open(source.path, "rb") as file:
            yield file  # type: ignore[misc]  # it reads bytes
        return
    require("zstandard")
    import zstandard

    with (
        open(source.path, "rb") as packed,
        zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True) as reader,
    ):
        yield reader


def _rows(source: Source, key: str) -> Iterator[Any]:
    """The texts of a table, one batch of rows in memory at a time."""
    require("pyarrow")
    import pyarrow
    from pyarrow import ipc, parquet

    if source.packed == ".parquet":
        with parquet.ParquetFile(source.path) as table:
            _check_column(table.schema_arrow, source, key)
            for batch in table.iter_batches(batch_size=_ROWS, columns=[key]):
                yield from batch.column(0).to_pylist()
        return
    with pyarrow.memory_map(source.path) as file, ipc.open_stream(file) as table:
        _check_column(table.schema, source, key)
        for batch in table:
            yield from batch.column(table.schema.get_field_index(key)).to_pylist()


def _check_column(schema: Any, source: Source, key: str) -> None:
    import pyarrow

    if key not in schema.names:
        raise ValueError(f"{source.path} has no column {key!r}; name one with --text-key: {', '.join(schema.names)}")
    kind = schema.field(key).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise ValueError(f"the column {key!r} of {source.path} holds {kind}, and should hold strings (--text-key)")


@contextlib.contextmanager
def _refused(source: Source) -> Iterator[None]:
    """The libraries' errors about a file's content as one line."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{source.path} is not a whole {source.packed} file: {one_line(error)}") from None
    except Exception as error:  # zstandard's and pyarrow's, of which some are ValueErrors
        if type(error).__module__.partition(".")[0] not in ("zstandard", "pyarrow"):
            raise
        raise ValueError(f"{source.path} is not a whole {source.packed} file: {one_line(error)}") from None
