"""The model of a run: the same weights on every rank and in every engine, and the loss it is trained with."""

from __future__ import annotations

import hashlib
import math
from typing import Any, cast

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from .config.settings import Model, Run
from .data import files
from .llama import Llama

#: Layers whose output is added to the residual stream.
_TO_RESIDUAL = ("c_proj", "o_proj", "down_proj")


def build_model(run: Run) -> nn.Module:
    """The model with its initial weights, in float32 on the CPU. Called with :func:`inputs_of`, it gives ``logits``."""
    model = _gpt2(run) if run.model.kind == "gpt2" else Llama(run.model, run.training.recompute)
    initialize(model, run)
    return model


def _gpt2(run: Run) -> nn.Module:
    """transformers' GPT-2: GELU by its tanh approximation, and the output layer is the token embedding."""
    config = gpt2_config(run.model)
    config._attn_implementation = "sdpa"  # torch's own, on any device
    with torch.random.fork_rng(devices=[]):  # transformers draws weights of its own, which are replaced
        model = cast(Any, GPT2LMHeadModel)(config)
    if run.training.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return cast(nn.Module, model)


def gpt2_config(m: Model, **more: Any) -> GPT2Config:
    """transformers' description of a GPT-2."""
    settings: dict[str, Any] = {
        "use_cache": False,  # past keys and values are for generating
        "bos_token_id": None,  # GPT-2's own would lie outside a smaller vocabulary
        "eos_token_id": None,
        **more,
    }
    return GPT2Config(
        vocab_size=m.vocabulary,
        n_positions=m.sequence,
        n_embd=m.hidden,
        n_layer=m.layers,
        n_head=m.heads,
        n_inner=m.inner,
        resid_pdrop=m.dropout,
        embd_pdrop=m.dropout,
        attn_pdrop=m.dropout,
        initializer_range=m.init_std,
        activation_function="gelu_new",
        tie_word_embeddings=True,
        **settings,
    )


def initial_weights(run: Run) -> dict[str, torch.Tensor]:
    """The initial weights by name, whole and in float32, for an engine with a model of its own."""
    return {name: parameter.detach() for name, parameter in build_model(run).named_parameters()}


@torch.no_grad()
def initialize(model: nn.Module, run: Run) -> None:
    """Initial weights, as GPT-2's: normal with ``init_std``; less for what is added to the residual stream.

    Each tensor is drawn from a generator of its own, seeded by the run's seed and its name, so that neither the order
    of the modules nor the version of transformers matters.
    """
    for name, parameter in model.named_parameters():
        kind = name.rsplit(".", 2)[-2:]
        if kind[-1] == "bias":
            parameter.zero_()
        elif parameter.ndim < 2:  # the weights of norms
            parameter.fill_(1.0)
        else:
            std = run.model.init_std
            if kind[0] in _TO_RESIDUAL:  # two of them in each layer add to the residual stream
                std /= math.sqrt(2 * run.model.layers)
            generator = torch.Generator().manual_seed(seed_from(run.training.seed, "weights", name))
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu") * std)


def parameter_count(model: nn.Module) -> int:
    """Trainable numbers in the model; the tied embedding counts once."""
    # ZeRO stage 3 leaves parameters empty between uses, and notes down how large they are.
    return sum(int(getattr(p, "ds_numel", p.numel())) for p in model.parameters() if p.requires_grad)


def inputs_of(tokens: torch.Tensor, document_end: int | None = None) -> dict[str, torch.Tensor]:
    """What the model is called with, of [samples, sequence + 1] token ids.

    Args:
        tokens: the ids.
        document_end: the id after which another document begins, with ``data.document_mask``; see :func:`documents`.
    """
    ids = tokens[:, :-1]
    if document_end is None:
        return {"input_ids": ids}
    visible, positions = documents(ids, document_end)
    return {"input_ids": ids, "attention_mask": visible, "position_ids": positions}


def documents(ids: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens each token may see, and their positions, if each document stands alone.

    Args:
        ids: [samples, sequence].
        end: the last token of a document.

    Returns:
        [samples, 1, sequence, sequence], True for earlier tokens of the same document and the token itself; and
        [samples, sequence], counted from 0 at the first token of each document.
    """
    ends = ids == end
    number = ends.cumsum(1) - ends.long()  # of the document
    places = torch.arange(ids.shape[1], dtype=torch.long, device=ids.device)
    after_end = nn.functional.pad(ends[:, :-1], (1, 0), value=True)
    begins = torch.where(after_end, places, 0).cummax(1).values
    same = number[:, :, None] == number[:, None, :]
    return (same & (places[:, None] >= places))[:, None], places - begins


def document_end(run: Run) -> int | None:
    """The id that ends a document of the run's data; None unless documents are masked."""
    return files.open_tokenizer(run.data.directory).end_of_document if run.data.document_mask else None


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats of the logits of :func:`inputs_of` ``tokens``, in float32 whatever the model's
    precision."""
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def seed_from(*parts: int | str) -> int:
    """A seed that follows from all of the parts and is unlike those of their neighbors."""
    text = "\n".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def seed_dropout(run: Run, step: int, rank: int) -> None:
    """Set torch's generators for a step's dropout masks, so that they do not depend on what ran before.

    A run that was stopped and continued then draws the same masks as one that never was.

    Args:
        run: its ``training.seed`` enters.
        step: of the optimizer, counted from the start of the run.
        rank: data-parallel.
    """
    torch.manual_seed(seed_from(run.training.seed, "dropout", step, rank))
