"""Files that several tests damage. Older releases of torch have no training program, so it is imported late."""

import json

import pytest

from tests.helpers.fuzz import CONTENTS


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint as far as manifests are concerned, and the manifest's content."""
    from alto_distributed.pretrain.checkpoint import manifest

    directory = tmp_path_factory.mktemp("checkpoint")
    (directory / "saved").mkdir()
    for name, content in CONTENTS.items():
        (directory / name).write_bytes(content)
    entries = {
        name: manifest.entry_of(directory / name, rank, {"exp_avg": "float32[3]", "grad_ema": "float32[3]"})
        for rank, name in enumerate(CONTENTS)
    }
    manifest.write(directory, manifest.Manifest(7, 3, manifest.versions(), entries))
    return directory, (directory / manifest.NAME).read_bytes()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Prepared data, and what each file of it holds."""
    from alto_distributed.pretrain.data.prepare import prepare

    directory, text = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("text") / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"document {n} " * (n % 5 + 1)}) + "\n" for n in range(60)))
    prepare(directory, [text], kind="bytes", split=("1/2", "1/4", "1/4"))
    return directory, {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
