"""Data for pretraining: text to token files and back, whatever interrupts it, and the order in which they are read."""

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alto_distributed.pretrain.data import (
    Samples,
    command,
    cuts,
    files,
    indexed,
    samples,
    sources,
    splits,
    token_shards,
    tokenizer,
)
from alto_distributed.pretrain.data import prepare as preparing
from alto_distributed.pretrain.data.cuts import ByteRange
from alto_distributed.pretrain.data.permutation import Permutation
from alto_distributed.pretrain.data.prepare import prepare
from alto_distributed.pretrain.data.sources import Bad, Lines, Source
from tests.helpers.launcher import REPO

HALVES = ("1/2", "1/4", "1/4")
ODD = ["", "plain", "two\nlines\r\n", "<|endoftext|>", "naïve 日本語 🜁 \x00", "  spaces \n\n\t", "it's we'll\n's"]


def write_json_lines(path, texts):
    path.write_text("".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts)))
    return path


@pytest.fixture(scope="session")
def texts():
    numbers = np.random.default_rng(0)
    return ODD + [" ".join(f"word{n}" for n in numbers.integers(0, 30, size=20)) + f" {i}\n" for i in range(150)]


@pytest.fixture(scope="session")
def corpus(texts, tmp_path_factory):
    return write_json_lines(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", texts)


@pytest.fixture(scope="session")
def prepared(corpus, tmp_path_factory):
    """Not to be changed: 1 worker, never interrupted."""
    output = tmp_path_factory.mktemp("prepared")
    prepare(output, [corpus], kind="bytes", split=HALVES, chunk_bytes=700)
    return output


@pytest.fixture(scope="session")
def gpt2_files(texts, tmp_path_factory):
    """A small tokenizer in the form of GPT-2's."""
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.train(texts, 300)._library.model.save(str(directory))
    vocabulary = json.loads((directory / "vocab.json").read_text())
    (directory / "vocab.json").write_text(json.dumps({**vocabulary, "<|endoftext|>": len(vocabulary)}))
    return directory


def contents(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def documents_of(directory, split):
    """As Megatron's own reader sees them."""
    IndexedDataset = pytest.importorskip("megatron.core.datasets.indexed_dataset").IndexedDataset

    words = files.open_tokenizer(directory)
    dataset = IndexedDataset(str(directory / split), multimodal=False, mmap=True)
    assert len(dataset.document_indices) == len(dataset) + 1
    tokens = [dataset[i] for i in range(len(dataset))]
    assert all(t[-1] == words.end_of_document and words.end_of_document not in t[:-1] for t in tokens)
    return [words.decode(t) for t in tokens]


def whole_order(texts, seed=preparing.DEFAULT_SEED, split=HALVES):
    chosen = splits.assign(0, len(texts), seed, splits.shares(split))
    return {name: [t for t, c in zip(texts, chosen, strict=True) if c == i] for i, name in enumerate(files.SPLITS)}


# Text to tokens and back


@pytest.mark.parametrize("kind", ["bytes", "bpe", "files"])
def test_every_document_comes_back_from_megatrons_reader_in_one_split(kind, corpus, texts, gpt2_files, tmp_path):
    kind = str(gpt2_files) if kind == "files" else kind
    manifest = prepare(tmp_path, [corpus], kind=kind, vocabulary=300, split=HALVES, chunk_bytes=999).manifest
    assert {name: documents_of(tmp_path, name) for name in files.SPLITS} == whole_order(texts)
    counts = manifest["splits"].values()
    assert sum(c["documents"] for c in counts) == manifest["inputs"][0]["documents"] == len(texts)
    assert sum(c["tokens"] for c in counts) == manifest["inputs"][0]["tokens"]
    assert all(len(files.open_tokens(tmp_path, name)) == manifest["splits"][name]["tokens"] for name in files.SPLITS)
    assert manifest["dtype"] == "uint16"


def test_the_saved_tokenizer_gives_the_ids_of_the_original_files(texts, gpt2_files, corpus, tmp_path):
    from tokenizers.implementations import ByteLevelBPETokenizer

    prepare(tmp_path, [corpus], kind=str(gpt2_files), split=HALVES)
    theirs = ByteLevelBPETokenizer.from_file(str(gpt2_files / "vocab.json"), str(gpt2_files / "merges.txt"))
    ours = files.open_tokenizer(tmp_path)
    for text in texts:
        assert ours.encode(text).tolist() == theirs.encode(text).ids


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=st.sampled_from("ab \n\t'sé\u180e\u200b\u2028\x1c\x85.1")), st.integers(0, 5))
def test_a_text_cut_into_pieces_has_the_same_tokens(text, size):
    bpe = trained_on_little()
    cut = list(tokenizer.pieces(text, size))
    assert "".join(cut) == text
    assert [i for piece in cut for i in bpe._library.encode(piece).ids] == bpe._library.encode(text).ids


