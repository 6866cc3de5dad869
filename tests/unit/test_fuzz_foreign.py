"""Files of other programs, damaged or made up: tokenizers, DeepSpeed's checkpoints, indexes of torch's checkpoints."""

import itertools
import json
import pickle
import time
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("deepspeed")
pytest.importorskip("tokenizers")

from alto_distributed import ALTO
from alto_distributed.deepspeed import loadable, universal
from alto_distributed.pretrain.checkpoint import safe_load
from alto_distributed.pretrain.data import tokenizer
from tests.helpers.cases import EXHAUSTIVE
from tests.helpers.fuzz import cases, damaged, documented, json_values, mutated

# -- tokenizers --------------------------------------------------------------------------------------------

TEXTS = ["the cat sat on the mat", "the dog ate the log", "na\u00efve caf\u00e9 \u65e5\u672c\u8a9e"] * 5


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / tokenizer.SAVED_AS
    tokenizer.train(TEXTS, 300).save(path)
    return path.read_bytes()


def used(words):
    """Encode and decode with whatever was loaded."""
    ids = words.encode("the cat\u2603")
    assert ids.size == 0 or (ids.min() >= 0 and ids.max() < words.size)
    return words.decode(ids)


@cases(60)
@given(data=st.data())
def test_a_tokenizer_of_any_content(data, trained, tmp_path):
    whole = json.loads(trained)
    ways = (
        damaged(trained) | st.binary(max_size=60) | (mutated(whole) | json_values).map(lambda v: json.dumps(v).encode())
    )
    (tmp_path / tokenizer.SAVED_AS).write_bytes(data.draw(ways))
    words, refusal = documented(lambda: tokenizer.load(tmp_path / tokenizer.SAVED_AS))
    if refusal is None:
        used(words)


def pretrained_ones():
    """Contents of tokenizer.json of four kinds."""
    library = pytest.importorskip("tokenizers")
    letters = {letter: number for number, letter in enumerate(["[UNK]", "[SEP]", *"abcdeghinostu", "the"])}
    models = (
        library.models.Unigram([(letter, -1.0 - number) for letter, number in letters.items()], 0),
        library.models.WordPiece(letters, unk_token="[UNK]"),
        library.models.WordLevel(letters, unk_token="[UNK]"),
        library.models.BPE(letters, [], unk_token="[UNK]"),
    )
    found = []
    for model in models:
        words = library.Tokenizer(model)
        words.pre_tokenizer = library.pre_tokenizers.Whitespace()
        words.add_special_tokens(["[SEP]"])
        found.append(words.to_str().encode())
    return found


@cases(80)
@given(data=st.data())
def test_any_tokenizer_json_is_used_or_refused(data, tmp_path):
    """Also one that reads well and has no answer to a text."""
    whole = data.draw(st.sampled_from(pretrained_ones()))
    ways = damaged(whole) | (mutated(json.loads(whole)) | json_values).map(lambda v: json.dumps(v).encode())
    (tmp_path / tokenizer.SAVED_AS).write_bytes(data.draw(ways | st.just(whole)))
    documented(lambda: used(tokenizer.pretrained(tmp_path / tokenizer.SAVED_AS)))


@cases(60)
@given(data=st.data())
def test_vocabulary_and_merges_of_any_content(data, trained, tmp_path):
    model = json.loads(trained)["model"]
    vocabulary = json.dumps(model["vocab"]).encode()
    merges = "\n".join(["#version: 0.2", *(m if isinstance(m, str) else " ".join(m) for m in model["merges"])]).encode()
    ways = damaged(vocabulary) | mutated(model["vocab"]).map(lambda v: json.dumps(v).encode()) | st.just(vocabulary)
    (tmp_path / "vocab.json").write_bytes(data.draw(ways))
    (tmp_path / "merges.txt").write_bytes(data.draw(damaged(merges) | st.binary(max_size=60) | st.just(merges)))
    words, refusal = documented(lambda: tokenizer.from_files(tmp_path / "vocab.json", tmp_path / "merges.txt"))
    if refusal is None:
        used(words)


@pytest.mark.parametrize("word", ["a" * 2_000_000, "abcdefghij" * 200_000, "\u00e9" * 1_000_000, " " * 2_000_000])
def test_a_word_of_two_megabytes_takes_seconds(word):
    """Training on it was not done after 200 s: each merge went through all of it."""
    began = time.process_time()
    words = tokenizer.train([*TEXTS, word, *TEXTS], 400)
    assert words.size == tokenizer.train([*TEXTS, *TEXTS], 400).size  # what it is left out of
    assert words.decode(words.encode(word[:50_000])) == word[:50_000]  # and it can be encoded
    assert time.process_time() - began < 60


def test_a_tokenizer_of_many_merges_takes_seconds(trained, tmp_path):
    """A million of them with EXHAUSTIVE=1: 8 CPU seconds to load, and 1.5 for a word of 2 MB."""
    whole, wanted = json.loads(trained), 10**6 if EXHAUSTIVE else 10**5
    vocabulary, merges = whole["model"]["vocab"], whole["model"]["merges"]
    letters = sorted(vocabulary, key=vocabulary.get)[:256]
    for parts in itertools.chain(itertools.product(letters, repeat=2), itertools.product(letters, repeat=3)):
        first, last = "".join(parts[:-1]), parts[-1]
        if first + last not in vocabulary and first in vocabulary:
            vocabulary[first + last] = len(vocabulary)
            merges.append([first, last])
        if len(merges) >= wanted:
            break
    path = tmp_path / tokenizer.SAVED_AS
    path.write_text(json.dumps(whole))
    began = time.process_time()
    words = tokenizer.load(path)
    assert words.size > wanted
    for word in ("abcdefghij" * 200_000, "\u00e9" * 1_000_000) if EXHAUSTIVE else ("abcdefghij" * 20_000,):
        assert words.decode(words.encode(word)) == word
    assert time.process_time() - began < 60


