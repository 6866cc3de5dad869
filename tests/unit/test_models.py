"""The kinds of models of the training program, what is exported of them, and what they say."""

import dataclasses
import gzip
import json
import re

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from alto_distributed.param_groups import param_groups
from alto_distributed.pretrain import cli, inference
from alto_distributed.pretrain.checkpoint.manager import Checkpoint
from alto_distributed.pretrain.config.settings import parse
from alto_distributed.pretrain.data import tokenizer as tokenizers
from alto_distributed.pretrain.data.prepare import prepare
from alto_distributed.pretrain.export import export, fast_tokenizer
from alto_distributed.pretrain.memory.shapes import of_model
from alto_distributed.pretrain.model import build_model, documents, initial_weights, inputs_of, next_token_loss
from alto_distributed.pretrain.throughput import flops_per_token
from alto_distributed.pretrain.trained import Trained
from tests.helpers.cases import REPO

MODELS = {
    "gpt2": {"kind": "gpt2"},
    "gpt2, wide": {"kind": "gpt2", "feed_forward": 24},
    "llama": {"kind": "llama"},
    "llama, groups": {"kind": "llama", "kv_heads": 2, "feed_forward": 24, "rope_theta": 500},
}
TEXT = "Licensed under the Apache License,\n\n\tVersion 2.0: öé 漢字 \U0001f600 <|endoftext|>  two spaces\r\n"


def run_of(model, **data):
    shape = {"layers": 2, "hidden": 16, "heads": 4, "sequence": 24, "vocabulary": 320, "dropout": 0.0, "init_std": 0.3}
    training = {"precision": "fp32", "micro_batch": 3, "seed": 3}
    return parse({"model": {**shape, **model}, "training": training, "data": data})


@dataclasses.dataclass(frozen=True)
class Held(Trained):
    """As if a checkpoint had the initial weights."""

    def weights(self):
        return initial_weights(self.run)


def held(model, path="nowhere", **data):
    return Held(run_of(model, **data), Checkpoint(7, path), {})


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Bytes, a token each."""
    folder = tmp_path_factory.mktemp("bytes")
    lines = [json.dumps({"text": f"{number} is a number. " * 9}) for number in range(20)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    prepare(folder / "data", [folder / "text.jsonl"], kind="bytes", split=("0.5", "0.5", "0"), workers=1)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_an_export_has_the_logits_of_the_model(name, tmp_path):
    """transformers' own models are the oracle."""
    one = held(MODELS[name])
    export(one, tmp_path / "hf", tokenizers.Bytes())
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert type(theirs).__name__ == ("GPT2LMHeadModel" if "gpt2" in name else "LlamaForCausalLM")
    ids = torch.randint(0, 257, (3, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, got = one.model()(input_ids=ids).logits, theirs(input_ids=ids).logits
    assert ours.std() > 0.1
    torch.testing.assert_close(got, ours, rtol=1e-5, atol=1e-5)
    assert theirs.config.eos_token_id == AutoTokenizer.from_pretrained(tmp_path / "hf").eos_token_id == 256
    with pytest.raises(ValueError, match="is there already, and is not overwritten"):
        export(one, tmp_path / "hf", tokenizers.Bytes())


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_an_exported_tokenizer_gives_the_same_ids(kind, tmp_path):
    ours = tokenizers.Bytes() if kind == "bytes" else tokenizers.train([(REPO / "LICENSE").read_text()], 400)
    fast_tokenizer(ours, 24).save_pretrained(str(tmp_path))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    plain = TEXT.replace("<|endoftext|>", "")
    assert theirs(plain)["input_ids"] == ours.encode(plain).tolist()
    assert theirs.decode(theirs(plain)["input_ids"]) == plain
    assert theirs.eos_token_id == ours.end_of_document
    # What spells the end of a document is one in transformers, as with GPT-2's own; never in prepared data.
    assert ours.end_of_document in theirs(TEXT)["input_ids"]
    assert ours.end_of_document not in ours.encode(TEXT).tolist()


@pytest.mark.parametrize("name", MODELS)
def test_memory_counts_the_parameters_of_the_model(name):
    run = run_of(MODELS[name])
    model = build_model(run)
    groups = param_groups(model, 0.1)
    assert [sorted(p.numel() for p in group["params"]) for group in groups] == [sorted(g) for g in of_model(run.model)]
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n)
    matrices -= sum(p.numel() for n, p in model.named_parameters() if "wpe" in n)  # looked up, not multiplied
    attention = 12 * run.model.layers * run.model.hidden * run.model.sequence
    assert flops_per_token(run.model) == 6 * matrices + attention


def test_documents_do_not_see_each_other():
    ids = torch.tensor([[5, 6, 9, 7, 9, 9, 1]])
    visible, positions = documents(ids, 9)
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0, 0]]
    expected = torch.block_diag(*(torch.ones(n, n).tril() for n in (3, 2, 1, 1))).bool()
    assert torch.equal(visible[0, 0], expected)


