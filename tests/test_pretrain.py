"""The training program, end to end, in real processes: both engines, stopped, killed, resumed, on fewer ranks."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from alto_distributed.pretrain import config
from alto_distributed.pretrain.commands import plan
from alto_distributed.pretrain.schedule import learning_rate

from .launcher import EXHAUSTIVE, REPO, environment

exhaustive = pytest.mark.skipif(not EXHAUSTIVE, reason="minutes of starting ranks: EXHAUSTIVE=1 runs it")

STEPS = 8
SETTINGS = [
    "model.hidden=32",
    "model.sequence=32",
    "training.precision=fp32",
    f"training.iterations={STEPS}",
    "schedule.warmup=3",
    "evaluation.every=0",
    "evaluation.samples=64",
    "checkpoints.every=0",
    "logs.every=1",
    "logs.tensorboard=false",
    "logs.diagnostics_every=4",
]
ENTRIES = {"deepspeed": ["-m", "alto_distributed"], "megatron": [str(REPO / "scripts" / "megatron_on_cpu.py")]}

#: Training losses of these settings in float32, the same in both engines; made by the first run that was right.
GOLDEN = {1: 6.936091, STEPS: 6.768803}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A text that stays as it is: the licence, a document a paragraph."""
    folder = tmp_path_factory.mktemp("data")
    paragraphs = (REPO / "LICENSE").read_text().split("\n\n")
    text = folder / "licence.jsonl"
    text.write_text("".join(json.dumps({"text": paragraph}) + "\n" for paragraph in paragraphs))
    command = [sys.executable, "-m", "alto_distributed", "prepare", str(text), "--output", str(folder / "tokens")]
    command += ["--vocabulary", "512", "--split", "0.7,0.2,0.1", "--quiet"]
    subprocess.run(command, cwd=REPO, env=environment(), check=True, capture_output=True)
    return folder / "tokens"


def command(engine, data, into, *more, world=2):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    run = ["pretrain", "--config", "configs/gpt2-tiny.yaml", "--engine", engine, "--into", str(into)]
    flags = [word for word in more if "=" not in word]
    overrides = [word for word in more if "=" in word]
    return [*torchrun, *ENTRIES[engine], *run, *flags, f"data.directory={data}", *SETTINGS, *overrides]


def pretrain(engine, data, into, *more, world=2):
    full = command(engine, data, into, *more, world=world)
    done = subprocess.run(full, cwd=REPO, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def records(into):
    return [json.loads(line) for line in (into / "metrics.jsonl").read_text().splitlines()]


def losses(into):
    return {record["step"]: record["loss"] for record in records(into) if "loss" in record}


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """Runs that nothing happened to, by engine, with what they printed."""
    folder, said = tmp_path_factory.mktemp("whole"), {}
    for engine in ENTRIES:
        said[engine] = pretrain(engine, data, folder / engine)
    return folder, said


@pytest.mark.slow
def test_both_engines_train_the_same_model_step_by_step(whole):
    folder, said = whole
    ours, theirs = losses(folder / "deepspeed"), losses(folder / "megatron")
    assert list(ours) == list(theirs) == list(range(1, STEPS + 1))
    assert list(ours.values()) == pytest.approx(list(theirs.values()), rel=2e-6)
    assert {step: ours[step] for step in GOLDEN} == pytest.approx(GOLDEN, rel=1e-5)
    for engine in ENTRIES:
        seen = records(folder / engine)
        assert seen[-1]["valid_loss"] < seen[0]["valid_loss"] - 0.1
        assert any("trust_ratio_median" in record for record in seen)
        assert f"| {engine}" in said[engine]
        assert (folder / engine / "report.png").stat().st_size > 10_000


@exhaustive
@pytest.mark.parametrize("engine", ENTRIES)
def test_stopped_and_resumed_is_as_if_it_had_not_been(engine, whole, data, tmp_path):
    folder, _ = whole
    said = pretrain(engine, data, tmp_path / "run", "--stop-at", "5")
    assert "stopped as asked" in said
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4, 5]
    pretrain(engine, data, tmp_path / "run")
    assert losses(tmp_path / "run") == losses(folder / engine)  # to the last digit
    assert records(tmp_path / "run")[-1]["valid_loss"] == records(folder / engine)[-1]["valid_loss"]


