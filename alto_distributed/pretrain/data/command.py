"""``python -m alto_distributed prepare [INPUT ...] --output DIR``."""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

from ...errors import refused
from ..console import log_lines
from .prepare import DEFAULT_SEED, DEFAULT_SPLIT, DEFAULT_VOCABULARY, prepare
from .sources import TEXT_KEY

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Turn text into token files for pretraining. Run it again after an interruption: it goes on."
    parser.add_argument(
        "input",
        nargs="*",
        help='text files (a document each), JSON lines (.jsonl, one object with "text" a line), either compressed '
        "(.gz, .zst), tables (.parquet, or a directory that datasets' save_to_disk wrote), or directories of such "
        "files; none for the sources of Python's standard library",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="where to put train, valid and test")
    parser.add_argument(
        "--text-key",
        default=TEXT_KEY,
        metavar="NAME",
        help="key or column that has the text (default: text)",
    )
    parser.add_argument(
        "--tokenizer",
        default="bpe",
        metavar="NAME",
        help="bpe: a byte-level BPE trained on the input (default); bytes: one token a byte; gpt2: from tiktoken's "
        "cache; a Hugging Face tokenizer.json; or a directory with it, or with GPT-2's vocab.json and merges.txt. "
        "Nothing is downloaded",
    )
    parser.add_argument(
        "--vocabulary",
        type=int,
        metavar="N",
        help=f"tokens of bpe, with the end of a document (default {DEFAULT_VOCABULARY})",
    )
    parser.add_argument(
        "--split",
        default=",".join(DEFAULT_SPLIT),
        help="shares of documents for train, valid and test, as far as the input has no such splits (default "
        "%(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=DEFAULT_SEED, help="chooses each split's documents (default %(default)s)"
    )
    parser.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: one a core)"
    )
    parser.add_argument("--force", action="store_true", help="replace what was prepared there from other input")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")


def main(options: argparse.Namespace) -> None:
    """Prepare, and tell what came of it: the result on stdout, bad lines and progress on stderr.

    Raises:
        SystemExit: it could not be done; its message says why and what to do.
    """
    try:
        if options.vocabulary is not None and options.tokenizer != "bpe":
            raise ValueError(f"--vocabulary is for --tokenizer bpe; {options.tokenizer} has its own")
        done = prepare(
            options.output,
            options.input,
            kind=options.tokenizer,
            vocabulary=DEFAULT_VOCABULARY if options.vocabulary is None else options.vocabulary,
            split=options.split.split(","),
            seed=options.seed,
            workers=options.workers,
            force=options.force,
            progress=not options.quiet,
            text_key=options.text_key,
        )
    except (ValueError, OSError) as error:
        raise refused("prepare", error) from None
    except KeyboardInterrupt:
        raise SystemExit("interrupted; the same command goes on from here") from None
    with log_lines():
        _report_bad_lines(done.manifest)
    print(f"already prepared: {options.output}" if done.was_there else f"prepared {options.output}")
    if named := done.manifest["settings"].get("named_splits"):
        print(f"  {', '.join(named)} as the input has them")
    for name, counts in done.manifest["splits"].items():
        print(f"  {name:5} {counts['documents']:>10,} documents {counts['tokens']:>14,} tokens")
    about = done.manifest["tokenizer"]
    print(
        f"  model.vocabulary must be at least {about['vocabulary']} ({about['kind']}, {done.manifest['dtype']} on disk)"
    )


def _report_bad_lines(manifest: dict[str, Any]) -> None:
    for about in manifest["inputs"]:
        if about["bad_lines"]:
            first = "; ".join(f"line {bad['line']}: {bad['why']}" for bad in about["first_bad_lines"])
            more = ", ..." if about["bad_lines"] > len(about["first_bad_lines"]) else ""
            _log.warning("%s: %s bad lines left out (%s%s)", about["name"], about["bad_lines"], first, more)
    if ignored := manifest["settings"]["ignored_files"]:
        names = ", ".join(ignored[:10]) + (", ..." if len(ignored) > 10 else "")
        _log.warning("%s files left out, by name no documents: %s", len(ignored), names)
