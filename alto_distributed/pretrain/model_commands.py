"""``alto export | generate | eval RUN ...``: use what a run has trained."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import shown
from ..extras import require
from .data import files
from .data.sources import TEXT_KEY

if TYPE_CHECKING:
    from .trained import Trained

_MODULES = {"deepspeed": ("deepspeed",), "megatron": ()}


def add(commands: Any) -> None:
    """The three parsers."""
    exporting = commands.add_parser("export", help="write a trained model for other programs")
    _common(exporting)
    exporting.add_argument("--to", choices=("hf",), default="hf", help="hf: a directory for Hugging Face transformers")
    exporting.add_argument("--into", type=Path, metavar="DIR", help="where to write it (default: RUN/hf-STEP)")
    exporting.set_defaults(action=_export, words="extra", extra=[])

    generating = commands.add_parser("generate", help="continue a text with a trained model")
    _common(generating)
    generating.add_argument("prompt", help='text to go on from; "" for the beginning of a document')
    generating.add_argument("--tokens", type=int, default=100, help="new ones at most (default: %(default)s)")
    generating.add_argument("--temperature", type=float, default=1.0, help="0 for the likeliest (default: %(default)s)")
    generating.add_argument("--top-k", type=int, default=0, help="draw from so many; 0 for all (default: %(default)s)")
    generating.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    generating.set_defaults(action=_generate, words="extra", extra=[])

    evaluating = commands.add_parser("eval", help="loss and perplexity of a trained model on other data")
    _common(evaluating)
    evaluating.add_argument("inputs", nargs="+", type=Path, metavar="DATA", help="a prepared directory, or text files")
    evaluating.add_argument("--split", choices=files.SPLITS, default="valid", help="of prepared data (default: valid)")
    evaluating.add_argument(
        "--text-key", default=TEXT_KEY, metavar="NAME", help="of texts: key or column that has them (default: text)"
    )
    evaluating.add_argument("--samples", type=int, default=0, help="of prepared data; 0 for all (default: 0)")
    evaluating.set_defaults(action=_evaluate, words="extra", extra=[])


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a run")
    parser.add_argument("--step", type=int, help="of the checkpoint (default: the newest)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="data that have its tokenizer (default: the run's)")


def _opened(options: argparse.Namespace) -> Trained:
    if options.extra:
        raise ValueError(f"{shown(options.extra[0])} is one word too many; put a text in quotes")
    require("transformers", "tokenizers")
    from .trained import open_run

    trained = open_run(options.run, options.step)
    require(*_MODULES[trained.run.engine])
    return trained


def _export(options: argparse.Namespace) -> None:
    trained = _opened(options)
    from .export import export

    into = options.into or options.run / f"hf-{trained.checkpoint.step:08d}"
    export(trained, into, trained.tokenizer(options.data))
    print(f"{trained.checkpoint.path} is now {into}: AutoModelForCausalLM.from_pretrained({str(into)!r})")


def _generate(options: argparse.Namespace) -> None:
    for name, least in (("tokens", 1), ("top_k", 0), ("temperature", 0), ("seed", 0)):
        if not least <= getattr(options, name) < 2**31:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} {getattr(options, name)} must be a number between {least} and 2**31 - 1")
    trained = _opened(options)
    from .inference import generate

    tokenizer = trained.tokenizer(options.data)
    chosen = {name: getattr(options, name) for name in ("tokens", "temperature", "top_k", "seed")}
    print(generate(trained, tokenizer, options.prompt, **chosen))


def _evaluate(options: argparse.Namespace) -> None:
    trained = _opened(options)
    from .inference import evaluate_prepared, evaluate_text

    inputs = options.inputs
    if len(inputs) == 1 and (inputs[0] / files.MANIFEST).is_file():
        found = evaluate_prepared(trained, inputs[0], options.split, options.samples)
        what = f"{inputs[0]}, {options.split}"
    else:
        found = evaluate_text(trained, trained.tokenizer(options.data), inputs, options.text_key)
        what = ", ".join(map(str, inputs))
    size = f", {found.bits_per_byte:.4f} bits a byte" if found.bits_per_byte is not None else ""
    print(
        f"{trained.checkpoint.path} on {what}: {found.tokens:,} tokens, loss {found.nats:.4f}, perplexity "
        f"{found.perplexity:.2f}{size}"
    )