def test_few_long_words_are_trained_on():
    words = tokenizer.train([*TEXTS, "abcdefghij" * 20], 400)
    assert words.encode("abcdefghij" * 20).size < 30


# -- indexes of torch.distributed.checkpoint ---------------------------------------------------------------


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there is one process
        dcp.save({"x": torch.ones(3), "y": {"z": torch.zeros(2, 2)}, "step": 3}, checkpoint_id=folder)
    return (folder / ".metadata").read_bytes()


@cases(150)
@given(data=st.data())
def test_an_index_of_any_content(data, index, tmp_path):
    """Nothing but values comes out of it, and no file elsewhere; or what is wrong, in a line."""
    path = tmp_path / ".metadata"
    path.write_bytes(data.draw(damaged(index) | st.binary(max_size=60) | json_values.map(pickle.dumps)))
    problem = safe_load._problem(path)
    if problem is not None:
        assert problem.startswith(".metadata (")
        assert "\n" not in problem
        return
    for info in pickle.loads(path.read_bytes()).storage_data.values():
        assert not info.relative_path.startswith("/")
        assert ".." not in info.relative_path.split("/")


# -- checkpoints of DeepSpeed, for the converter ------------------------------------------------------------

STATE = {"step": 3.0, **{name: torch.ones(6) for name in ("exp_avg", "exp_avg_sq", "grad_ema")}}
OPTIMIZER = {
    "optimizer_state_dict": {
        "zero_stage": 2,
        "base_optimizer_state": {"state": {0: STATE}, "param_groups": [{"params": [0], "alpha": -5.0, "lr": 0.1}]},
        "single_partition_of_fp32_groups": [torch.ones(6)],
        "partition_count": 1,
        "group_paddings": [0],
        "param_slice_mappings": [{}],
    },
    "ds_config": {"zero_optimization": {"stage": 2}},
    "ds_version": "0.19.8",
}
MODEL = {
    "module": {"w": torch.ones(2, 3)},
    "param_shapes": [{"w": [2, 3]}],
    "ds_config": {"zero_optimization": {"stage": 2}},
    "universal_checkpoint_info": {},
}


@cases(40)
@given(data=st.data())
def test_a_checkpoint_of_any_content_is_converted_or_refused(data, tmp_path_factory):
    source = tmp_path_factory.mktemp("saved")
    target = source / "universal"
    for name, content in (
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", OPTIMIZER),
        ("mp_rank_00_model_states.pt", MODEL),
    ):
        torch.save(data.draw(mutated(content) | st.just(content) | json_values), source / name)
        if data.draw(st.booleans()):
            (source / name).write_bytes(data.draw(damaged((source / name).read_bytes())))
    _, refusal = documented(lambda: universal.convert(source, target))
    if refusal is not None:
        assert str(source) in refusal or "checkpoint" in refusal
        assert not target.exists() or not list(target.iterdir())
        assert not (source / "latest_universal").exists()


# -- universal checkpoints, for an engine that loads one ------------------------------------------------------

GROUPS = [{"params": [], "alpha": -5.0, "lr": 0.1}]
GLOBALS = {
    "stage 2": {"zero_stage": 2, "loss_scaler": None, "param_groups": GROUPS},
    "stage 3": {
        "zero_stage": 3,
        "optimizer_state_dict": {"state": {0: {"step": 3.0}}, "param_groups": GROUPS},
        "param_groups": GROUPS,
    },
}


def looked_at(zero):
    """What is done with the globals of a universal checkpoint before anything of it is loaded."""
    saved = loadable.saved_globals(zero)
    groups = ALTO([torch.nn.Parameter(torch.ones(3))]).param_groups
    loadable._refuse_groups(groups, saved["param_groups"], "ALTO")
    loadable.needed_states(groups[0], saved["param_groups"][0])
    return saved


def test_the_globals_of_a_universal_checkpoint_are_read(tmp_path):
    for content in GLOBALS.values():
        torch.save(content, tmp_path / "optimizer_state.pt")
        assert looked_at(tmp_path) == content
    adopted = {"param_groups": [{"params": []}, {"params": []}]}
    torch.save(adopted, tmp_path / "optimizer_state.pt")
    assert looked_at(tmp_path) == adopted


@pytest.mark.parametrize(
    "content",
    [
        *([1], {}, 3, {"param_groups": None}, {"param_groups": []}, {"param_groups": [1]}, {"param_groups": {0: {}}}),
        *({"param_groups": [{1: 2}]}, {"param_groups": [{"alpha": torch.ones(2)}]}),
        *({**GLOBALS["stage 3"], "optimizer_state_dict": wrong} for wrong in (None, {}, {"param_groups": GROUPS})),
    ],
)
def test_the_globals_of_a_universal_checkpoint_that_are_none(content, tmp_path):
    torch.save(content, tmp_path / "optimizer_state.pt")
    _, refusal = documented(lambda: looked_at(tmp_path))
    assert f"{tmp_path / 'optimizer_state.pt'} is damaged (" in refusal


@cases(60)
@given(data=st.data())
def test_globals_of_a_universal_checkpoint_of_any_content(data, tmp_path):
    path = tmp_path / "optimizer_state.pt"
    content = GLOBALS[data.draw(st.sampled_from(sorted(GLOBALS)))]
    old = data.draw(st.booleans())
    torch.save(data.draw(mutated(content) | json_values), path, _use_new_zipfile_serialization=not old)
    if data.draw(st.booleans()):
        path.write_bytes(data.draw(damaged(path.read_bytes())))
    documented(lambda: looked_at(tmp_path))
