"""Data as people have it: one text, compressed files, tables, other keys; and memory that does not grow with it."""

import errno
import gzip
import json
import os
import pathlib
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import tokenizers
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from alto_distributed.pretrain.cli import main
from alto_distributed.pretrain.data import cuts, files, sources, tokenizer, unpack
from alto_distributed.pretrain.data.prepare import prepare
from alto_distributed.pretrain.data.sources import Lines, Source
from tests.helpers.launcher import EXHAUSTIVE, REPO

LICENSE = REPO / "LICENSE"


def text_of(directory, split, kind=None):
    """What a split's tokens say, with its documents apart."""
    words = kind or tokenizer.Bytes()
    tokens = files.open_tokens(directory, split)
    ends = np.flatnonzero(tokens == words.end_of_document)
    assert ends[-1] == len(tokens) - 1
    return [words.decode(document[:-1]) for document in np.split(tokens, ends[:-1] + 1)]


def test_one_text_is_split_by_its_bytes(tmp_path):
    text = LICENSE.read_text()
    prepare(tmp_path / "out", [LICENSE], kind="bytes", split=("0.8", "0.1", "0.1"))
    (train,), (valid,), (test,) = (text_of(tmp_path / "out", split) for split in files.SPLITS)
    assert train + valid + test == text
    assert [len(train) / len(text), len(valid) / len(text)] == pytest.approx([0.8, 0.1], abs=0.02)
    assert train.endswith("\n")
    assert valid.endswith("\n")
    small = tmp_path / "small.txt"
    small.write_text("only a few words")
    with pytest.raises(ValueError, match=r"small.txt has 16 bytes, too few to be cut into shares of 0.98, 0.01, 0.01"):
        prepare(tmp_path / "nothing", [small], kind="bytes")
    assert not (tmp_path / "nothing").exists()