_little = []


def trained_on_little():
    if not _little:
        _little.append(tokenizer.train(["a b\n\n  a's bs.\n\n\n\n  \n \t\n"] * 9, 280))
    return _little[0]


def test_a_trained_tokenizer_has_the_asked_for_size_with_the_end_of_a_document(texts):
    bpe = tokenizer.train(texts, 290)
    assert (bpe.size, bpe.end_of_document) == (290, 289)


def test_gpt2_is_found_in_tiktokens_cache_checked_and_never_downloaded(gpt2_files, tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    monkeypatch.setattr(tokenizer.tempfile, "gettempdir", lambda: str(tmp_path / "none"))
    with pytest.raises(
        ValueError, match="not in tiktoken's cache.*get .*encoder.json and .*vocab.bpe into a directory"
    ):
        tokenizer.files_of("gpt2")
    address = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
    for theirs, ours in {"encoder.json": "vocab.json", "vocab.bpe": "merges.txt"}.items():
        cached = tmp_path / hashlib.sha1((address + theirs).encode()).hexdigest()
        cached.write_bytes((gpt2_files / ours).read_bytes())
    with pytest.raises(ValueError, match="is damaged; remove it"):
        tokenizer.files_of("gpt2")
    for theirs, ours in {"encoder.json": "vocab.json", "vocab.bpe": "merges.txt"}.items():
        monkeypatch.setitem(tokenizer._GPT2, theirs, sources.checksum(gpt2_files / ours))
    assert tokenizer.from_files(*tokenizer.files_of("gpt2")).size == len(
        json.loads((gpt2_files / "vocab.json").read_text())
    )


def test_the_standard_library_is_a_corpus_without_tests_or_packages():
    names = [source.name for source in sources.stdlib()]
    assert {"stdlib/argparse.py", "stdlib/json/decoder.py"} <= set(names)
    assert len(names) > 300
    assert not [name for name in names if re.search(r"/(tests?|site-packages|idle_test)/", name)]


# Input that is not as it should be


def test_bad_lines_are_counted_with_their_numbers_and_lose_nothing_else(tmp_path, capsys):
    good = [f"good {n}" for n in range(40)]
    lines = [json.dumps({"text": text}).encode() for text in good]
    bad = {
        3: (b'{"text": "cut', "not JSON"),
        4: (b"", None),  # a blank line is not a bad one
        9: (b'{"text": "\xff\xfe"}', "not UTF-8"),
        20: (b'{"words": 1}', 'no "text"'),
        21: (b"[1]", 'no "text"'),
        30: (b'{"text": null}', '"text" is not a string'),
        31: (b'{"text": "\\ud800"}', '"text" has half a surrogate pair'),
        32: (b"[" * 20000, "not JSON"),
        33: (b'{"text": ' + b"1" * 5000 + b"}", "not JSON"),
    }
    for number, (line, _) in bad.items():
        lines.insert(number - 1, line)
    path = tmp_path / "some.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines))
    options = ["--output", str(tmp_path / "out"), "--tokenizer", "bytes", "--split", "1/2,1/4,1/4", "--workers", "1"]
    run_command([str(path), *options])
    said = capsys.readouterr()
    about = files.read_manifest(tmp_path / "out")["inputs"][0]
    expected = [{"line": number, "why": why} for number, (_, why) in bad.items() if why]
    assert about["first_bad_lines"] == expected
    assert about["bad_lines"] == len(expected)
    assert "some.jsonl: 8 bad lines left out (line 3: not JSON; line 9: not UTF-8; line 20" in said.err
    assert {name: documents_of(tmp_path / "out", name) for name in files.SPLITS} == whole_order(good)
    run_command([str(path), *options])
    assert capsys.readouterr().out.startswith("already prepared")
    cut = prepare(tmp_path / "cut", [path], kind="bytes", split=HALVES, chunk_bytes=300).manifest
    assert cut == files.read_manifest(tmp_path / "out")


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(['{"text": "a"}', '{"text": "longer than a chunk"}', "", "bad", '{"text": ""}'])),
    st.booleans(),
    st.integers(1, 60),
)
def test_documents_and_line_numbers_do_not_depend_on_where_a_file_is_cut(tmp_path_factory, lines, newline, size):
    path = tmp_path_factory.getbasetemp() / "cut.jsonl"
    path.write_text("\n".join(lines) + "\n" * newline)
    found = [Source("cut", str(path), True, path.stat().st_size), Source("again", str(path), True, path.stat().st_size)]
    whole, cut = ([list(), list()] for _ in range(2))
    for number, source in enumerate(found):
        whole[number] = list(sources.read(source, ByteRange(number, 0, source.size), Lines()))
    before = [0, 0]
    for chunk in cuts.chunks(found, size):
        for span in chunk:
            lines_read = Lines()
            for got in sources.read(found[span.source], span, lines_read):
                shifted = Bad(got.line + before[span.source], got.why) if isinstance(got, Bad) else got
                cut[span.source].append(shifted)
            before[span.source] += lines_read.read
    assert cut == whole


