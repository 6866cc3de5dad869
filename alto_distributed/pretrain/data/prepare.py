"""Text files or JSON lines to token files, three pairs in Megatron's indexed format.

The input is cut into chunks. Each becomes a token shard (:mod:`.token_shards`) in the folder ``unfinished``, and these
are joined in order. The result depends on the input and the settings, never on the number of workers or on
interruptions.
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
from . import cuts, files, indexed, output_dir, sources, splits, token_shards, tokenizer, unpack
from .files import MANIFEST, SPLITS

_COUNTED = 1 << 28  # bytes of input up to which lines are counted first
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
    text_key: str = sources.TEXT_KEY,
) -> Prepared:
    """Write ``output/{train,valid,test}.{bin,idx}``, the tokenizer and a manifest.

    Args:
        output: a directory, made if need be. One that holds an interrupted preparation is continued.
        inputs: files and directories, see :func:`.sources.find`; none for the standard library's sources.
        kind: the tokenizer: "bpe" is trained on the input, "bytes" needs nothing, "gpt2" is looked for in tiktoken's
            cache, and anything else is a tokenizer.json, a directory with one, or with vocab.json and merges.txt.
        vocabulary: tokens of "bpe", the end of a document among them.
        split: shares of the documents that go to train, valid and test. A share of 0 leaves the split out. Splits that
            the input has itself, by folders or file names, stay as they are, and the others are drawn from the rest.
        seed: chooses the documents of each split.
        workers: processes.
        force: replace what is there, whatever it is.
        progress: show bars on stderr.
        chunk_bytes: input in a part, which is what an interruption can lose for each worker, and what is in memory.
        text_key: what has the text, in JSON lines and tables.

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
    named = sorted({source.split for source in found} - {""})
    drawn = splits.without(exact, named)
    unpack.check(found, text_key)
    about_tokenizer = _describe(kind, vocabulary)
    about_inputs = [{"name": s.name, "bytes": s.size, "sha256": s.checksum()} for s in found]
    settings = {
        "tokenizer": about_tokenizer,
        "split": [str(share) for share in exact],
        "seed": seed,
        "ignored_files": ignored,
        **({"named_splits": named} if named else {}),
        **({} if text_key == sources.TEXT_KEY else {"text_key": text_key}),
    }
    if (output / MANIFEST).exists() and not force:
        return Prepared(output_dir.complete(output, settings, about_inputs), was_there=True)
    unpack.check_key(found, text_key)

    versions = _versions()
    chunks: Sequence[tuple[cuts.ByteRange, ...]] = ()
    # Too few texts to draw a split for each: then a text's beginning, middle and end go to train, valid and test.
    texts = [source for source in found if not source.is_held_out]
    by_share = not any(s.json_lines for s in texts) and not splits.leaves_none_empty(len(texts), seed, drawn)
    # Not the split, if one is drawn for each document: shards are the same for all of them.
    request = {
        **({"split": [str(share) for share in drawn]} if by_share else {}),
        **({} if text_key == sources.TEXT_KEY else {"text_key": text_key}),
        "tokenizer": about_tokenizer,
        "inputs": about_inputs,
        "chunk_bytes": chunk_bytes,
        "versions": versions,
    }
    if not any(source.packed for source in found):  # refuses before anything is written
        found, chunks = _cut(found, chunk_bytes, seed, drawn, by_share)
    with output_dir.unfinished(output, request, force) as folder:
        if any(source.packed for source in found):
            found = [unpack.unpacked(source, i, folder, text_key) for i, source in enumerate(found)]
            found, chunks = _cut(found, chunk_bytes, seed, drawn, by_share)
        words = _saved_tokenizer(kind, vocabulary, _texts(found, chunks, text_key, progress), folder)
        saved = [] if kind == "bytes" else [tokenizer.SAVED_AS]
        work = token_shards.Task(
            directory=folder,
            sources=found,
            chunks=chunks,
            tokenizer=folder / tokenizer.SAVED_AS if saved else None,
            dtype=indexed.token_dtype(words.size).name,
            key=text_key,
            is_pretrained=_is_pretrained(kind) is not None,
        )
        _tokenize(work, workers, progress)
        joined = _join(work, drawn, seed, progress)
        splits.check_filled([joined.splits[name]["documents"] for name in SPLITS], exact)
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
        names = [name for s in SPLITS if joined.splits[s]["documents"] for name in output_dir.token_files(s)]
        output_dir.publish(folder, output, names + saved, manifest)
    return Prepared(manifest, was_there=False)


