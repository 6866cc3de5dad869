"""A prepared directory: its manifest, and its token files in Megatron's indexed format."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config.parsing import parse_json
from ..integrity import NAME, Content, checksum, checksum_of_json, damage, is_count, write_json
from . import indexed, tokenizer

MANIFEST = NAME
UNFINISHED = "unfinished"
"""Folder of a preparation that is under way or was interrupted."""
FORMAT = 2
"""The first did not hold its own checksum. It is still read."""
SPLITS = ("train", "valid", "test")

_CHECKSUM = "checksum"


def read_manifest(directory: str | Path) -> dict[str, Any]:
    """What ``prepare`` says about what it wrote.

    Raises:
        ValueError: nothing was prepared there, or not to the end, or by another version of this package.
    """
    path = Path(directory) / MANIFEST
    again = f"python -m alto_distributed prepare --output {directory}"
    if not path.is_file():
        if (Path(directory) / UNFINISHED).is_dir():
            raise ValueError(f"the preparation of {directory} was interrupted; run the same command again: {again} ...")
        raise ValueError(f"{directory} holds no prepared data; prepare some with {again} [INPUT ...]")
    damaged = f"prepare the data again: {again} --force ..."
    try:
        manifest = parse_json(path.read_bytes(), "it")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}); {damaged}") from None
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if isinstance(manifest, dict) and isinstance(found, int) and found not in (1, FORMAT):
        raise ValueError(f"{path} has format {found}, and this version reads {FORMAT}; prepare the data again: {again}")
    for wrong in _not_a_manifest(manifest):
        raise ValueError(f"{path} is damaged ({wrong}); {damaged}")
    return {key: value for key, value in manifest.items() if key != _CHECKSUM}


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """What :func:`read_manifest` reads. Written last: it makes a directory complete."""
    write_json(directory / MANIFEST, {_CHECKSUM: checksum_of_json(manifest), **manifest})


def _not_a_manifest(manifest: Any) -> Iterator[str]:
    """What is missing from a manifest, or not of its type, among what is read from it."""
    if not isinstance(manifest, dict) or manifest.get("format") not in (1, FORMAT):
        yield "it is not a manifest"
    said = {key: value for key, value in manifest.items() if key != _CHECKSUM}
    if manifest["format"] != 1 and manifest.get(_CHECKSUM) != checksum_of_json(said):
        yield "it was changed since it was written: its checksum is another"
    about = manifest.get("tokenizer")
    if not isinstance(about, dict) or not is_count(about.get("vocabulary")) or not about["vocabulary"]:
        yield "it does not tell the size of the vocabulary"
    if not isinstance(about.get("kind"), str) or not isinstance(about.get("files", {}), dict):
        yield "it does not tell the tokenizer"
    if about["kind"] == tokenizer.SAVED_AS and not is_count(about.get("end_of_document")):
        yield "it does not tell the end of a document"
    splits = manifest.get("splits")
    if not isinstance(splits, dict) or set(splits) != set(SPLITS):
        yield f"it does not tell of {', '.join(SPLITS)}"
    for split, counts in splits.items():
        if not isinstance(counts, dict) or not (is_count(counts.get("documents")) and is_count(counts.get("tokens"))):
            yield f"it does not count the documents and tokens of {split}"
        for name in (f"{split}.bin", f"{split}.idx") if counts["documents"] else ():
            entry = counts.get(name)
            if not isinstance(entry, dict) or not is_count(entry.get("bytes")):
                yield f"it does not tell the size of {name}"


def open_tokens(directory: str | Path, split: str) -> NDArray[Any]:
    """All tokens of a split, mapped into memory, after their files have been found whole.

    Raises:
        ValueError: there is no such split, or a file of it is missing, cut short or of another size or kind than it
            should be.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r} is not one of {', '.join(SPLITS)}")
    counts = read_manifest(directory)["splits"][split]
    if not counts["documents"]:
        raise ValueError(f"{directory} has no {split} split: it was prepared with a share of 0 for it")
    data, index = (Path(directory) / f"{split}.{end}" for end in ("bin", "idx"))
    for path in (data, index):
        expected = counts[path.name]["bytes"]
        if not path.is_file():
            raise ValueError(f"{path} is missing; prepare the data again with --force")
        if path.stat().st_size != expected:
            raise ValueError(
                f"{path} has {path.stat().st_size} bytes and should have {expected}: it is truncated or is another "
                "file; copy it again, or prepare the data again with --force"
            )
    dtype = indexed.check_index(index, counts["documents"], counts["tokens"])
    if counts[data.name]["bytes"] != counts["tokens"] * dtype.itemsize:
        raise ValueError(
            f"{data} is damaged: it has {counts[data.name]['bytes']} bytes, and {counts['tokens']} tokens of "
            f"{dtype.itemsize} bytes each should be in it; prepare the data again with --force"
        )
    return np.memmap(data, dtype=dtype, mode="r", shape=(counts["tokens"],))


def verify(directory: str | Path, *splits: str) -> None:
    """Read the files of some splits, and the tokenizer's, and compare them with what ``prepare`` wrote.

    Raises:
        ValueError: one of them is missing, or has another content.
    """
    manifest = read_manifest(directory)
    for split, end in itertools.product(splits, ("bin", "idx")):
        counts, path = manifest["splits"][split], Path(directory) / f"{split}.{end}"
        if not counts["documents"]:
            continue
        entry = counts[path.name]
        wrong = damage(path, Content(entry["bytes"], entry.get("sha256", "")))
        if wrong:
            raise ValueError(
                f"{path} is missing or damaged: it is not what was prepared ({wrong}); copy it again, or prepare the "
                "data again with --force"
            )
    open_tokenizer(directory)


def fingerprint(directory: str | Path) -> dict[str, str]:
    """The checksums of a prepared directory's files: equal if and only if the tokens and the tokenizer are."""
    manifest = read_manifest(directory)
    found = {name: str(value) for name, value in manifest["tokenizer"].get("files", {}).items()}
    for split in SPLITS:
        counts = manifest["splits"][split]
        if counts["documents"]:
            found.update({name: str(counts[name].get("sha256")) for name in (f"{split}.bin", f"{split}.idx")})
    return found


def open_tokenizer(directory: str | Path) -> tokenizer.Tokenizer:
    """The tokenizer that a directory was prepared with.

    Raises:
        ValueError: its file is missing or is not the one that was saved there.
    """
    about = read_manifest(directory)["tokenizer"]
    if about["kind"] == "bytes":
        return tokenizer.Bytes()
    path = Path(directory) / tokenizer.SAVED_AS
    if not path.is_file() or checksum(path) != about["files"][tokenizer.SAVED_AS]:
        raise ValueError(f"{path} is missing or damaged; prepare the data again with --force")
    if about["kind"] == tokenizer.SAVED_AS:
        return tokenizer.pretrained(path, about["end_of_document"])
    return tokenizer.load(path)
