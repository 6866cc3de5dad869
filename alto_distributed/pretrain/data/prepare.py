"""Text files or JSON lines to token files, three pairs in Megatron's indexed format.

The input is cut into chunks; each becomes a part (:mod:`.parts`) in the folder ``unfinished``; then the parts are
joined in order. The result depends on the input and the settings, never on the number of workers or on interruptions.
A directory is complete when its manifest is there, which comes last.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ...errors import did_you_mean
from .. import integrity
from . import files, indexed, sources, splits, tokenizer
from . import output_dir as workspace
from . import token_shards as parts
from .files import MANIFEST, SPLITS

KINDS = ("bpe", "bytes", "gpt2")
DEFAULT_VOCABULARY = 1024
DEFAULT_SPLIT = ("0.98", "0.01", "0.01")
DEFAULT_SEED = 1234
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Prepared:
    manifest: dict[str, Any]
    was_there: bool
    """It had been prepared before, from the same input with the same settings."""


def prepare(
    output: str | Path,
    inputs: Sequence[str | Path] = (),
    *,
    kind: str = "bpe",
    vocabulary: int = DEFAULT_VOCABULARY,
    split: Sequence[str | float] = DEFAULT_SPLIT,
    seed: int = DEFAULT_SEED,
    workers: int = 1,
    force: bool = False,
    progress: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> Prepared:
    """Write ``output/{train,valid,test}.{bin,idx}``, the tokenizer and a manifest.

    Args:
        output: a directory, made if need be. One that holds an interrupted preparation is continued.
        inputs: files and directories, see :func:`.sources.find`; none for the standard library's sources.
        kind: the tokenizer: "bpe" is trained on the input, "bytes" needs nothing, "gpt2" is looked for in tiktoken's
            cache, and anything else is a directory with vocab.json and merges.txt.
        vocabulary: tokens of "bpe", the end of a document among them.
        split: shares of the documents that go to train, valid and test. A share of 0 leaves the split out.
        seed: chooses the documents of each split.
        workers: processes.
        force: replace what is there, whatever it is.
        progress: show bars on stderr.
        chunk_bytes: input in a part, which is what an interruption can lose for each worker.

    Raises:
        ValueError: a setting is wrong, the input holds no documents, or the output is taken or cannot be written.
    """
    exact = splits.shares(split)
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed} must lie between 0 and 2**63 - 1")
    if workers < 1 or chunk_bytes < 1:
        raise ValueError(f"workers={workers} and chunk_bytes={chunk_bytes} must be at least 1")
    output = Path(output)
    found, ignored = sources.find(inputs)
    about_tokenizer = _describe(kind, vocabulary)
    about_inputs = [{"name": s.name, "bytes": s.size, "sha256": s.checksum()} for s in found]
    settings = {
        "tokenizer": about_tokenizer,
        "split": [str(share) for share in exact],
        "seed": seed,
        "ignored_files": ignored,
    }
    if (output / MANIFEST).exists() and not force:
        return Prepared(workspace.complete(output, settings, about_inputs), was_there=True)

    versions = _versions()
    # Not the split: parts are the same for all of them.
    request = {
        "tokenizer": about_tokenizer,
        "inputs": about_inputs,
        "chunk_bytes": chunk_bytes,
        "versions": versions,
    }
    with workspace.unfinished(output, request, force) as folder:
        words = _saved_tokenizer(kind, vocabulary, found, folder, progress)
        saved = [] if kind == "bytes" else [tokenizer.SAVED_AS]
        work = parts.Work(
            directory=folder,
            sources=found,
            chunks=sources.chunks(found, chunk_bytes),
            tokenizer=folder / tokenizer.SAVED_AS if saved else None,
            dtype=indexed.token_dtype(words.size).name,
        )
        _tokenize(work, workers, progress)
        joined = _join(work, exact, seed, progress)
        manifest = {
            "format": files.FORMAT,
            "versions": versions,
            "settings": settings,
            "tokenizer": {
                "kind": about_tokenizer["kind"],
                "vocabulary": words.size,
                "end_of_document": words.end_of_document,
                "files": {name: integrity.checksum(folder / name) for name in saved},
            },
            "dtype": work.dtype,
            "splits": joined.splits,
            "inputs": [{**about, **_counted(c)} for about, c in zip(about_inputs, joined.counts, strict=True)],
        }
        names = [name for s in SPLITS if joined.splits[s]["documents"] for name in workspace.token_files(s)]
        workspace.publish(folder, output, names + saved, manifest)
    return Prepared(manifest, was_there=False)


def _describe(kind: str, vocabulary: int) -> dict[str, Any]:
    """What distinguishes a tokenizer from others, before it is built."""
    if kind == "bytes":
        return {"kind": kind}
    if kind == "bpe":
        tokenizer.check_vocabulary(vocabulary)
        return {"kind": kind, "vocabulary": vocabulary}
    if kind not in KINDS and not Path(kind).is_dir():
        hint = did_you_mean(kind, KINDS)
        raise ValueError(
            f"the tokenizer {kind!r} is unknown{hint} (known: {', '.join(KINDS)}, or a directory with vocab.json and "
            "merges.txt)"
        )
    vocabulary_file, merges_file = tokenizer.files_of(kind)
    tokenizer.from_files(vocabulary_file, merges_file)  # refuses bad ones before anything is written
    checksums = {"vocabulary": integrity.checksum(vocabulary_file), "merges": integrity.checksum(merges_file)}
    return {"kind": "gpt2", "files": checksums}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("alto-distributed", "numpy", "tokenizers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown"  # run from a checkout, or not needed
    return found


def _saved_tokenizer(
    kind: str, vocabulary: int, found: Sequence[sources.Source], folder: Path, progress: bool
) -> tokenizer.Tokenizer:
    """The tokenizer, in a file for the workers: trained, read, or left by an interrupted run."""
    if kind == "bytes":
        return tokenizer.Bytes()
    path = folder / tokenizer.SAVED_AS
    if not path.exists():
        if kind == "bpe":
            words = tokenizer.train(_texts(found, progress), vocabulary)
        else:
            words = tokenizer.from_files(*tokenizer.files_of(kind))
        beside = path.with_name(f"beside-{path.name}")
        words.save(beside)
        integrity.sync(beside)
        beside.replace(path)
    return tokenizer.load(path)


def _texts(found: Sequence[sources.Source], progress: bool) -> Iterator[str]:
    total = sum(source.size for source in found)
    with tqdm(total=total, desc="reading for the tokenizer", unit="B", unit_scale=True, disable=not progress) as bar:
        for number, source in enumerate(found):
            for text in sources.read(source, sources.ByteRange(number, 0, source.size), sources.Lines()):
                if isinstance(text, str):
                    yield text
            bar.update(source.size)


def _tokenize(work: parts.Work, workers: int, progress: bool) -> None:
    sizes = [sum(span.stop - span.start for span in chunk) for chunk in work.chunks]
    done = sum(sizes) - sum(sizes[number] for number in work.missing())
    bar = tqdm(total=sum(sizes), initial=done, desc="tokenizing", unit="B", unit_scale=True, disable=not progress)
    with bar:
        for number in parts.make(work, workers):
            bar.update(sizes[number])


@dataclass(frozen=True)
class _Joined:
    counts: list[parts.Counts]
    """For each source."""
    splits: dict[str, dict[str, Any]]


def _join(work: parts.Work, exact: Sequence[Fraction], seed: int, progress: bool) -> _Joined:
    """The parts, in order, as three pairs of files in the same folder."""
    writers = [indexed.Writer(work.directory / split, np.dtype(work.dtype)) for split in SPLITS]
    counts = [parts.Counts(number) for number in range(len(work.sources))]
    documents = 0
    for number in tqdm(range(len(work.chunks)), desc="writing", unit="part", disable=not progress):
        new, spans = parts.load(work, number)
        for span in spans:
            counts[span.source] += span
        for document, chosen in zip(new, splits.assign(documents, len(new), seed, exact), strict=True):
            writers[chosen].add(document)
        documents += len(new)
    for writer in writers:
        writer.close()
    if not documents:
        shutil.rmtree(work.directory)  # nothing in it is worth keeping
        bad = [(work.sources[c.source].path, *c.first_bad[0]) for c in counts if c.bad]
        why = "{} line {}: {}".format(*bad[0]) if bad else "all its lines are blank"
        raise ValueError(f"there are no documents in the input: {why}")
    splits.check_filled([writer.documents for writer in writers], exact)
    written: dict[str, dict[str, Any]] = {}
    for split, writer in zip(SPLITS, writers, strict=True):
        written[split] = {"documents": writer.documents, "tokens": writer.tokens}
        for name in workspace.token_files(split) if writer.documents else ():
            path = work.directory / name
            integrity.sync(path)
            content = integrity.content_of(path)
            written[split][name] = {"bytes": content.bytes, "sha256": content.checksum}
    return _Joined(counts, written)


def _counted(counts: parts.Counts) -> dict[str, Any]:
    first = [{"line": line, "why": why} for line, why in counts.first_bad]
    return {
        "documents": counts.documents,
        "tokens": counts.tokens,
        "bad_lines": counts.bad,
        "first_bad_lines": first,
    }