def test_a_directory_is_read_by_name_and_says_what_it_left_out(tmp_path, capsys):
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    for name in ("b.txt", "a.py", "sub/c.md"):
        (folder / name).write_text(f"I am {name}\r\n")
    (folder / "latin.txt").write_bytes("fine\nna\u00efve".encode("latin-1"))
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / ".hidden.txt").write_text("no")
    write_json_lines(folder / "d.jsonl", ["one", "two"])
    run_command([str(folder), "--output", str(tmp_path / "out"), "--tokenizer", "bytes", "--split", "1,0,0", "--quiet"])
    assert documents_of(tmp_path / "out", "train") == [
        "I am a.py\r\n",
        "I am b.txt\r\n",
        "one",
        "two",
        "I am sub/c.md\r\n",
    ]
    said = capsys.readouterr().err
    assert "in/latin.txt: 1 bad lines left out (line 2: the file is not UTF-8)" in said
    assert "in/picture.png" in said
    with pytest.raises(ValueError, match="no valid split: it was prepared with a share of 0"):
        Samples(tmp_path / "out", "valid", 4, 300)


def bad_tokenizer(directory, vocabulary):
    directory.mkdir()
    (directory / "vocab.json").write_text(vocabulary)
    (directory / "merges.txt").write_text("#version: 0.2\n")
    return str(directory)