def test_too_few_json_lines_are_refused_before_they_are_tokenized(tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(f"{json.dumps({'text': 'words ' * 300_000})}\n\n" * 2)
    with pytest.raises(ValueError, match="of 2 documents none fell to"):
        prepare(tmp_path / "out", [path], kind="bytes")
    assert not (tmp_path / "out").exists()


TEXTS = st.text(st.sampled_from("ab\n \u00e9\u4e2d\U0001f600\u00a0\t"), max_size=80)


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(1, 40), st.sampled_from([1 << 20, 3]))
def test_a_text_in_pieces_has_the_same_characters_and_if_it_has_lines_the_same_tokens(
    tmp_path_factory, text, size, search
):
    path = tmp_path_factory.getbasetemp() / "cut.txt"
    path.write_bytes(text.encode())
    source = sources.scanned(Source("cut", str(path), False, path.stat().st_size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "_SEARCH", search)
        spans = [span for chunk in cuts.chunks([source], size) for span in chunk]
    read = [next(sources.read(source, span, Lines())) for span in spans]
    assert "".join(read) == text
    assert [span.ends for span in spans] == [False] * (len(spans) - 1) + [True]
    if search > len(text) * 4:  # then it is cut where a line ends, or not at all
        for place in (len("".join(read[: i + 1])) for i in range(len(read) - 1)):
            assert tokenizer._CUT.match(text, place - 2)


def test_a_long_text_is_one_document_with_the_tokens_of_the_whole(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    texts = [LICENSE.read_text(), "a short one\n", LICENSE.read_text()[::-1]]
    for name, text in zip("abc", texts, strict=True):
        (folder / f"{name}.txt").write_text(text)
    whole = prepare(tmp_path / "whole", [folder], vocabulary=300, split=(1, 0, 0)).manifest
    cut = prepare(tmp_path / "cut", [folder], vocabulary=300, split=(1, 0, 0), chunk_bytes=500).manifest
    assert cut == whole
    assert whole["splits"]["train"]["documents"] == 3
    assert text_of(tmp_path / "cut", "train", files.open_tokenizer(tmp_path / "cut")) == texts


def test_a_long_text_that_is_not_utf8_is_left_out_whole(tmp_path):
    bad, good = tmp_path / "bad.txt", tmp_path / "good.txt"
    bad.write_bytes(b"line\n" * 400_000 + b"na\xefve\n" + b"more\n" * 10)
    good.write_text("fine\n" * 10)
    manifest = prepare(tmp_path / "out", [bad, good], kind="bytes", split=(1, 0, 0)).manifest
    assert manifest["inputs"][0]["first_bad_lines"] == [{"line": 400_001, "why": "the file is not UTF-8"}]
    assert text_of(tmp_path / "out", "train") == ["fine\n" * 10]


def save_to_disk(directory, texts, column):
    """As Dataset.save_to_disk of Hugging Face's datasets lays it out: Arrow streams that state.json names."""
    directory.mkdir(parents=True)
    names = []
    for number, half in enumerate((texts[: len(texts) // 2], texts[len(texts) // 2 :])):
        table = pyarrow.table({column: half, "label": list(range(len(half)))})
        names.append(f"data-{number:05d}-of-00002.arrow")
        path = str(directory / names[-1])
        with pyarrow.OSFile(path, "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (directory / "dataset_info.json").write_text("{}")
    (directory / "cache-1234.arrow").write_bytes(b"not a stream")


def packed(texts, folder):
    """The same documents in each format, by name."""
    lines = "".join(json.dumps({"body": text}) + "\n" for text in texts).encode()
    (folder / "plain.jsonl").write_bytes(lines)
    with gzip.open(folder / "a.jsonl.gz", "wb") as file:
        file.write(lines)
    # Two frames, as tools that compress in parallel write them.
    half = len(lines) // 2
    frames = [zstandard.compress(part) for part in (lines[:half], lines[half:])]
    (folder / "b.jsonl.zst").write_bytes(b"".join(frames))
    parquet.write_table(pyarrow.table({"id": range(len(texts)), "body": texts}), folder / "c.parquet", row_group_size=7)
    save_to_disk(folder / "saved" / "train", texts, "body")
    (folder / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    return ["a.jsonl.gz", "b.jsonl.zst", "c.parquet", "saved"]


def test_every_format_gives_the_same_tokens(tmp_path):
    texts = [f"document {number}: \u00fcber \u4e2d\u6587 {'words ' * number}" for number in range(60)]
    options = {"split": ("1/2", "1/4", "1/4"), "vocabulary": 280, "text_key": "body", "chunk_bytes": 900}
    formats = packed(texts, tmp_path)
    plain = prepare(tmp_path / "plain", [tmp_path / "plain.jsonl"], **options)
    for name in formats:
        output = tmp_path / f"out-{name}"
        manifest = prepare(output, [tmp_path / name], **options).manifest
        assert manifest["splits"] == plain.manifest["splits"], name
        assert manifest["settings"]["ignored_files"] == []
        assert not (output / files.UNFINISHED).exists()
        assert prepare(output, [tmp_path / name], **options).was_there
    with pytest.raises(ValueError, match="text_key"):
        prepare(tmp_path / "plain", [tmp_path / "plain.jsonl"], **{**options, "text_key": "id"})


def documents_of(directory):
    return {split: text_of(directory, split) for split in files.SPLITS}


def numbered(split, count):
    return [f"{split} {number}" for number in range(count)]


def test_a_dataset_keeps_its_own_splits(tmp_path, capsys):
    """Test text was trained on: all splits went into one pot, and a clone's README.md with them."""
    own = {"train": numbered("train", 40), "validation": numbered("valid", 5), "test": numbered("test", 6)}
    for split, texts in own.items():
        save_to_disk(tmp_path / "saved" / split, texts, "text")
    (tmp_path / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": list(own)}))

    clone = tmp_path / "clone"  # of a repository on the hub
    (clone / "data").mkdir(parents=True)
    (clone / ".gitattributes").write_text("*.parquet filter=lfs")
    (clone / "README.md").write_text("# A dataset of numbers")
    for split, texts in own.items():
        for shard, half in enumerate((texts[: len(texts) // 2], texts[len(texts) // 2 :])):
            parquet.write_table(pyarrow.table({"text": half}), clone / f"data/{split}-0000{shard}-of-00002.parquet")

    lines = [tmp_path / f"web.{split}.jsonl" for split in ("valid", "test", "train")]
    for path, texts in zip(lines, (own["validation"], own["test"], own["train"]), strict=True):
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    expected = {"train": own["train"], "valid": own["validation"], "test": own["test"]}
    folders = [tmp_path / "saved" / split for split in own]
    for name, inputs in {"saved": [tmp_path / "saved"], "clone": [clone], "lines": lines, "folders": folders}.items():
        main(
            ["prepare", *map(str, inputs), "--output", str(tmp_path / name / "out"), "--tokenizer", "bytes", "--quiet"]
        )
        assert documents_of(tmp_path / name / "out") == expected, name
        said = capsys.readouterr()
        assert "  test, train, valid as the input has them\n" in said.out
    left_out = files.read_manifest(tmp_path / "clone/out")["settings"]["ignored_files"]
    assert left_out == ["clone/README.md"]


def test_a_tokenizer_is_not_trained_on_text_that_is_held_out(tmp_path):
    for name, word in {"train": "abab", "valid": "cdcd", "test": "efef"}.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": f"{word} " * 50}) + "\n")
    prepare(tmp_path / "out", sorted(tmp_path.glob("*.jsonl")), vocabulary=260)
    known = files.open_tokenizer(tmp_path / "out").library().get_vocab()
    assert "ab" in known
    assert not {"cd", "ef"} & set(known)


def test_a_split_that_a_dataset_does_not_have_is_drawn_from_its_training_documents(tmp_path):
    own = {"train": numbered("train", 300), "test": numbered("test", 6)}
    for split, texts in own.items():
        save_to_disk(tmp_path / "saved" / split, texts, "text")
    prepare(tmp_path / "out", [tmp_path / "saved"], kind="bytes", split=("0.8", "0.1", "0.1"))
    found = documents_of(tmp_path / "out")
    assert found["test"] == own["test"]
    assert sorted(found["train"] + found["valid"]) == sorted(own["train"])
    assert 15 < len(found["valid"]) < 45  # a tenth
    # One of its parts alone is a text like any other.
    prepare(tmp_path / "one", [tmp_path / "saved" / "test"], kind="bytes", split=("0.5", "0.5", "0"), seed=1)
    assert "named_splits" not in files.read_manifest(tmp_path / "one")["settings"]


def test_text_files_of_splits_are_whole_and_what_is_missing_is_cut_from_the_training_text(tmp_path):
    text = LICENSE.read_text()
    for name in ("wiki.train.txt", "wiki.test.txt"):
        (tmp_path / name).write_text(f"{name}\n{text}")
    prepare(tmp_path / "out", sorted(tmp_path.glob("wiki*")), kind="bytes", split=("0.8", "0.1", "0.1"))
    found = documents_of(tmp_path / "out")
    assert found["test"] == [f"wiki.test.txt\n{text}"]
    ((train,), (valid,)) = (found["train"], found["valid"])
    assert train + valid == f"wiki.train.txt\n{text}"
    assert len(valid) / len(text) == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize(("name", "split"), [
    ("train.jsonl", "train"),
    ("dev.jsonl.gz", "valid"),
    ("Validation-00003-of-00010.parquet", "valid"),
    ("wiki.test.raw", "test"),
    ("data_train_3.jsonl", "train"),
    ("test/a.txt", "test"),
    ("train/test-00000-of-00001.arrow", "test"),
    ("test/helper.py", ""),
    ("latest.jsonl", ""),
    ("test_of_time.txt", ""),
])  # fmt: skip
def test_names_of_splits(name, split):
    assert sources._split_of(pathlib.PurePath(name)) == split


def word_pieces(path, tokens):
    library = tokenizers.Tokenizer(tokenizers.models.WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="[UNK]"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.decoder = tokenizers.decoders.WordPiece()
    library.add_special_tokens([token for token in tokens if token.startswith(("[", "<"))])
    library.enable_truncation(3)
    library.save(str(path))
    return path


def test_any_tokenizer_json_is_used_with_its_own_end_of_a_document(tmp_path):
    path = word_pieces(tmp_path / "tokenizer.json", ["[UNK]", "[CLS]", "[SEP]", "good", "##s", "words", "and"])
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["goods and words", "and [SEP] words"]))
    for number, kind in enumerate((path, tmp_path)):  # the file, or the directory that it is in
        output = tmp_path / f"out{number}"
        manifest = prepare(output, [lines], kind=str(kind), split=(1, 0, 0)).manifest
        assert manifest["tokenizer"]["vocabulary"] == 7
        # Not cut to three tokens, and a text that spells a special token does not contain it.
        assert files.open_tokens(output, "train").tolist() == [3, 4, 6, 5, 2, 6, 0, 0, 0, 5, 2]
        words = files.open_tokenizer(output)
        assert (words.end_of_document, words.decode([3, 4, 6, 2])) == (2, "goods and")
    path = word_pieces(tmp_path / "without.json", ["[UNK]", "and"])
    prepare(tmp_path / "out", [lines], kind=str(path), split=(1, 0, 0))
    assert files.open_tokens(tmp_path / "out", "train").tolist()[-1] == 2  # a new token
    assert files.open_tokenizer(tmp_path / "out").size == 3
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(ValueError, match=r"the tokenizer .*no.json cannot be read"):
        prepare(tmp_path / "nothing", [lines], kind=str(tmp_path / "no.json"))


def test_a_tokenizer_without_a_token_for_the_unknown_is_named(tmp_path):
    """The library raises a bare Exception."""
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.Unigram([("good", -1.0)])).save(str(path))
    text = tmp_path / "a.txt"
    text.write_text("good caf\u00e9")
    with pytest.raises(ValueError, match="the tokenizer cannot encode a text .*: .*`unk_id` is missing"):
        prepare(tmp_path / "out", [text], kind=str(path), split=(1, 0, 0))


def test_a_directory_that_cannot_be_read_is_not_left_out_in_silence(tmp_path, monkeypatch):
    """root may read all, so the system's answer is put in its place."""
    for name in ("open", "closed", ".hidden"):
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "a.txt").write_text("text")
    assert [source.name for source in sources.find([tmp_path / "in"])[0]] == ["in/closed/a.txt", "in/open/a.txt"]
    scandir, refused = os.scandir, set()

    def of_another(path):
        if Path(path).name in refused:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", of_another)
    refused.add(".hidden")
    assert len(sources.find([tmp_path / "in"])[0]) == 2
    refused.add("closed")
    with pytest.raises(ValueError, match=r"the directory .*/in/closed cannot be read \(Permission denied\), and its"):
        sources.find([tmp_path / "in"])


@pytest.mark.parametrize(("name", "message"), [
    ("cut.jsonl.gz", "cut.jsonl.gz is not a whole .gz file"),
    ("no.jsonl.gz", "no.jsonl.gz is not a whole .gz file"),
    ("no.txt.zst", "no.txt.zst is not a whole .zst file"),
    ("no.parquet", "no.parquet"),
    ("other.parquet", "other.parquet has no column 'text'; name one with --text-key: words, n"),
    ("numbers.parquet", "the column 'text' of .*numbers.parquet holds int64, and should hold strings"),
    ("saved", "state.json does not name the files of a dataset"),
])  # fmt: skip
def test_a_packed_file_that_cannot_be_read_is_refused(name, message, tmp_path, capsys):
    with gzip.open(tmp_path / "whole.gz", "wb") as file:
        file.write(np.random.default_rng(0).bytes(5000))
    (tmp_path / "cut.jsonl.gz").write_bytes((tmp_path / "whole.gz").read_bytes()[:3000])
    for bad in ("no.jsonl.gz", "no.txt.zst", "no.parquet"):
        (tmp_path / bad).write_text("no such thing " * 10)
    parquet.write_table(pyarrow.table({"words": ["a"], "n": [1]}), tmp_path / "other.parquet")
    parquet.write_table(pyarrow.table({"text": [1]}), tmp_path / "numbers.parquet")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        main(["prepare", str(tmp_path / name), "--output", str(tmp_path / "out"), "--tokenizer", "bytes"])
    assert ended.value.code in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line
    if name != "cut.jsonl.gz":  # found when it is unpacked
        assert not (tmp_path / "out").exists()


def test_a_key_that_no_line_has_is_refused_before_anything_is_tokenized(tmp_path, monkeypatch):
    monkeypatch.setattr(unpack, "_BLOCK", 200)
    rows = [json.dumps({"id": number, "body": f"document {number}"}) for number in range(60)]
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst"):
        pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(Path(name).suffix, bytes)
        (tmp_path / name).write_bytes(pack("\n".join(rows).encode()))
        wrong = rf"no documents in the input: .*{name} line 1: no .text.; name its key with --text-key: .'id', 'body'"
        with pytest.raises(ValueError, match=wrong):
            prepare(tmp_path / "out", [tmp_path / name], kind="bytes")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("names", "documents"), [
    (["bad", "good"], ["a"]),
    (["late"], ["a"]),
    (["long"], ["a" * 300]),
    (["bad", "text"], ["fine\n"]),
])  # fmt: skip
def test_lines_that_are_no_documents_are_left_out_as_long_as_there_is_one(names, documents, tmp_path, monkeypatch):
    monkeypatch.setattr(unpack, "_BLOCK", 200)
    content = {"bad": '{"body": "b"}\n', "good": '{"text": "a"}\n', "late": 'bad\n{"text": "a"}'}
    content["long"] = json.dumps({"text": "a" * 300})
    for name, text in content.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "text.txt").write_text("fine\n")
    paths = [tmp_path / (f"{name}.txt" if name == "text" else f"{name}.jsonl") for name in names]
    prepare(tmp_path / "out", paths, kind="bytes", split=(1, 0, 0))
    assert text_of(tmp_path / "out", "train") == documents


def test_a_package_that_is_not_installed_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(b"text"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ValueError, match=r"zstandard is not installed: pip install 'alto-distributed\[data\]'"):
        prepare(tmp_path / "out", [tmp_path / "a.txt.zst"], kind="bytes")


MEASURED = """
import resource, sys
from alto_distributed.pretrain.data.prepare import prepare
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
prepare(sys.argv[1], [sys.argv[2]], kind=sys.argv[3])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def grown(kind, megabytes, folder):
    """kB of memory that preparing a text takes."""
    path = folder / f"{megabytes}.txt"
    line = "".join(f"{number} lines of words, " for number in range(100)) + "\n"
    path.write_text(line * (megabytes * 1_000_000 // len(line)))
    command = [sys.executable, "-c", MEASURED, str(folder / f"out{megabytes}"), str(path), kind]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, cwd=REPO).stdout)


def test_memory_does_not_grow_with_the_text(tmp_path):
    """12 MB of text, which took 25 bytes of memory for each of its own."""
    assert grown("bytes", 12, tmp_path) < 100_000


@pytest.mark.skipif(not EXHAUSTIVE, reason="it takes 15 seconds; EXHAUSTIVE=1 runs it")
def test_memory_of_the_default_tokenizer_does_not_grow_with_the_text(tmp_path):
    """The library has 300 MB of its own. 10 MB more of text took 280 MB more."""
    assert grown("bpe", 12, tmp_path) < grown("bpe", 2, tmp_path) + 100_000