def _describe(kind: str, vocabulary: int) -> dict[str, Any]:
    """What distinguishes a tokenizer from others, before it is built."""
    if kind == "bytes":
        return {"kind": kind}
    if kind == "bpe":
        tokenizer.check_vocabulary(vocabulary)
        return {"kind": kind, "vocabulary": vocabulary}
    if saved := _is_pretrained(kind):
        tokenizer.pretrained(saved)  # refuses a bad one before anything is written
        return {"kind": tokenizer.SAVED_AS, "files": {tokenizer.SAVED_AS: integrity.checksum(saved)}}
    if kind not in KINDS and not Path(kind).is_dir():
        hint = did_you_mean(kind, KINDS)
        raise ValueError(
            f"the tokenizer {kind!r} is unknown{hint} (known: {', '.join(KINDS)}, a tokenizer.json, or a directory "
            "with one, or with vocab.json and merges.txt)"
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


def _cut(
    found: Sequence[sources.Source], chunk_bytes: int, seed: int, exact: Sequence[Fraction], by_share: bool
) -> tuple[list[sources.Source], list[tuple[cuts.ByteRange, ...]]]:
    """The sources after a look at their content, and their chunks.

    Raises:
        ValueError: they are too short or too few for the split, as far as that can be seen without tokenizing them.
    """
    found = [sources.scanned(source) for source in found]
    divided = [source for source in found if not source.is_held_out]
    if not by_share and chunk_bytes < sum(source.size for source in divided) <= _COUNTED:  # a small one is soon done
        most = sum(sources.lines_in(source) if source.json_lines else 1 for source in divided)
        if not splits.leaves_none_empty(most, seed, exact):
            splits.check_filled(np.bincount(splits.assign(0, most, seed, exact), minlength=len(exact)).tolist(), exact)
    return found, cuts.chunks(found, chunk_bytes, exact if by_share else None)


def _saved_tokenizer(kind: str, vocabulary: int, texts: Iterator[str], folder: Path) -> tokenizer.Tokenizer:
    """The tokenizer, in a file for the workers: trained, read, or left by an interrupted run."""
    if kind == "bytes":
        return tokenizer.Bytes()
    path = folder / tokenizer.SAVED_AS
    words: tokenizer.BytePairs | tokenizer.Pretrained
    if not path.exists():
        if kind == "bpe":
            words = tokenizer.train(texts, vocabulary)
        elif saved := _is_pretrained(kind):
            words = tokenizer.pretrained(saved)
        else:
            words = tokenizer.from_files(*tokenizer.files_of(kind))
        beside = path.with_name(f"beside-{path.name}")
        words.save(beside)
        integrity.sync(beside)
        beside.replace(path)
    return tokenizer.pretrained(path) if _is_pretrained(kind) else tokenizer.load(path)


def _is_pretrained(kind: str) -> Path | None:
    """The file of a tokenizer that is none of ours."""
    return None if kind in KINDS else tokenizer.saved_in(kind)


def _texts(
    found: Sequence[sources.Source], chunks: Sequence[Sequence[cuts.ByteRange]], key: str, progress: bool
) -> Iterator[str]:
    total = sum(source.size for source in found)
    with tqdm(total=total, desc="reading for the tokenizer", unit="B", unit_scale=True, disable=not progress) as bar:
        for span in (span for chunk in chunks for span in chunk):
            source = found[span.source]
            for text in () if source.is_held_out else sources.read(source, span, sources.Lines(), key):
                if isinstance(text, str):
                    yield text
            bar.update(span.stop - span.start)


def _tokenize(work: token_shards.Task, workers: int, progress: bool) -> None:
    sizes = [sum(span.stop - span.start for span in chunk) for chunk in work.chunks]
    done = sum(sizes) - sum(sizes[number] for number in work.missing())
    bar = tqdm(total=sum(sizes), initial=done, desc="tokenizing", unit="B", unit_scale=True, disable=not progress)
    with bar:
        for number in token_shards.make(work, workers):
            bar.update(sizes[number])


@dataclass(frozen=True)
class _Joined:
    counts: list[token_shards.Counts]
    """For each source."""
    splits: dict[str, dict[str, Any]]


def _join(work: token_shards.Task, exact: Sequence[Fraction], seed: int, progress: bool) -> _Joined:
    """The token shards, in order, as three pairs of files in the same folder."""
    writers = [indexed.Writer(work.directory / split, np.dtype(work.dtype)) for split in SPLITS]
    counts = [token_shards.Counts(number) for number in range(len(work.sources))]
    documents = 0
    for number in tqdm(range(len(work.chunks)), desc="writing", unit="part", disable=not progress):
        new, found = token_shards.load(work, number)
        pieces = iter(new)
        for span, about in zip(work.chunks[number], found, strict=True):
            counts[about.source] += about
            source = work.sources[about.source]
            drawn = splits.assign(documents, about.documents if span.ends else 1, seed, exact)
            own = SPLITS.index(source.split) if source.is_held_out else span.split
            for chosen in drawn if own < 0 else [own] * len(drawn):
                writers[chosen].add(next(pieces), ends=span.ends)
            documents += about.documents
    for writer in writers:
        writer.close()
    if not documents:
        shutil.rmtree(work.directory)  # nothing in it is worth keeping
        bad = [(work.sources[c.source].path, *c.first_bad[0]) for c in counts if c.bad]
        why = "{} line {}: {}".format(*bad[0]) if bad else "all its lines are blank"
        raise ValueError(f"there are no documents in the input: {why}")
    written: dict[str, dict[str, Any]] = {}
    for split, writer in zip(SPLITS, writers, strict=True):
        written[split] = {"documents": writer.documents, "tokens": writer.tokens}
        for name in output_dir.token_files(split) if writer.documents else ():
            path = work.directory / name
            integrity.sync(path)
            content = integrity.content_of(path)
            written[split][name] = {"bytes": content.bytes, "sha256": content.checksum}
    return _Joined(counts, written)


def _counted(counts: token_shards.Counts) -> dict[str, Any]:
    first = [{"line": line, "why": why} for line, why in counts.first_bad]
    return {
        "documents": counts.documents,
        "tokens": counts.tokens,
        "bad_lines": counts.bad,
        "first_bad_lines": first,
    }