REFUSALS = {
    "the input .*nowhere does not exist": lambda d: {"inputs": [d / "nowhere"]},
    "input is empty: every file": lambda d: {"inputs": [d / "empty.txt"]},
    "nothing to read in": lambda d: {"inputs": [d / "folder"]},
    "is given twice": lambda d: {"inputs": [d, d / "blank.jsonl"]},
    "no documents in the input: all its lines are blank": lambda d: {"inputs": [d / "blank.jsonl"]},
    "no documents in the input: .*bad.jsonl line 2: not JSON": lambda d: {"inputs": [d / "bad.jsonl"]},
    "'gtp2' is unknown; did you mean 'gpt2'": lambda d: {"kind": "gtp2"},
    "vocabulary file .*vocab.json does not exist": lambda d: {"kind": str(d / "folder")},
    "lacks 255 of the 256 bytes": lambda d: {"kind": bad_tokenizer(d / "a", '{"a": 0}')},
    "are not a BPE's vocabulary and merges": lambda d: {"kind": bad_tokenizer(d / "b", "[")},
    "vocabulary=256 must lie between 257": lambda d: {"kind": "bpe", "vocabulary": 256},
    "sum to 0.99 and should sum to 1": lambda d: {"split": ("0.97", "0.01", "0.01")},
    "a share above 1": lambda d: {"split": ("0.5", "0.5", "1e400")},  # was an OverflowError
    "should be three shares": lambda d: {"split": ("1", "0")},
    "should be three shares for": lambda d: {"split": ("1.5", "-0.5", "0")},
    "leaves nothing for training": lambda d: {"split": (0, 0.5, 0.5)},
    "of 2 documents none fell to": lambda d: {"split": (0.98, 0.01, 0.01)},
    "seed=-1 must lie": lambda d: {"seed": -1},
    "workers=0": lambda d: {"workers": 0},
    "two.jsonl/out cannot be written": lambda d: {"output": d / "two.jsonl" / "out"},
}


@pytest.mark.parametrize("message", REFUSALS)
def test_what_cannot_be_prepared_is_refused_with_a_reason(message, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "bad.jsonl").write_text("\nno\n")
    two = write_json_lines(tmp_path / "two.jsonl", ["one", "two"])
    output = tmp_path / "out"
    with pytest.raises(ValueError, match=message):
        prepare(**{"output": output, "inputs": [two], "kind": "bytes", **REFUSALS[message](tmp_path)})
    assert not (output / files.MANIFEST).exists()
    prepare(output, [two], kind="bytes", split=(1, 0, 0))  # and the next attempt is not in its way


def test_tokens_that_do_not_fit_are_refused_not_wrapped(tmp_path):
    assert [indexed.token_dtype(n).name for n in (257, 65499, 65500, 2**31 - 1)] == [
        "uint16",
        "uint16",
        "int32",
        "int32",
    ]
    with pytest.raises(ValueError, match="does not fit into int32"):
        indexed.token_dtype(2**31)
    writer = indexed.Writer(tmp_path / "x", np.dtype(np.uint16))
    with pytest.raises(ValueError, match="token 65536 does not fit into uint16"):
        writer.add(np.array([1, 65536]))
    with pytest.raises(ValueError, match="token -1 does not fit into uint16"):
        writer.add(np.array([-1, 3]))


#: Documents whose index is easy to get wrong: none, one, empty ones at each place, the largest tokens, many.
LAYOUTS = {
    "none": [],
    "one": [[1, 2, 3]],
    "empty": [[]],
    "empty in between": [[], [5], [], [], [6, 7], []],
    "largest": [[0, 65534], [65535]],
    "many": [list(range(n % 7)) for n in range(1000)],
}


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_files_are_those_of_megatrons_builder_byte_for_byte(layout, dtype, tmp_path):
    builder = pytest.importorskip("megatron.core.datasets.indexed_dataset").IndexedDatasetBuilder
    theirs = builder(str(tmp_path / "theirs.bin"), dtype=dtype)
    ours = indexed.Writer(tmp_path / "ours.x", np.dtype(dtype))  # a prefix may have a dot
    documents = [np.array(document, dtype=np.int64) for document in LAYOUTS[layout]]
    for document in documents:
        theirs.add_document(document, [document.size])
        ours.add(document)
    theirs.finalize(str(tmp_path / "theirs.idx"))
    ours.close()
    for end in ("bin", "idx"):
        assert (tmp_path / f"ours.x.{end}").read_bytes() == (tmp_path / f"theirs.{end}").read_bytes()
    assert (ours.documents, ours.tokens) == (len(documents), sum(document.size for document in documents))


def test_preparing_imports_no_framework(corpus, tmp_path):
    """Writing an index took megatron-core, and minutes of downloads."""
    blocked = ["megatron", "megatron.core", "deepspeed", "transformers", "triton"]
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked}))\n"
        "from alto_distributed.pretrain.data.prepare import prepare\n"
        f"prepare({str(tmp_path)!r}, [{str(corpus)!r}], kind='bytes', split={HALVES!r})"
    )
    subprocess.run([sys.executable, "-c", program], cwd=REPO, check=True)
    assert (tmp_path / files.MANIFEST).exists()


