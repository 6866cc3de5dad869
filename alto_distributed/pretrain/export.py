"""A trained model as a Hugging Face directory: model.safetensors, config.json, and the tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .config.settings import Model
from .data.tokenizer import END_OF_DOCUMENT, Tokenizer
from .llama import NORM_EPS
from .model import gpt2_config
from .trained import Trained, fill


def export(trained: Trained, into: Path, tokenizer: Tokenizer) -> None:
    """Write a directory that ``transformers`` loads by ``AutoModelForCausalLM`` and ``AutoTokenizer``.

    Raises:
        ValueError: the directory is there already, or the tokenizer cannot be written.
    """
    if into.exists():
        raise ValueError(f"{into} is there already, and is not overwritten; give another --into, or remove it")
    fast = fast_tokenizer(tokenizer, trained.run.model.sequence)
    model = in_transformers(trained, tokenizer.end_of_document)
    beside = into.with_name(f".{into.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        model.save_pretrained(str(beside))
        fast.save_pretrained(str(beside))
        beside.rename(into)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def in_transformers(trained: Trained, end: int, **more: Any) -> Any:
    """The model as one of transformers, on the CPU.

    Args:
        trained: a checkpoint.
        end: id of the end of a document; generation stops there.
        more: settings of transformers' config.
    """
    m, weights = trained.run.model, trained.weights()
    ends: dict[str, Any] = {"bos_token_id": end, "eos_token_id": end, "use_cache": True, **more}
    dtype = next(iter(weights.values())).dtype
    with torch.random.fork_rng(devices=[]):  # transformers draws weights of its own, which are replaced
        if m.kind == "gpt2":
            model: Any = cast(Any, GPT2LMHeadModel)(gpt2_config(m, **ends))
        else:
            model = cast(Any, LlamaForCausalLM)(_llama_config(m, **ends))
            weights = separated(m, weights)
    fill(cast(nn.Module, model), weights, trained.checkpoint.path)
    return model.to(dtype).eval()


def _llama_config(m: Model, **more: Any) -> LlamaConfig:
    return cast(Any, LlamaConfig)(  # type: ignore[no-any-return]
        vocab_size=m.vocabulary,
        hidden_size=m.hidden,
        intermediate_size=m.inner,
        num_hidden_layers=m.layers,
        num_attention_heads=m.heads,
        num_key_value_heads=m.groups,
        max_position_embeddings=m.sequence,
        initializer_range=m.init_std,
        rms_norm_eps=NORM_EPS,
        rope_theta=float(m.rope_theta),
        attention_dropout=m.dropout,
        tie_word_embeddings=False,
        **more,
    )


def separated(m: Model, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of our Llama by the names of transformers', whose projections are parameters of their own."""
    head = m.hidden // m.heads
    parts = {
        "qkv_proj": (("q_proj", "k_proj", "v_proj"), [m.heads * head, m.groups * head, m.groups * head]),
        "gate_up_proj": (("gate_proj", "up_proj"), [m.inner, m.inner]),
    }
    found = {}
    for name, tensor in weights.items():
        fused = next((part for part in parts if f".{part}." in name), None)
        if fused is None:
            found[name] = tensor
            continue
        names, sizes = parts[fused]
        for part, piece in zip(names, torch.split(tensor, sizes), strict=True):
            found[name.replace(fused, part)] = piece
    return found


def fast_tokenizer(tokenizer: Tokenizer, longest: int) -> PreTrainedTokenizerFast:
    """The tokenizer as one of transformers. It has the end of a document as a special token.

    Raises:
        ValueError: the end of a document would get another id.
    """
    library = tokenizer.library()
    end = library.id_to_token(tokenizer.end_of_document) or END_OF_DOCUMENT
    library.add_special_tokens([end])
    if library.token_to_id(end) != tokenizer.end_of_document:
        raise ValueError(
            f"the tokenizer cannot be exported: {end} would be id {library.token_to_id(end)}, and it is "
            f"{tokenizer.end_of_document} in the data; its vocabulary has gaps"
        )
    return cast(Any, PreTrainedTokenizerFast)(  # type: ignore[no-any-return]
        tokenizer_object=library,
        bos_token=end,
        eos_token=end,
        model_max_length=longest,
        clean_up_tokenization_spaces=False,
    )