@exhaustive
def test_killed_and_resumed_at_another_world_size(whole, data, tmp_path):
    """kill -9 of every process in mid-run; one rank goes on where two had saved."""
    folder, _ = whole
    into = tmp_path / "run"
    full = command("deepspeed", data, into, "checkpoints.every=3")
    started = subprocess.Popen(
        full, cwd=REPO, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 200
    while not (into / "checkpoints" / "step-00000003").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(started.pid, signal.SIGKILL)
    started.wait()
    pretrain("deepspeed", data, into, "checkpoints.every=3", world=1)
    seen = losses(into)
    assert list(seen) == list(range(1, STEPS + 1))
    assert list(seen.values()) == pytest.approx(list(losses(folder / "deepspeed").values()), rel=1e-5)


# -- settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((REPO / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_a_run(path):
    run = config.load(path)
    assert config.parse(run.as_dict()) == run
    if "345m" in path.stem:
        model, training = run.model, run.training
        assert (model.layers, model.hidden, model.heads, model.sequence) == (24, 1024, 16, 1024)
        assert (training.global_batch, training.micro_batch, training.iterations) == (4096, 4, 5000)
        assert (training.clip, training.seed, training.precision) == (1.0, 1234, "bf16")
        rates = {"alto": 1e-2, "lamb": 1e-2, "adamw": 8e-4, "adam": 6e-4, "adabelief": 5e-2, "lion": 1e-4}
        assert run.optimizer.lr == rates[run.optimizer.name]
    assert "= 4096 samples" in plan(run, 4, path) or "tiny" in path.stem


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainin.seed=1", "did you mean 'training'"),
        ("training.iteration=3", "did you mean 'iterations'"),
        ("training.iterations=many", "should be a whole number"),
        ("training.iterations=1.5", "should be a whole number"),
        ("training.clip=-1", "training.clip=-1.0 is out of range"),
        ("optimizer.lr=.nan", "optimizer.lr=nan is out of range"),
        ("model.heads=3", "must be a multiple of model.heads=3"),
        ("schedule.kind=cosin", "is not one of constant, cosine, poly"),
        ("logs.tensorboard=1", "should be true or false"),
        ("training=3", "should be a section"),
        ("iterations", "is not an override"),
        ("model.layers=[", "is not YAML"),
        ("schedule.warmup=1000", "longer than training.iterations"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(override, message):
    with pytest.raises(ValueError, match=message):
        config.load(REPO / "configs/gpt2-tiny.yaml", [override])


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_does():
    run = config.load(REPO / "configs/gpt2-345m.yaml")
    assert run.accumulation(8) == 128
    with pytest.raises(ValueError, match=r"4 x 3 = 12; the nearest that are: 4092, 4104"):
        run.accumulation(3)


def test_the_rate_rises_and_falls():
    run = config.load(REPO / "configs/gpt2-345m.yaml")
    rates = [learning_rate(run, step) for step in range(5000)]
    assert rates[0] == pytest.approx(1e-2 / 50)
    assert max(rates) == rates[49] == rates[50] == 1e-2
    assert rates[-1] == pytest.approx(1e-4)
    assert all(a >= b for a, b in itertools.pairwise(rates[50:]))
    constant = config.load(REPO / "configs/gpt2-345m.yaml", ["schedule.kind=constant"])
    assert learning_rate(constant, 4999) == 1e-2
    straight = config.load(REPO / "configs/gpt2-345m.yaml", ["schedule.kind=poly", "schedule.final=0"])
    assert learning_rate(straight, 50 + (4999 - 50) // 2) == pytest.approx(0.5e-2, rel=1e-3)


# -- launch scripts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["torchrun", "mpirun", "slurm", "deepspeed"])
def test_every_launch_script_has_a_dry_run(script):
    more = {"DRY_RUN": "1", "PY": sys.executable, "GPUS": "8", "RANKS": "8"}
    launch = ["bash", f"launch/{script}.sh", "--config", "configs/gpt2-345m.yaml"]
    done = subprocess.run(launch, cwd=REPO, env=environment(**more), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert "alto_distributed pretrain --config configs/gpt2-345m.yaml" in first
    assert "4 micro x 128 accumulated x 8 data-parallel = 4096 samples" in "\n".join(rest)
    launch.append("training.global_batch=4095")
    done = subprocess.run(launch, cwd=REPO, env=environment(**more), capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "training.global_batch=4095 is not a multiple" in done.stderr
