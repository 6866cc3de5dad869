"""What a trained model says: a continuation of a text, and its loss on other data."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .data import files, sources, unpack
from .data.cuts import ByteRange
from .data.samples import Samples
from .data.tokenizer import Tokenizer
from .export import in_transformers
from .model import inputs_of, next_token_loss
from .trained import Trained, device


@dataclass(frozen=True)
class Loss:
    """Of a model on some data."""

    nats: float
    """Mean cross entropy of a token."""
    tokens: int
    size: int | None = None
    """Bytes of text, if they are known."""

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nats, 50.0))

    @property
    def bits_per_byte(self) -> float | None:
        """The same for any tokenizer."""
        return self.nats * self.tokens / math.log(2) / self.size if self.size else None


def generate(
    trained: Trained,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> str:
    """The prompt and what the model makes of it, until a document ends, ``tokens`` are there or the sequence is full.

    Args:
        trained: a checkpoint.
        tokenizer: of its data.
        prompt: may be empty: the beginning of a document.
        tokens: at most so many new ones.
        temperature: 0 for the likeliest token each time.
        top_k: draw from so many likeliest tokens; 0 for all.
        seed: of the draws.

    Raises:
        ValueError: the prompt fills the model's sequence.
    """
    longest, end = trained.run.model.sequence, tokenizer.end_of_document
    given = tokenizer.encode(prompt).tolist() if prompt else [end]
    if len(given) >= longest:
        raise ValueError(
            f"the prompt has {len(given)} tokens, and the model's sequence is {longest} (model.sequence): give a "
            "shorter one"
        )
    drawn = {"do_sample": True, "temperature": temperature, "top_k": top_k} if temperature else {"do_sample": False}
    model = in_transformers(trained, end).to(device())
    ids = torch.tensor([given], dtype=torch.long, device=device())
    known = tokenizer.size  # the model may have more rows, which mean nothing
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(seed)
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=min(tokens, longest - len(given)),
            pad_token_id=end,
            suppress_tokens=list(range(known, trained.run.model.vocabulary)) or None,
            **drawn,
        )
    return tokenizer.decode(made[0].tolist())


def evaluate_prepared(trained: Trained, directory: Path, split: str, samples: int) -> Loss:
    """The loss on a split of prepared data, over the windows that a run's own validation would take.

    Raises:
        ValueError: there are no such data, or they were prepared with another tokenizer.
    """
    tokenizer = trained.tokenizer(directory)
    files.verify(directory, split)
    m = trained.run.model
    windows = Samples(directory, split, m.sequence, m.vocabulary)
    return _loss(trained, iter(windows.validation(samples, trained.run.training.micro_batch)), tokenizer)


def evaluate_text(trained: Trained, tokenizer: Tokenizer, inputs: Sequence[Path], key: str = sources.TEXT_KEY) -> Loss:
    """The loss on all tokens of text files or JSON lines but the first: windows side by side, the last one shorter.

    Raises:
        ValueError: there is no text, or a line holds none.
    """
    encoded, size = [np.zeros(0, np.int64)], 0
    with tempfile.TemporaryDirectory() as folder:
        for number, given in enumerate(sources.find(inputs)[0]):
            source = sources.scanned(unpack.unpacked(given, number, Path(folder), key))
            for document in sources.read(source, ByteRange(number, 0, source.size), sources.Lines(), key):
                if isinstance(document, sources.Bad):
                    where = f"{source.name}, line {document.line}"
                    raise ValueError(f"{where}: {document.why}; mend it, or leave the file out")
                size += len(document.encode())
                encoded += [tokenizer.encode(document), np.array([tokenizer.end_of_document])]
    stream = torch.from_numpy(np.concatenate(encoded).astype(np.int32))
    if len(stream) < 2:
        raise ValueError(f"there is no text in {', '.join(map(str, inputs))}")
    length, micro = trained.run.model.sequence, trained.run.training.micro_batch
    whole = (len(stream) - 1) // length
    rows = [stream[n * length : (n + 1) * length + 1] for n in range(whole)]
    batches = [torch.stack(rows[first : first + micro]) for first in range(0, whole, micro)]
    rest = stream[whole * length :]
    if len(rest) > 1:
        batches.append(rest[None])
    found = _loss(trained, iter(batches), tokenizer)
    return Loss(found.nats, found.tokens, size)


@torch.inference_mode()
def _loss(trained: Trained, batches: Iterator[torch.Tensor], tokenizer: Tokenizer) -> Loss:
    model, where = trained.model(), device()
    end = tokenizer.end_of_document if trained.run.data.document_mask else None
    total, count = 0.0, 0
    for batch in batches:
        tokens = batch.to(where, torch.long)
        total += float(next_token_loss(model(**inputs_of(tokens, end)).logits, tokens)) * tokens[:, 1:].numel()
        count += tokens[:, 1:].numel()
    return Loss(total / count, count)