# Workers and interruptions


def run_command(arguments):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    command.main(parser.parse_args(arguments))


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_two_workers_and_another_cut_write_the_same_bytes(kind, corpus, prepared, tmp_path):
    options = dict(kind=kind, vocabulary=280, split=HALVES)
    prepare(tmp_path / "two", [corpus], **options, workers=2, chunk_bytes=5000)
    if kind != "bytes":
        prepare(prepared := tmp_path / "one", [corpus], **options, chunk_bytes=700)
    assert contents(tmp_path / "two") == contents(prepared)


def killed(output, corpus, *, part=None, rename=None):
    """Start in another process, which kills itself after so many parts or so many files in their place."""
    if (child := os.fork()) == 0:
        try:
            for module, name, limit in ((token_shards, "_make", part), (preparing.output_dir, "publish", rename)):
                if limit is not None:
                    kill_in(module, name, limit)
            prepare(output, [corpus], kind="bytes", split=HALVES, chunk_bytes=700)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def kill_in(module, name, limit):
    original, calls = getattr(module, name), []

    def make(*arguments):
        if len(calls) == limit:
            os.kill(os.getpid(), signal.SIGKILL)
        calls.append(original(*arguments))

    def publish(folder, output, names, manifest):
        original(folder, output, names[:limit], manifest={})
        (output / files.MANIFEST).unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(module, name, {"_make": make, "publish": publish}[name])


def test_a_killed_run_is_not_complete_and_goes_on_where_it_was(corpus, prepared, tmp_path, monkeypatch):
    killed(tmp_path, corpus, part=5)
    assert len(list((tmp_path / files.UNFINISHED).glob("part-*.npz"))) == 5
    with pytest.raises(ValueError, match="was interrupted; run the same command again"):
        Samples(tmp_path, "train", 8, 300)
    with pytest.raises(ValueError, match="interrupted preparation of other input"):
        prepare(tmp_path, [REPO / "pyproject.toml"], kind="bytes", split=HALVES, chunk_bytes=700)
    killed(tmp_path, corpus, rename=3)
    assert (tmp_path / "train.bin").exists()
    assert not (tmp_path / files.MANIFEST).exists()
    monkeypatch.setattr(token_shards, "_make", lambda *_: pytest.fail("a part was made twice"))
    prepare(tmp_path, [corpus], kind="bytes", split=HALVES, chunk_bytes=700)
    assert contents(tmp_path) == contents(prepared)


@pytest.mark.parametrize(
    "content", [b"", b"PK\x05\x06" + b"\0" * 18, b"no archive"], ids=["empty", "no arrays", "text"]
)
def test_a_damaged_part_of_an_interrupted_run_is_named(content, corpus, prepared, tmp_path):
    """It was a traceback of zipfile."""
    killed(tmp_path, corpus, part=5)
    damaged = tmp_path / files.UNFINISHED / "part-0000002.npz"
    damaged.write_bytes(content)
    with pytest.raises(ValueError, match=r"part-0000002.npz is damaged .* remove it and run the same command again"):
        prepare(tmp_path, [corpus], kind="bytes", split=HALVES, chunk_bytes=700)
    damaged.unlink()
    prepare(tmp_path, [corpus], kind="bytes", split=HALVES, chunk_bytes=700)
    assert contents(tmp_path) == contents(prepared)


def test_a_damaged_request_of_an_interrupted_run_is_refused(corpus, prepared, tmp_path):
    killed(tmp_path, corpus, part=5)
    (tmp_path / files.UNFINISHED / "request.json").write_text("{")
    with pytest.raises(ValueError, match="holds an interrupted preparation of other input"):
        prepare(tmp_path, [corpus], kind="bytes", split=HALVES, chunk_bytes=700)
    prepare(tmp_path, [corpus], kind="bytes", split=HALVES, chunk_bytes=700, force=True)
    assert contents(tmp_path) == contents(prepared)


