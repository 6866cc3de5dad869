"""The output directory: empty, taken, interrupted or complete, and how it gets from one to the next."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import integrity
from ..runtime.file_lock import Timeout, take
from . import files, tokenizer, unpack
from .files import MANIFEST, SPLITS, UNFINISHED

_REQUEST = "request.json"
_LOCK = "lock"


def token_files(split: str) -> list[str]:
    return [f"{split}.bin", f"{split}.idx"]


_OUTPUTS = [name for split in SPLITS for name in token_files(split)] + [tokenizer.SAVED_AS]


def complete(output: Path, settings: dict[str, Any], inputs: list[dict[str, Any]]) -> dict[str, Any]:
    """The manifest of a complete directory, if it is what would be written now.

    Raises:
        ValueError: it is not, or its files are not whole.
    """
    manifest = files.read_manifest(output)
    there = manifest["settings"]
    differ = [
        f"{key} is {there.get(key)} there and {now} now" for key, now in settings.items() if there.get(key) != now
    ]
    if [{key: about[key] for key in ("name", "bytes", "sha256")} for about in manifest["inputs"]] != inputs:
        differ.append("the input files are not the same")
    if differ:
        raise ValueError(
            f"{output} was prepared otherwise: {'; '.join(differ)}. Choose another --output, or --force to replace it"
        )
    for split in SPLITS:
        if manifest["splits"][split]["documents"]:
            files.open_tokens(output, split)
    files.open_tokenizer(output)
    shutil.rmtree(output / UNFINISHED, ignore_errors=True)  # if it was interrupted after the manifest
    return manifest


@contextmanager
def unfinished(output: Path, request: dict[str, Any], force: bool) -> Iterator[Path]:
    """The folder to work in, for one process at a time. It is removed at the end if nothing went wrong.

    Args:
        request: what the finished parts in the folder depend on.
        force: discard what is in the way.

    Raises:
        ValueError: the directory cannot be written, or something is in the way.
    """
    folder = output / UNFINISHED
    foreign = [name for name in _OUTPUTS if (output / name).exists()]
    if foreign and not folder.exists() and not force:
        raise ValueError(f"{output / foreign[0]} exists and was not prepared here; choose another --output, or --force")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = take(folder / _LOCK)
    except Timeout:
        raise ValueError(f"another process is preparing {output}; wait for it, or choose another --output") from None
    except OSError as error:
        raise ValueError(f"{output} cannot be written: {error}") from None
    try:
        _keep_finished(folder, request, force)
        if force:
            for name in [MANIFEST, *_OUTPUTS]:  # the manifest first: from here on it is not complete
                (output / name).unlink(missing_ok=True)
        yield folder
        shutil.rmtree(folder)
    finally:
        lock.release()


def _keep_finished(folder: Path, request: dict[str, Any], force: bool) -> None:
    """Leave in the folder only what an interrupted run of the same request has finished."""
    path = folder / _REQUEST
    try:
        earlier = json.loads(path.read_bytes()) if path.exists() else None
    except (ValueError, RecursionError):
        earlier = "damaged"  # and so no request
    if earlier not in (None, request) and not force:
        raise ValueError(
            f"{folder} holds an interrupted preparation of other input, or with another tokenizer or other versions; "
            "finish that one, choose another --output, or --force to discard it"
        )
    for path in folder.iterdir():
        finished = path.name.startswith(("part-", unpack.PREFIX)) or path.name == tokenizer.SAVED_AS
        if path.name != _LOCK and not (finished and earlier == request):
            path.unlink()
    integrity.write_json(folder / _REQUEST, request)


def publish(folder: Path, output: Path, names: Sequence[str], manifest: dict[str, Any]) -> None:
    """Move finished files to where they belong; the manifest, which makes the directory complete, comes last."""
    for name in names:
        (folder / name).replace(output / name)
    files.write_manifest(output, manifest)
