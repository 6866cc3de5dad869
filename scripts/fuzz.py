"""Coverage-guided fuzzing of what reads foreign bytes, with atheris (``pip install atheris``).

    python scripts/fuzz.py                       # every target, 60 seconds each, in a process of its own
    python scripts/fuzz.py manifest --seconds 600
    python scripts/fuzz.py manifest --input FILE # once, with bytes that were found before

A target may refuse with a ValueError or OSError that this package raises, in one line. Any other end is a find: its
bytes are left in .cache/fuzz. It becomes a test in tests/unit/test_found_by_fuzzing.py, beside the repair.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pickle
import re
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

Target = Callable[[bytes], None]


def _settings(folder: Path) -> tuple[Target, list[bytes]]:
    from alto_distributed.pretrain.config import settings

    def target(content: bytes) -> None:
        (folder / "run.yaml").write_bytes(content)
        settings.load(folder / "run.yaml")

    return target, [path.read_bytes() for path in sorted((REPO / "configs").glob("*.yaml"))]


def _deepspeed_json(folder: Path) -> tuple[Target, list[bytes]]:
    from alto_distributed.pretrain.config import settings
    from alto_distributed.pretrain.engines.deepspeed import checks

    def target(content: bytes) -> None:
        (folder / "ds.json").write_bytes(content)
        checks.check(settings.parse({"deepspeed": {"config": str(folder / "ds.json")}}), 2)

    return target, [path.read_bytes() for path in sorted((REPO / "configs" / "deepspeed").glob("*.json"))]


def _manifest(folder: Path) -> tuple[Target, list[bytes]]:
    from alto_distributed.pretrain.checkpoint import manifest

    (folder / "run.json").write_text("{}")
    entry = manifest.entry_of(folder / "run.json", 0, {"w": "float32[2, 3]"})
    manifest.write(folder, manifest.Manifest(3, 2, manifest.versions(), {"run.json": entry}))
    path = folder / manifest.NAME
    whole = path.read_bytes()

    def target(content: bytes) -> None:
        path.write_bytes(_with_checksum(content))
        read = manifest.read(folder)
        manifest.problems(folder, read, read.files)

    return target, [whole]


def _with_checksum(content: bytes) -> bytes:
    """A checksum that fits, where the bytes are an object: without it, no other line would ever be reached."""
    from alto_distributed.pretrain.integrity import checksum_of_json

    try:
        said = json.loads(content)
        rest = {key: value for key, value in said.items() if key != "checksum"}
        return json.dumps({"checksum": checksum_of_json(rest), **rest}).encode()
    except (ValueError, AttributeError, RecursionError):
        return content


def _records(folder: Path) -> tuple[Target, list[bytes]]:
    from alto_distributed.pretrain import metrics, report

    def target(content: bytes) -> None:
        (folder / metrics.RECORDS).write_bytes(content)
        report.table([report.summary(folder)])

    lines = [{"step": 0, "valid_loss": 6.9, "valid_perplexity": 1e3}, {"step": 1, "loss": 6.9, "skipped": False}]
    return target, ["".join(json.dumps(line) + "\n" for line in lines).encode()]


def _prepared(folder: Path) -> Path:
    from alto_distributed.pretrain.data.prepare import prepare

    texts = [folder / f"{number}.txt" for number in range(6)]
    for number, text in enumerate(texts):
        text.write_text(f"{number} and more " * 40)
    prepare(folder / "data", texts, kind="bytes", split=("0.5", "0.5", "0"), seed=3)
    return folder / "data"


def _data_manifest(folder: Path) -> tuple[Target, list[bytes]]:
    from alto_distributed.pretrain.data import files

    directory = _prepared(folder)
    path = directory / files.MANIFEST
    whole = path.read_bytes()

    def target(content: bytes) -> None:
        path.write_bytes(_with_checksum(content))
        files.verify(directory, *files.SPLITS)
        files.open_tokens(directory, "train")

    return target, [whole]


def _index(folder: Path) -> tuple[Target, list[bytes]]:
    from alto_distributed.pretrain.data import files, indexed

    directory = _prepared(folder)
    counts = files.read_manifest(directory)["splits"]["train"]
    path = directory / "train.idx"

    def target(content: bytes) -> None:
        path.write_bytes(content)
        indexed.check_index(path, counts["documents"], counts["tokens"])

    return target, [path.read_bytes()]


def _tokenizer(folder: Path) -> tuple[Target, list[bytes]]:
    from alto_distributed.pretrain.data import tokenizer

    tokenizer.train(["the cat sat on the mat", "the dog ate the log"] * 5, 280).save(folder / "whole.json")

    def target(content: bytes) -> None:
        (folder / tokenizer.SAVED_AS).write_bytes(content)
        words = tokenizer.load(folder / tokenizer.SAVED_AS)
        words.decode([int(number) for number in words.encode("the cat\u2603")])

    return target, [(folder / "whole.json").read_bytes()]


def _merges(folder: Path) -> tuple[Target, list[bytes]]:
    from alto_distributed.pretrain.data import tokenizer

    alphabet = sorted(tokenizer._library().pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*alphabet, "th", "the", "ca"])}

    def target(content: bytes) -> None:
        """A line with a vocabulary, and lines with merges."""
        first, _, rest = content.partition(b"\n")
        (folder / "vocab.json").write_bytes(first)
        (folder / "merges.txt").write_bytes(rest)
        words = tokenizer.from_files(folder / "vocab.json", folder / "merges.txt")
        words.decode([int(number) for number in words.encode("the cat\u2603")])

    return target, [json.dumps(vocabulary).encode() + b"\n#version: 0.2\nt h\nth e\nc a\n"]


def _dcp_index(folder: Path) -> tuple[Target, list[bytes]]:
    import torch
    import torch.distributed.checkpoint as dcp

    from alto_distributed.pretrain.checkpoint import safe_load

    dcp.save({"x": torch.ones(3), "y": {"z": torch.zeros(2, 2)}, "step": 3}, checkpoint_id=folder / "saved")
    path = folder / ".metadata"

    def target(content: bytes) -> None:
        path.write_bytes(content)
        problem = safe_load._problem(path)
        if problem is not None:
            if not problem.startswith(".metadata (") or "\n" in problem:
                raise RuntimeError(f"not one line: {problem!r}")
            return
        index = pickle.loads(content)  # which said that it holds values alone
        for info in (index.storage_data or {}).values():
            if str(info.relative_path).startswith("/") or ".." in str(info.relative_path).split("/"):
                raise RuntimeError(f"a file elsewhere: {info.relative_path}")

    return target, [(folder / "saved" / ".metadata").read_bytes()]


def _deepspeed_checkpoint(folder: Path) -> tuple[Target, list[bytes]]:
    """The pickle inside a file of ``torch.save``, given to the converter to universal checkpoints."""
    import torch

    from alto_distributed.deepspeed import universal
    from tests.unit.test_fuzz_foreign import MODEL, OPTIMIZER

    source, name = folder / "saved", "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    source.mkdir()
    torch.save(MODEL, source / "mp_rank_00_model_states.pt")
    torch.save(OPTIMIZER, source / name)
    parts, pickled, whole = _unpacked(source / name)

    def target(content: bytes) -> None:
        _pack(source / name, {**parts, pickled: content})
        universal.convert(source, folder / "universal")

    return target, [whole]


def _universal(folder: Path) -> tuple[Target, list[bytes]]:
    """The pickle inside the globals of a universal checkpoint, which an engine looks at before it loads one."""
    import torch

    from tests.unit.test_fuzz_foreign import GLOBALS, looked_at

    pickles = []
    for content in GLOBALS.values():
        torch.save(content, folder / "optimizer_state.pt")
        pickles.append(_unpacked(folder / "optimizer_state.pt"))
    parts, name, _ = pickles[0]

    def target(content: bytes) -> None:
        _pack(folder / "optimizer_state.pt", {**parts, name: content})
        looked_at(folder)

    return target, [content for _, _, content in pickles]


def _unpacked(path: Path) -> tuple[dict[str, bytes], str, bytes]:
    """The parts of a file of ``torch.save``, and name and content of the pickle among them."""
    with zipfile.ZipFile(path) as archive:
        parts = {part: archive.read(part) for part in archive.namelist()}
    name = next(part for part in parts if part.endswith("data.pkl"))
    return parts, name, parts[name]


def _pack(path: Path, parts: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for part, content in parts.items():
            archive.writestr(part, content)


def _pretrained(folder: Path) -> tuple[Target, list[bytes]]:
    from alto_distributed.pretrain.data import tokenizer
    from tests.unit.test_fuzz_foreign import pretrained_ones

    def target(content: bytes) -> None:
        (folder / tokenizer.SAVED_AS).write_bytes(content)
        words = tokenizer.pretrained(folder / tokenizer.SAVED_AS)
        words.decode([int(number) for number in words.encode("the cat\u2603")])

    return target, pretrained_ones()


TARGETS: dict[str, Callable[[Path], tuple[Target, list[bytes]]]] = {
    "settings": _settings,
    "deepspeed-json": _deepspeed_json,
    "manifest": _manifest,
    "records": _records,
    "data-manifest": _data_manifest,
    "index": _index,
    "tokenizer": _tokenizer,
    "tokenizer-json": _pretrained,
    "merges": _merges,
    "dcp-index": _dcp_index,
    "deepspeed-checkpoint": _deepspeed_checkpoint,
    "universal-checkpoint": _universal,
}


def documented(target: Target) -> Target:
    """A refusal of this package, in one line, is an answer; any other exception is a find."""
    from tests.helpers.fuzz import message_of

    def checked(content: bytes) -> None:
        try:
            target(content)
        except (ValueError, OSError) as error:
            message_of(error)

    return checked


def fuzz(name: str, seconds: int, content: Path | None) -> None:
    """In this process, until the time is over or something is found."""
    warnings.simplefilter("ignore")
    finds = REPO / ".cache" / "fuzz"
    with tempfile.TemporaryDirectory() as scratch:
        if content is not None:
            target, _ = TARGETS[name](Path(scratch))
            documented(target)(content.read_bytes())
            return
        import atheris

        with atheris.instrument_imports(include=["alto_distributed", "yaml", "json"]):
            target, seeds = TARGETS[name](Path(scratch))
        finds.mkdir(parents=True, exist_ok=True)
        corpus = Path(scratch) / "corpus"
        corpus.mkdir()
        for number, seed in enumerate(seeds):
            (corpus / str(number)).write_bytes(seed)
        limits = [f"-max_total_time={seconds}", "-rss_limit_mb=4096", "-timeout=60", "-print_final_stats=1"]
        atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={finds}/{name}-", str(corpus)], documented(target))
        atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=int, default=60, help="a target (default 60)")
    parser.add_argument("--input", type=Path, help="bytes to try once")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in options.targets:
        if name not in TARGETS:
            parser.error(f"there is no target {name}; known: {', '.join(TARGETS)}")
    if options.here or options.input:
        fuzz(options.targets[0], options.seconds, options.input)
        return
    if importlib.util.find_spec("atheris") is None:
        raise SystemExit("fuzz: the package atheris is not installed; run: pip install atheris")
    found = []
    for name in options.targets or TARGETS:
        command = [sys.executable, __file__, name, "--seconds", str(options.seconds), "--here"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        runs = re.search(r"number_of_executed_units: (\d+)", done.stderr)
        edges = re.findall(r"cov: (\d+)", done.stderr)
        print(f"{name:22} {runs.group(1) if runs else '?':>8} runs  {edges[-1] if edges else '?':>6} edges", end="  ")
        print("nothing found" if done.returncode == 0 else "FOUND", flush=True)
        if done.returncode:
            found.append(name)
            print(done.stderr[-3000:])
    if found:
        raise SystemExit(f"fuzz: {', '.join(found)}; the bytes are in {REPO / '.cache' / 'fuzz'}")


if __name__ == "__main__":
    main()
