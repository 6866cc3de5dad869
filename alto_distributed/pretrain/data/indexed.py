"""Megatron's indexed dataset format: a writer, and the check of an index that was read.

``prefix.bin`` holds the tokens of all documents, one after the other, with nothing between them. ``prefix.idx`` holds,
in little-endian order and without padding:

    9 bytes        b"MMIDIDX\\0\\0"
    uint64         version, 1
    uint8          type of a token: 4 is int32, 8 is uint16
    uint64         n, the number of sequences; here a document is one sequence
    uint64         number of entries in the last table, n + 1
    int32[n]       tokens of each sequence
    int64[n]       byte of prefix.bin at which each sequence begins
    int64[n + 1]   the sequence at which each document begins, and n

Neither needs megatron-core; tests compare the bytes with those of its IndexedDatasetBuilder.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = np.dtype(
    [("magic", "S9"), ("version", "<u8"), ("dtype", "u1"), ("sequences", "<u8"), ("documents", "<u8")]
)  # packed: 34 bytes
_DTYPES: dict[int, np.dtype[Any]] = {8: np.dtype(np.uint16), 4: np.dtype(np.int32)}
_LONGEST = 2**31 - 1


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """The type of a token on disk, by Megatron's own rule.

    Raises:
        ValueError: the vocabulary is too large for any.
    """
    if vocabulary > 2**31 - 1:
        raise ValueError(f"a vocabulary of {vocabulary} does not fit into int32, the widest type of tokens on disk")
    return np.dtype(np.uint16 if vocabulary < 65500 else np.int32)


class Writer:
    """Writes documents, one after the other, into ``prefix.bin``, and at the end their index into ``prefix.idx``.

    Args:
        prefix: the files' path without the ends of their names. Existing files are overwritten.
        dtype: of a token on disk, uint16 or int32.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self._code = next(code for code, known in _DTYPES.items() if known == dtype)
        self._dtype = dtype
        self._limit = int(np.iinfo(dtype).max)
        self._index = prefix.with_name(f"{prefix.name}.idx")
        self._data = open(prefix.with_name(f"{prefix.name}.bin"), "wb")  # noqa: SIM115  (closed by close())
        self._lengths = array("i")
        self._open = 0  # tokens of a document that has not ended
        self.tokens = 0

    @property
    def documents(self) -> int:
        """How many there are so far."""
        return len(self._lengths)

    def add(self, document: NDArray[Any], *, ends: bool = True) -> None:
        """Append a document, or a piece of one that does not end with it.

        Raises:
            ValueError: a token does not fit into the dtype, or the document has more tokens than the index can count.
        """
        if document.size and not (document.min() >= 0 and document.max() <= self._limit):
            unfit = document.min() if document.min() < 0 else document.max()
            raise ValueError(f"token {unfit} does not fit into {self._dtype}: tokens go from 0 to {self._limit}")
        self._open += int(document.size)
        if self._open > _LONGEST:
            raise ValueError(f"a document has {self._open} tokens or more, and the format ends at 2**31 - 1; cut it up")
        self._data.write(document.astype(self._dtype.newbyteorder("<")).tobytes())
        self.tokens += int(document.size)
        if ends:
            self._lengths.append(self._open)
            self._open = 0

    def close(self) -> None:
        """Write the index. Without it, the files are not readable."""
        self._data.close()
        count = self.documents
        lengths = np.array(self._lengths, dtype="<i4")
        starts = np.zeros(count, dtype="<i8")
        np.cumsum(lengths[:-1], dtype=np.int64, out=starts[1:])
        starts *= self._dtype.itemsize
        header = np.array([(_MAGIC, _VERSION, self._code, count, count + 1)], dtype=_HEADER)
        with open(self._index, "wb") as file:
            for table in (header, lengths, starts, np.arange(count + 1, dtype="<i8")):
                file.write(table.tobytes())


def check_index(path: Path, documents: int, tokens: int) -> np.dtype[Any]:
    """The type of tokens, after all of the index has been found to be what those documents give.

    Raises:
        ValueError: it is something else.
    """
    if path.stat().st_size < _HEADER.itemsize:
        raise ValueError(f"{path} is damaged: it is too short to be a Megatron index of tokens")
    header = np.fromfile(path, dtype=_HEADER, count=1)[0]
    # numpy strips the zero bytes at the end of the magic word
    if header["magic"] != _MAGIC.rstrip(b"\0") or header["version"] != _VERSION or int(header["dtype"]) not in _DTYPES:
        raise ValueError(f"{path} is damaged: it does not begin like a Megatron index of tokens")
    if header["sequences"] != documents or header["documents"] != documents + 1:
        raise ValueError(f"{path} is damaged: it has {header['sequences']} documents and should have {documents}")
    dtype = _DTYPES[int(header["dtype"])]
    size = _HEADER.itemsize + documents * (4 + 8) + (documents + 1) * 8
    if path.stat().st_size != size:
        raise ValueError(f"{path} is damaged: an index of {documents} documents has {size} bytes")
    content = np.memmap(path, dtype=np.uint8, mode="r", offset=_HEADER.itemsize)
    lengths = content[: documents * 4].view("<i4")
    starts = content[documents * 4 : documents * 12].view("<i8")
    if (total := int(lengths.sum(dtype=np.int64))) != tokens or lengths.min() < 1:
        raise ValueError(f"{path} is damaged: its documents have {total} tokens and should have {tokens}")
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    if starts[0] != 0 or not np.array_equal(starts[1:], ends[:-1]):
        raise ValueError(f"{path} is damaged: its documents do not follow one another")
    if not np.array_equal(content[documents * 12 :].view("<i8"), np.arange(documents + 1)):
        raise ValueError(f"{path} is damaged: it does not list its documents one by one")
    return dtype