def test_parts_of_other_input_are_not_used_even_when_forced(corpus, texts, tmp_path):
    killed(tmp_path / "out", corpus, part=5)
    other = write_json_lines(tmp_path / "other.jsonl", texts[::-1])
    prepare(tmp_path / "out", [other], kind="bytes", split=(1, 0, 0), chunk_bytes=700, force=True)
    assert documents_of(tmp_path / "out", "train") == texts[::-1]


KILLED_WITH_WORKERS = """
import multiprocessing, os, signal, sys
from alto_distributed.pretrain.data import prepare, token_shards
make = token_shards.make
def make_one(work, workers):
    for number in make(work, workers):
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    token_shards.make = make_one
    prepare.prepare(sys.argv[1], [sys.argv[2]], kind="bytes", split=("1/2", "1/4", "1/4"), chunk_bytes=700, workers=2)
"""


def test_workers_end_with_a_killed_parent_and_their_parts_are_used(corpus, prepared, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(KILLED_WITH_WORKERS)
    output = tmp_path / "out"
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [sys.executable, script, output, corpus], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    workers = [int(pid) for pid in done.stdout.split()]
    assert len(workers) == 2
    deadline = time.monotonic() + 30
    while any(map(is_running, workers)):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)
    prepare(output, [corpus], kind="bytes", split=HALVES, chunk_bytes=700)
    assert contents(output) == contents(prepared)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_prepared_directory_is_kept_unless_forced(corpus, tmp_path, monkeypatch):
    options = dict(kind="bytes", split=HALVES)
    assert not prepare(tmp_path, [corpus], **options).was_there
    first = contents(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(preparing.output_dir, "unfinished", lambda *_: pytest.fail("prepared again"))
        assert prepare(tmp_path, [corpus], **options, workers=2, chunk_bytes=99).was_there
        with pytest.raises(ValueError, match="prepared otherwise: seed is 1234 there and 7 now.*--force"):
            prepare(tmp_path, [corpus], **options, seed=7)
        other = write_json_lines(tmp_path.parent / corpus.name, ["other"])
        with pytest.raises(ValueError, match="the input files are not the same"):
            prepare(tmp_path, [other], **options)
    assert contents(tmp_path) == first
    prepare(tmp_path, [corpus], **options, seed=7, force=True)
    assert documents_of(tmp_path, "test") == whole_order([*map(json_text, corpus.open())], seed=7)["test"]
    (tmp_path / files.MANIFEST).unlink()
    with pytest.raises(ValueError, match="train.bin exists and was not prepared here"):
        prepare(tmp_path, [corpus], **options)


def json_text(line):
    return json.loads(line)["text"]


def test_only_one_process_writes_to_a_directory(corpus, tmp_path):
    with (
        preparing.output_dir.unfinished(tmp_path, {}, False),
        pytest.raises(ValueError, match="another process is preparing"),
    ):
        prepare(tmp_path, [corpus], kind="bytes", split=HALVES)


# The order of reading


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 2**40))
def test_a_permutation_is_one_to_one(size, seed, epoch):
    order = Permutation(size, seed, epoch)(np.arange(size))
    assert sorted(order.tolist()) == list(range(size))


def test_permutations_of_huge_corpora_take_no_memory_and_look_random():
    size = 10**12 + 39
    order = Permutation(size, 3)(np.arange(10**5))
    assert len(np.unique(order)) == 10**5
    assert 0 <= order.min() < order.max() < size
    assert abs(order.mean() / size - 0.5) < 0.01
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    small = Permutation(1000, 3)(np.arange(1000))
    assert abs(np.corrcoef(small, np.arange(1000))[0, 1]) < 0.1
    assert (small == np.arange(1000)).sum() < 10
    with pytest.raises(ValueError, match="positions must lie between 0 and 999"):
        Permutation(1000, 3)(np.array([1000]))