@pytest.mark.parametrize("name", MODELS)
def test_masked_documents_are_as_if_alone(name):
    model = build_model(run_of(MODELS[name])).eval()
    generator = torch.Generator().manual_seed(2)
    parts = [torch.cat((torch.randint(0, 250, (n,), generator=generator), torch.tensor([256]))) for n in (7, 1, 9)]
    packed = torch.cat(parts)[None]
    with torch.no_grad():
        together = model(**inputs_of(F.pad(packed, (0, 1)), 256)).logits[0]
        alone = torch.cat([model(input_ids=part[None]).logits[0] for part in parts])
        unmasked = model(input_ids=packed).logits[0]
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    assert (unmasked - alone).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_evaluation_takes_every_token_of_a_text_once(kind, data):
    one = held({"kind": kind}, directory=str(data / "data"), document_mask=kind == "llama")
    documents = [json.loads(line)["text"] for line in (data / "text.jsonl").read_text().splitlines()]
    found = inference.evaluate_text(one, tokenizers.Bytes(), [data / "text.jsonl"])
    stream = np.concatenate([[*text.encode(), 256] for text in documents])
    assert found.tokens == len(stream) - 1
    assert found.size == sum(map(len, documents))
    assert found.bits_per_byte == pytest.approx(found.nats * found.tokens / np.log(2) / found.size)
    # One window at a time, by hand.
    model, total = one.model(), 0.0
    for first in range(0, len(stream) - 1, 24):
        tokens = torch.tensor(stream[first : first + 25])[None]
        with torch.no_grad():
            logits = model(**inputs_of(tokens, 256 if kind == "llama" else None)).logits
        total += float(next_token_loss(logits, tokens)) * (tokens.shape[1] - 1)
    assert found.nats == pytest.approx(total / found.tokens, rel=1e-5)
    prepared = inference.evaluate_prepared(one, data / "data", "valid", 16)
    assert prepared.tokens == 16 * 24
    assert prepared.bits_per_byte is None
    moved = held({"kind": kind}, directory="nowhere", document_mask=kind == "llama")
    assert inference.evaluate_prepared(moved, data / "data", "valid", 16) == prepared
    compressed = data / "text.jsonl.gz"
    compressed.write_bytes(gzip.compress((data / "text.jsonl").read_bytes()))
    assert inference.evaluate_text(one, tokenizers.Bytes(), [compressed]) == found


def test_evaluation_needs_a_text(tmp_path):
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match=r"there is no text in .*blank.jsonl"):
        inference.evaluate_text(held({}), tokenizers.Bytes(), [tmp_path / "blank.jsonl"])


def test_generation_repeats_stays_in_the_vocabulary_and_has_room():
    one = held({"kind": "llama", "kv_heads": 2})
    asked = {"tokens": 100, "temperature": 1.5, "seed": 4}
    said = inference.generate(one, tokenizers.Bytes(), "In the", **asked)
    assert said.startswith("In the")
    assert said == inference.generate(one, tokenizers.Bytes(), "In the", **asked)
    assert said != inference.generate(one, tokenizers.Bytes(), "In the", **{**asked, "seed": 5})
    likeliest = inference.generate(one, tokenizers.Bytes(), "In the", tokens=2, temperature=0)
    ids = torch.tensor([[*b"In the"]])
    for _ in range(2):
        with torch.no_grad():
            ids = torch.cat((ids, one.model()(input_ids=ids).logits[:, -1:, :257].argmax(-1)), dim=1)
    assert likeliest == tokenizers.Bytes().decode(ids[0].tolist())
    with pytest.raises(ValueError, match=r"the prompt has 24 tokens, and the model's sequence is 24"):
        inference.generate(one, tokenizers.Bytes(), "x" * 24, tokens=1)


REFUSED = {
    "kv_heads of gpt2": ({"kv_heads": 2}, r"model.kv_heads=2 is for model.kind: llama"),
    "groups": ({"kind": "llama", "kv_heads": 3}, r"model.heads=4 must be a multiple of model.kv_heads=3"),
    "odd heads": ({"kind": "llama", "hidden": 12}, r"model.hidden=12 / model.heads=4 = 3 must be even"),
    "kind": ({"kind": "mamba"}, r"model.kind='mamba' is not one of gpt2, llama"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be(name):
    model, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        run_of(model)


COMMANDS = {
    "no run": (["export", "nowhere"], "nowhere has no checkpoint: give the directory of a run"),
    "two prompts": (["generate", "nowhere", "one", "two"], "'two' is one word too many; put a text in quotes"),
    "tokens": (["generate", "nowhere", "one", "--tokens", "0"], "--tokens 0 must be a number between 1 and 2**31 - 1"),
    "seed": (["generate", "nowhere", "one", "--seed", "9" * 30], f"--seed {'9' * 30} must be a number between 0 and"),
    "format": (["export", "nowhere", "--to", "gguf"], "argument --to: invalid choice: 'gguf'"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_that_cannot_be(name):
    arguments, message = COMMANDS[name]
    with pytest.raises(SystemExit, match=re.escape(message)) as ended:
        cli.main(arguments, "alto")
    assert ended.value.code == 2
