"""Chunks of the input as tokens, each in a file of its own, by as many processes as there are.

A part is written beside and then renamed, so one that is there is whole: after an interruption it is not made again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import integrity
from . import tokenizer
from .cuts import ByteRange
from .sources import TEXT_KEY, Bad, Lines, Source, read

#: How many bad lines of a file are told by number and reason. All are counted.
REPORTED = 10


@dataclass(frozen=True)
class Counts:
    """What was in a span of a source."""

    source: int
    lines: int = 0
    documents: int = 0
    tokens: int = 0
    bad: int = 0
    first_bad: tuple[tuple[int, str], ...] = ()
    """Line, counted from 1, and reason."""

    def __add__(self, later: Counts) -> Counts:
        """Both, ``later`` being what follows in the same source."""
        shifted = tuple((line + self.lines, why) for line, why in later.first_bad)
        return Counts(
            self.source,
            self.lines + later.lines,
            self.documents + later.documents,
            self.tokens + later.tokens,
            self.bad + later.bad,
            (self.first_bad + shifted)[:REPORTED],
        )


@dataclass(frozen=True)
class Task:
    """What a process must know to make any part."""

    directory: Path
    sources: Sequence[Source]
    chunks: Sequence[tuple[ByteRange, ...]]
    tokenizer: Path | None
    """File of one, or None for bytes."""
    dtype: str
    key: str = TEXT_KEY
    """What has the text, in JSON lines."""
    is_pretrained: bool = False
    """The tokenizer is somebody else's, not a byte-level BPE like GPT-2's."""

    def part(self, number: int) -> Path:
        return self.directory / f"part-{number:07d}.npz"

    def missing(self) -> list[int]:
        there = {path.name for path in self.directory.glob("part-*.npz")}
        return [number for number in range(len(self.chunks)) if self.part(number).name not in there]


def make(work: Task, workers: int) -> Iterator[int]:
    """Make the parts that are missing, and tell the number of each when it is there, in any order."""
    missing = work.missing()
    if workers == 1 or len(missing) <= 1:
        words = open_tokenizer(work)
        for number in missing:
            _make(work, words, number)
            yield number
        return
    # Not fork: the tokenizers library and torch have threads. A server that has imported torch once serves all.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    processes = min(workers, len(missing))
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(work,)) as pool:
        futures = {pool.submit(_make_here, number): number for number in missing}
        try:
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        except BrokenProcessPool:
            raise ValueError(
                "a worker was ended from outside, perhaps because memory ran out; run the same command again with "
                "fewer workers (finished parts are kept)"
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def load(work: Task, number: int) -> tuple[list[NDArray[Any]], list[Counts]]:
    """The documents of a part, or pieces of them, and what was in each of the chunk's spans."""
    path = work.part(number)
    try:
        with np.load(path, allow_pickle=False) as saved:
            tokens, lengths, counts = saved["tokens"], saved["lengths"], json.loads(saved["counts"].tobytes())
        spans = [Counts(**{**c, "first_bad": tuple((line, why) for line, why in c["first_bad"])}) for c in counts]
    except OSError:
        raise
    except Exception as error:  # of zipfile, numpy or json; it has a checksum
        raise ValueError(f"{path} is damaged ({error}); remove it and run the same command again") from None
    return np.split(tokens, np.cumsum(lengths)[:-1]) if lengths.size else [], spans


def open_tokenizer(work: Task) -> tokenizer.Tokenizer:
    if work.tokenizer is None:
        return tokenizer.Bytes()
    return tokenizer.pretrained(work.tokenizer) if work.is_pretrained else tokenizer.load(work.tokenizer)


_here: tuple[Task, tokenizer.Tokenizer] | None = None


def _begin(work: Task) -> None:
    global _here
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends these
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    _here = work, open_tokenizer(work)


def _end_with(parent: int) -> None:
    """Python leaves the processes of a pool behind, and they hang, when their parent is killed."""
    wait([parent])
    os._exit(1)


def _make_here(number: int) -> None:
    if _here is None:
        raise RuntimeError("this process was not begun by make()")
    _make(*_here, number)


def _make(work: Task, words: tokenizer.Tokenizer, number: int) -> None:
    end = np.array([words.end_of_document])
    documents: list[NDArray[np.int64]] = []
    counts = []
    for span in work.chunks[number]:
        source, lines, bad, before = work.sources[span.source], Lines(), [], len(documents)
        for found in read(source, span, lines, work.key):
            if isinstance(found, Bad):
                bad.append((found.line, found.why))
                continue
            ids = words.encode(found)
            if ids.size and ids.max() >= words.size:
                raise ValueError(f"{source.path}: token {ids.max()} is not below the vocabulary's size {words.size}")
            documents.append(np.concatenate([ids, end]) if span.ends else ids)
        new = documents[before:]
        tokens, whole = sum(d.size for d in new), len(new) if span.ends else 0
        counts.append(Counts(span.source, lines.read, whole, tokens, len(bad), tuple(bad[:REPORTED])))
    _save(
        work.part(number),
        tokens=np.concatenate([*documents, np.zeros(0, np.int64)]).astype(work.dtype),
        lengths=np.array([d.size for d in documents], dtype=np.int64),
        counts=np.frombuffer(json.dumps([vars(c) for c in counts]).encode(), dtype=np.uint8),
    )


def _save(path: Path, **arrays: NDArray[Any]) -> None:
    beside = path.with_name(f"beside-{os.getpid()}-{path.name}")
    with open(beside, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # its stub takes them for its own options
    integrity.sync(beside)
    beside.replace(path)