def test_splits_have_their_shares():
    chosen = splits.assign(0, 10**5, 5, splits.shares(("0.9", "0.04", "0.06")))
    assert np.allclose(np.bincount(chosen) / 10**5, [0.9, 0.04, 0.06], atol=0.004)
    halves = [splits.assign(a, b - a, 5, splits.shares(("0.9", "0.04", "0.06"))) for a, b in ((0, 777), (777, 10**5))]
    assert (np.concatenate(halves) == chosen).all()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_global_batch_is_the_same_for_any_number_of_ranks_and_micro_batch(prepared, data):
    step = data.draw(st.integers(0, 10**6))
    global_batch = data.draw(st.sampled_from([12, 24, 720]))  # 720 is more than an epoch
    ranks, micro_batch = data.draw(st.sampled_from([(1, 1), (2, 1), (2, 3), (3, 4), (4, 3), (6, 2), (12, 1)]))
    reader = Samples(prepared, "train", 16, 257, seed=data.draw(st.integers(0, 5)))
    (whole,) = reader.batch(step, global_batch, global_batch)
    found = [reader.batch(step, global_batch, micro_batch, rank, ranks) for rank in range(ranks)]
    assert all(len(micro_batches) == global_batch // ranks // micro_batch for micro_batches in found)
    assert all(m.shape == (micro_batch, 17) and m.dtype == torch.int64 for ms in found for m in ms)
    assert torch.equal(torch.cat([m for micro_batches in found for m in micro_batches]), whole)


def test_an_epoch_predicts_every_token_once_and_the_next_has_another_order(prepared):
    reader = Samples(prepared, "train", 16, 257, seed=1)
    stream = files.open_tokens(prepared, "train")
    epochs = [reader.order(n * reader.windows, reader.windows) for n in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(reader.windows))
    assert (epochs[0] != epochs[1]).mean() > 0.9
    batch = torch.cat(reader.batch(0, reader.windows, 1))
    assert [row.tolist() for row in batch] == [stream[16 * w : 16 * w + 17].tolist() for w in epochs[0]]
    targets = torch.cat([row[1:] for _, row in sorted(zip(epochs[0].tolist(), batch, strict=True), key=lambda p: p[0])])
    assert targets.tolist() == stream[1 : len(targets) + 1].tolist()
    assert len(stream) - 1 - len(targets) < 16
    again, other = (Samples(prepared, "train", 16, 257, seed=seed) for seed in (1, 2))
    assert torch.equal(again.batch(5, 8, 8)[0], reader.batch(5, 8, 8)[0])
    assert not torch.equal(other.batch(5, 8, 8)[0], reader.batch(5, 8, 8)[0])


@pytest.mark.parametrize(("asked", "windows", "taken"), [(128, 300, 128), (100, 300, 64), (0, 300, 256), (40, 300, 32)])
def test_validation_is_one_set_for_all_world_sizes(asked, windows, taken, prepared, monkeypatch):
    reader = Samples(prepared, "valid", 8, 257)
    assert reader.windows > windows
    reader.windows = windows
    whole = torch.cat(reader.validation(asked, 1))
    assert len(whole) == reader.validation_samples(asked) == taken
    stream = files.open_tokens(prepared, "valid")
    assert torch.equal(whole[1], torch.from_numpy(stream[(w := windows // taken) * 8 : w * 8 + 9].astype(np.int64)))
    for ranks, micro_batch in ((1, 5), (2, 16), (8, 3), (16, 4), (32, 100)):
        found = [reader.validation(asked, micro_batch, rank, ranks) for rank in range(ranks)]
        assert torch.equal(torch.cat([m for micro_batches in found for m in micro_batches]), whole)
        assert len({m.shape for micro_batches in found for m in micro_batches}) == 1
        assert len({len(micro_batches) for micro_batches in found}) == 1
        assert len(found[0][0]) <= micro_batch
    with pytest.raises(ValueError, match="set evaluation.samples to a multiple of 192"):
        reader.validation(asked, 4, 0, 3)


def test_what_cannot_be_read_is_refused_with_a_reason(prepared, tmp_path):
    with pytest.raises(
        ValueError, match="holds no prepared data; prepare some with python -m alto_distributed prepare"
    ):
        Samples(tmp_path, "train", 8, 257)
    with pytest.raises(ValueError, match="ids up to 256, and model.vocabulary=256: set it to 257 or more .384"):
        Samples(prepared, "train", 8, 256)
    with pytest.raises(ValueError, match="model.sequence=1000000 needs 1000001 tokens.*prepare more text"):
        Samples(prepared, "train", 10**6, 257)
    with pytest.raises(ValueError, match="'training' is not one of train"):
        Samples(prepared, "training", 8, 257)
    reader = Samples(prepared, "train", 8, 257)
    with pytest.raises(ValueError, match="must be a multiple of micro_batch x data-parallel ranks = 4 x 3"):
        reader.batch(0, 8, 4, 0, 3)
    with pytest.raises(ValueError, match="data_parallel_rank=2 must lie"):
        reader.batch(0, 8, 4, 2, 2)


def damaged(prepared, directory, name, change):
    for file, content in contents(prepared).items():
        if file != name:
            (directory / file).write_bytes(content)
        elif change:
            (directory / file).write_bytes(change(content))
    return directory


DAMAGE = {
    "train.idx is missing": ("train.idx", None),
    "train.bin has .* bytes and should have": ("train.bin", lambda b: b[:-2]),
    "train.idx has .* bytes and should have": ("train.idx", lambda b: b + b"\0"),
    "does not begin like a Megatron index": ("train.idx", lambda b: b"X" + b[1:]),
    "train.idx is damaged: it has": ("train.idx", lambda b: b[:18] + b"\1" + b[19:]),
    "train.idx is damaged: its documents have": ("train.idx", lambda b: b[:34] + b"\xee" + b[35:]),
    "train.bin is damaged: it has token 65535": ("train.bin", lambda b: b"\xff\xff" * (len(b) // 2)),
    "manifest.json is damaged": ("manifest.json", lambda b: b[: len(b) // 2]),
    "has format 3, and this version reads 2": ("manifest.json", lambda b: b.replace(b'"format": 2', b'"format": 3')),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damaged_files_are_named_and_refused(message, prepared, tmp_path):
    directory = damaged(prepared, tmp_path, *DAMAGE[message])
    with pytest.raises(ValueError, match=message):
        samples.Samples(directory, "train", 8, 257).batch(0, 4, 4)


def test_a_flipped_bit_of_what_a_run_rests_on_is_noticed(corpus, tmp_path):
    """The manifest and the tokenizer were not: 27 and 40 of 40 flips passed."""
    prepare(tmp_path, [corpus], kind="bpe", vocabulary=300, split=HALVES)
    files.verify(tmp_path, *files.SPLITS)
    for name, stride in ((files.MANIFEST, 29), ("tokenizer.json", 997)):
        path = tmp_path / name
        whole = path.read_bytes()
        for place in range(0, len(whole) * 8, stride):
            flipped = bytearray(whole)
            flipped[place // 8] ^= 1 << place % 8
            path.write_bytes(flipped)
            with pytest.raises(ValueError, match="damaged|has format"):
                files.verify(tmp_path, *files.SPLITS)
        path.write_bytes(whole)


def test_data_that_was_prepared_before_manifests_had_checksums_is_read(corpus, tmp_path):
    prepare(tmp_path, [corpus], kind="bytes", split=HALVES)
    path = tmp_path / files.MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["checksum"]
    path.write_text(json.dumps({**manifest, "format": 1}))
    files.verify(tmp_path, *files.SPLITS)
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="its checksum is another"):
        files.verify(tmp_path, *files.SPLITS)


def test_a_fingerprint_tells_data_apart(corpus, tmp_path):
    found = []
    for name, options in (("a", {"vocabulary": 300}), ("b", {"vocabulary": 300}), ("c", {"vocabulary": 290})):
        prepare(tmp_path / name, [corpus], kind="bpe", split=HALVES, **options)
        found.append(files.fingerprint(tmp_path / name))
    assert found[0] == found[1]
    assert "tokenizer.json" in found[0]
    assert found[0]["tokenizer.json"] != found[2]["tokenizer.json"]
