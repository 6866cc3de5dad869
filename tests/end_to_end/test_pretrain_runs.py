"""The training program, end to end, in real processes: both engines; stopped, killed, resumed, on other ranks.

Three launchers take part, and every run must give the losses of the first: that a run was started in another way,
killed or continued elsewhere must not show.
"""

import contextlib
import hashlib
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from alto_distributed.pretrain import cli
from alto_distributed.pretrain.checkpoint import manifest
from alto_distributed.pretrain.data.prepare import prepare
from alto_distributed.pretrain.trained import open_run
from tests.helpers.launcher import EXHAUSTIVE, REPO, environment
from tests.helpers.pretrain_runs import ENTRIES, EVERY, SETTINGS, STEPS, arguments, losses, mpirun, records, torchrun
from tests.helpers.processes import MPI_AS_ROOT, beside_python, free_port, run

#: Training losses of tests/helpers/gpt2-tiny-alpha.yaml with these settings, the same in both engines, made by the
#: first run that was right: a change of weights, data order, schedule or update shows here.
GOLDEN = {1: 6.941501, 12: 6.209702, STEPS: 5.862782}
#: Validation loss that the runs must fall below; they begin at log(1024) = 6.93.
GOAL = 6.0


def checkpoints(into):
    return sorted(path.name for path in (into / "checkpoints").iterdir())


def checkpoint_bits(into, step):
    """Checksums of all weights and states. Not of Megatron's index of them, which holds an id drawn anew, and not of
    the bytes around DeepSpeed's tensors: a pickle of equal objects may be another one."""
    path = into / "checkpoints" / f"step-{step:08d}"
    files = {name: entry for name, entry in manifest.read(path).files.items() if entry.states and name != ".metadata"}
    bits = {}
    for name, entry in files.items():
        bits[name] = entry.checksum
        if name.endswith(".pt") and "saved/" in name:
            bits[name] = {key: digest(value) for key, value in tensors(torch.load(path / name, weights_only=False))}
    assert sum(len(entry.states) for entry in files.values()) > 30
    return bits


def tensors(value, where=""):
    if isinstance(value, torch.Tensor):
        yield where, value
    elif isinstance(value, (dict, list, tuple)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors(inner, f"{where}.{key}")


def digest(tensor):
    return tensor.dtype, tensor.shape, hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy()).hexdigest()


def begun_from(whole, engine, step, into):
    """A run's directory as it was after ``step``, to go on from."""
    (into / "checkpoints").mkdir(parents=True)
    name = f"step-{step:08d}"
    shutil.copytree(whole / engine / "checkpoints" / name, into / "checkpoints" / name)
    shutil.copy(whole / engine / "metrics.jsonl", into)
    return into


@contextlib.contextmanager
def started(command, into, after, **variables):
    """A run that has just saved its checkpoint of step ``after``. Whatever is left of it in the end is killed."""
    wanted = into / "checkpoints" / f"step-{after:08d}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    variables = environment(**variables)
    with subprocess.Popen(command, cwd=REPO, env=variables, start_new_session=True, **pipes) as process:
        try:
            deadline = time.monotonic() + 200
            while not wanted.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            if not wanted.exists():
                pytest.fail(f"there is no {wanted}: {end_of(process)}")
            yield process
        finally:
            if process.poll() is None:
                signal_all(process, signal.SIGKILL)


def signal_all(process, number):
    """Ranks are in sessions of their own, and would outlive torchrun."""
    for each in [*psutil.Process(process.pid).children(recursive=True), process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(number)


def end_of(process):
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.communicate(timeout=5)[0][-4000:]
    return "it is still running"


def start_and_signal(command, into, number, after):
    """Start a run and send all of its processes a signal as soon as a checkpoint of step ``after`` is there."""
    with started(command, into, after) as process:
        signal_all(process, number)
        return process.communicate(timeout=120)[0]


def rank_process(process, rank):
    """The process of a rank that torchrun has started."""
    children = psutil.Process(process.pid).children(recursive=True)
    (found,) = [child for child in children if child.environ().get("RANK") == str(rank)]
    return found


#: Two micro-batches a step on two ranks, for runs that are not compared with the golden one.
SMALL = ["training.global_batch=16", "training.micro_batch=4"]
#: What no log, report or checkpoint may show.
SECRETS = dict.fromkeys(("AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "HF_TOKEN", "PGPASSWORD"), "canary-6d1f")


@pytest.fixture(scope="module")
def whole(tokens, tmp_path_factory):
    """Runs that nothing happened to, by engine, and what they printed. Started by mpirun, the others by torchrun.

    Their directory is given in a roundabout way: with such a one, no checkpoint could be saved.
    """
    folder, said = tmp_path_factory.mktemp("whole"), {}
    (folder / "aside").mkdir()
    for engine in ENTRIES:
        into = folder / "aside" / ".." / engine
        said[engine] = run([*mpirun(2), *arguments(engine, tokens, into, "logs.report=true")], **MPI_AS_ROOT, **SECRETS)
    return folder, said


@pytest.mark.slow
def test_both_engines_train_the_same_model_step_by_step(whole):
    folder, said = whole
    ours, theirs = losses(folder / "deepspeed"), losses(folder / "megatron")
    assert list(ours) == list(theirs) == list(range(1, STEPS + 1))
    assert list(ours.values()) == pytest.approx(list(theirs.values()), rel=1e-5)
    assert {step: ours[step] for step in GOLDEN} == pytest.approx(GOLDEN, rel=1e-5)
    for engine in ENTRIES:
        seen = records(folder / engine)
        validated = [record["valid_loss"] for record in seen if "valid_loss" in record]
        assert len(validated) == 3
        assert validated[0] == pytest.approx(6.93, abs=0.05)
        assert validated[-1] < GOAL
        tested = [(record["step"], record["test_loss"]) for record in seen if "test_loss" in record]
        assert [step for step, _ in tested] == [STEPS]  # once, at the end
        assert tested[0][1] == pytest.approx(validated[-1], abs=0.5)
        assert tested[0][1] != validated[-1]  # other text
        assert f"{math.exp(tested[0][1]):.4g}" in said[engine]
        ratios = [record for record in seen if "trust_ratio_median" in record]
        assert [record["step"] for record in ratios] == [12, 24]
        assert all(0 < r["trust_ratio_min"] < r["trust_ratio_median"] < r["trust_ratio_max"] for r in ratios)
        assert all(record["tokens_per_second"] > 0 for record in seen if "loss" in record)
        assert f"| {engine}" in said[engine]
        assert (folder / engine / "report.png").stat().st_size > 10_000
        assert len((folder / engine / "metrics.csv").read_text().splitlines()) == 1 + len(seen)
        assert checkpoints(folder / engine) == [f"step-{step:08d}" for step in (EVERY, 2 * EVERY, STEPS)]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENTRIES)
def test_nothing_of_the_environment_is_written_down(engine, whole):
    folder, said = whole
    files = [path for path in (folder / engine).rglob("*") if path.is_file()]
    assert {"run.json", "manifest.json", "metrics.jsonl", "report.md"} <= {path.name for path in files}
    assert "canary" not in said[engine]
    assert not [path for path in files if b"canary" in path.read_bytes()]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENTRIES)
def test_a_trained_model_is_evaluated_exported_and_continues_a_text(engine, whole, tokens, tmp_path, capsys):
    """From the checkpoint of two ranks, in one process."""
    into = whole[0] / engine
    cli.main(["eval", str(into), str(tokens), "--samples", "64"])
    loss = re.search(r"loss (\S+), perplexity", capsys.readouterr().out).group(1)
    assert float(loss) == pytest.approx(records(into)[-1]["valid_loss"], abs=1e-4)  # as the ranks had it
    cli.main(["eval", str(into), str(tokens), "--samples", "64", "--step", str(EVERY)])
    assert f"loss {loss}" not in capsys.readouterr().out
    found = []
    for key in ("text", "body"):
        (tmp_path / f"{key}.jsonl").write_text(json.dumps({key: "Licensed under the Apache License"}) + "\n")
        cli.main(["eval", str(into), str(tmp_path / f"{key}.jsonl"), "--text-key", key])
        found.append(capsys.readouterr().out.partition(": ")[2])
    assert found[0] == found[1] != ""
    cli.main(["export", str(into), "--to", "hf", "--into", str(tmp_path / "hf")])
    model, tokenizer = (kind.from_pretrained(tmp_path / "hf") for kind in (AutoModelForCausalLM, AutoTokenizer))
    ids = torch.tensor([tokenizer("Licensed under the Apache License")["input_ids"]])
    with torch.no_grad():
        expected = open_run(into).model()(input_ids=ids).logits
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)
    capsys.readouterr()
    cli.main(["generate", str(into), "Licensed under", "--tokens", "5", "--seed", "1"])
    assert capsys.readouterr().out.startswith("Licensed under")
    other = tmp_path / "other"
    prepare(other, [REPO / "LICENSE", REPO / "README.md"], vocabulary=300, split=("0.5", "0.5", "0"), workers=1)
    with pytest.raises(SystemExit, match="was prepared with another tokenizer"):
        cli.main(["eval", str(into), str(other)])


def everyday(engine):
    """A test for each engine, of which everyday runs have one. test_checkpoint_faults.py has what both share."""
    skipped = pytest.mark.skipif(not EXHAUSTIVE, reason="a variation: EXHAUSTIVE=1 runs it")
    return [each if each == engine else pytest.param(each, marks=skipped) for each in ENTRIES]


@pytest.mark.slow
@pytest.mark.skipif(not EXHAUSTIVE, reason="test_checkpoint_faults.py has it every day; EXHAUSTIVE=1 runs it")
@pytest.mark.parametrize("engine", ENTRIES)
def test_killed_and_resumed_is_as_if_it_had_not_been(engine, whole, tokens, tmp_path):
    """kill -9 of torchrun and every rank in mid-run."""
    folder, _ = whole
    into = tmp_path / "run"
    command = [*torchrun(2), *arguments(engine, tokens, into)]
    start_and_signal(command, into, signal.SIGKILL, after=EVERY)
    assert f"step-{STEPS:08d}" not in checkpoints(into)
    said = run(command)
    assert "resumed from" in said
    assert losses(into) == losses(folder / engine)  # to the last digit
    assert checkpoint_bits(into, EVERY) == checkpoint_bits(folder / engine, EVERY)  # the same seed twice
    assert checkpoint_bits(into, STEPS) == checkpoint_bits(folder / engine, STEPS)  # resumed and not
    assert records(into)[-1]["valid_loss"] == records(folder / engine)[-1]["valid_loss"]


@pytest.mark.slow
@pytest.mark.skipif(not EXHAUSTIVE, reason="cases/megatron_overlap.py has it every day; EXHAUSTIVE=1 runs it")
def test_stopped_between_evaluations_in_bf16_and_resumed(tokens, tmp_path):
    """Megatron gathers the weights of a step in the forward pass after it, and here there is none before the save."""
    settings = ["training.precision=bf16", "training.iterations=8", "evaluation.every=0", "checkpoints.every=4", *SMALL]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    # Without overlap, weights are whole after every step.
    run([*torchrun(2), *arguments("megatron", tokens, whole, *settings, "megatron.overlap=false")])
    for stop in (["--stop-at", "4"], []):
        run([*torchrun(2), *arguments("megatron", tokens, stopped, *settings), *stop])
    assert list(losses(whole)) == list(range(1, 9))
    assert losses(stopped) == losses(whole)  # to the last digit
    for step in (4, 8):
        assert checkpoint_bits(stopped, step) == checkpoint_bits(whole, step)


@pytest.mark.slow
@pytest.mark.parametrize("engine", everyday("deepspeed"))
def test_torchrun_starts_a_job_again_whose_worker_was_killed(engine, whole, tokens, tmp_path):
    """Nobody does anything: it goes on from its newest checkpoint, and ends as if nothing had been."""
    folder, _ = whole
    into = tmp_path / "run"
    with started([*torchrun(2), "--max-restarts=1", *arguments(engine, tokens, into)], into, after=EVERY) as process:
        sockets = [s.laddr.ip for s in rank_process(process, 0).net_connections("tcp") if s.status == "LISTEN"]
        rank_process(process, 1).kill()
        output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output[-4000:]
    assert sockets, "the ranks' store does not listen"
    assert not {"0.0.0.0", "::"}.intersection(sockets), sockets  # torch's own listens at all addresses
    # Rank 0 says what it lost, unless torchrun ends it first, which is chance. The test below has the line. On a busy
    # machine both have ended when torchrun looks, and it names either.
    ended = re.findall(r"failed \(exitcode: -?\d+\) local_rank: [01]", output)
    assert len(ended) == 1, f"{ended}\n{output[:8000]}"
    assert output.count("resumed from") == 1, output[-4000:]
    assert losses(into) == losses(folder / engine)  # to the last digit
    assert checkpoint_bits(into, EVERY) == checkpoint_bits(folder / engine, EVERY)
    assert checkpoint_bits(into, STEPS) == checkpoint_bits(folder / engine, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("engine", everyday("deepspeed"))
def test_a_rank_that_hangs_is_not_waited_for_longer_than_said(engine, tokens, tmp_path):
    """Stopped by SIGSTOP: it is there, holds its connections, and never answers."""
    into, seconds = tmp_path / "run", 12
    more = [f"training.timeout={seconds}", "evaluation.every=0", *SMALL]
    command = [sys.executable, *arguments(engine, tokens, into, *more)]
    meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    other = {**meet, "RANK": "1", "LOCAL_RANK": "1"}
    with subprocess.Popen(command, cwd=REPO, env=environment(**other), stdout=subprocess.DEVNULL) as hanging:
        try:
            with started(command, into, EVERY, **meet, RANK="0", LOCAL_RANK="0") as process:
                hanging.send_signal(signal.SIGSTOP)
                began = time.monotonic()
                output, _ = process.communicate(timeout=seconds + 60)
                waited = time.monotonic() - began
        finally:
            hanging.kill()
    assert process.returncode == 1, output[-4000:]
    assert seconds - 2 < waited < seconds + 30, waited  # the machine may be busy
    (said,) = [line for line in output.splitlines() if line.startswith("alto_distributed pretrain: ")]
    assert "rank 0 lost contact with another rank: Timed out waiting 12000ms" in said
    assert "has not answered for training.timeout=12 seconds" in said
    newest = checkpoints(into)[-1]
    assert said.endswith(f"The same command goes on from the newest checkpoint, {into}/checkpoints/{newest}")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENTRIES)
def test_resumed_on_one_rank_where_two_had_saved(engine, whole, tokens, tmp_path):
    folder, _ = whole
    into = begun_from(folder, engine, EVERY, tmp_path / "run")
    if engine == "deepspeed":  # by its own launcher
        start = [beside_python("deepspeed"), "--num_gpus", "1", "--master_port", free_port(), "--module"]
        command = [*start, *arguments(engine, tokens, into)[1:]]
    else:
        command = [*torchrun(1), *arguments(engine, tokens, into)]
    run(command)
    assert list(losses(into).values()) == pytest.approx(list(losses(folder / engine).values()), rel=1e-5)
    valid = [records(path)[-1]["valid_loss"] for path in (into, folder / engine)]
    assert valid[0] == pytest.approx(valid[1], rel=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not EXHAUSTIVE, reason="cases/megatron_checkpoints.py has it every day; EXHAUSTIVE=1 runs it")
def test_resumed_in_another_layout(whole, tokens, tmp_path):
    """And with recomputation, which changes no number."""
    folder, _ = whole
    into = begun_from(folder, "megatron", EVERY, tmp_path / "run")
    layout = ["megatron.tensor_parallel=2", "megatron.sequence_parallel=true", "training.recompute=true"]
    run([*torchrun(2), *arguments("megatron", tokens, into, *layout)])
    assert list(losses(into).values()) == pytest.approx(list(losses(folder / "megatron").values()), rel=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not EXHAUSTIVE, reason="cases/megatron_checkpoints.py has it every day; EXHAUSTIVE=1 runs it")
def test_a_pipeline_whose_checkpoints_would_be_wrong_is_refused_before_it_trains(whole, tokens, tmp_path):
    """The embedding that is tied over stages has a bucket of its own, and this model's sizes need padding before it."""
    folder, _ = whole
    into = begun_from(folder, "megatron", EVERY, tmp_path / "run")
    before = losses(into)
    more = ["megatron.pipeline_parallel=2", "megatron.overlap=false"]
    with pytest.raises(AssertionError, match="writes wrong values into fully_reshardable checkpoints of this model"):
        run([*torchrun(2), *arguments("megatron", tokens, into, *more)])
    assert losses(into) == before


@pytest.mark.slow
def test_asked_to_end_it_saves_first_and_keeps_so_many(tokens, tmp_path):
    """SIGTERM to every process, as a scheduler sends it; in bf16, with TensorBoard."""
    into = tmp_path / "run"
    more = ["training.precision=bf16", "training.iterations=100000", "schedule.warmup=0", "logs.tensorboard=true"]
    more += ["checkpoints.every=2", "checkpoints.keep=3", "evaluation.every=0", "model.sequence=512"]
    more += ["training.global_batch=2", "training.micro_batch=1"]
    output = start_and_signal([*torchrun(1), *arguments("deepspeed", tokens, into, *more)], into, signal.SIGTERM, 6)
    assert "there will be no test at the end: model.sequence=512 needs 513 tokens" in output  # and it goes on
    last = records(into)[-1]["step"]
    assert f"step {last}: stopped as asked; the same command goes on from here" in output, output[-3000:]
    kept = checkpoints(into)
    assert len(kept) == 3
    assert kept[-1] == f"step-{last:08d}"
    assert list((into / "tensorboard").glob("events*"))


@pytest.mark.slow
def test_optimizers_are_compared_from_the_same_start(tokens, tmp_path):
    into = tmp_path / "compared"
    command = [sys.executable, "-m", "alto_distributed", "compare", "--config", "configs/gpt2-tiny.yaml"]
    command += ["--ranks", "1", "--into", str(into), "--optimizers", "alto", "adamw:lr=1e-3,weight_decay=0.1"]
    said = run([*command, f"data.directory={tokens}", *SETTINGS, *SMALL, "training.iterations=6", "evaluation.every=0"])
    runs = [into / "alto", into / "adamw-lr=1e-3-weight_decay=0.1"]
    curves = [losses(path) for path in runs]
    assert curves[0][1] == curves[1][1]  # the same weights and batch
    assert abs(curves[0][6] - curves[1][6]) > 1e-3
    for path in runs:
        assert f"| {path.name}" in said
    assert (into / "report.png").stat().st_size > 10_000
    assert [row["run"] for row in json.loads((into / "report.json").read_text())] == [path.name for path in runs]


@pytest.mark.slow
@pytest.mark.skipif(not EXHAUSTIVE, reason="cases of tests/distributed have it for DeepSpeed")
def test_a_batch_that_grows_is_the_same_in_both_engines(tokens, tmp_path):
    ramp = ["training.batch_ramp={start: 8, step: 8, every: 2}", "training.global_batch=24", "training.micro_batch=4"]
    curves = []
    for engine in ("deepspeed", "megatron"):
        into = tmp_path / engine
        run([*torchrun(2), *arguments(engine, tokens, into, *ramp, "training.iterations=6", "evaluation.every=0")])
        curves.append(losses(into))
        assert [record["global_batch"] for record in records(into) if "loss" in record] == [8, 8, 16, 16, 24, 24]
    assert curves[0] == pytest.approx(curves[1], abs=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not EXHAUSTIVE, reason="a case of tests/distributed has it for DeepSpeed")
def test_a_run_resumed_with_changes_is_the_same_in_both_engines(tokens, tmp_path):
    curves = []
    changes = ["training.iterations=9", "optimizer.lr=0.01", "optimizer.weight_decay=5.0", "schedule.kind=constant"]
    for engine in ("deepspeed", "megatron"):
        into = tmp_path / engine
        command = [
            *torchrun(1),
            *arguments(engine, tokens, into, *SMALL, "training.iterations=6", "evaluation.every=0"),
        ]
        run(command)
        said = run([*command, "--resume-with", *changes])
        assert "step 6: optimizer.weight_decay was 0.0001, is 5.0, from here on" in said
        assert [json.loads(line)["step"] for line in (into / "history.jsonl").read_text().splitlines()] == [6]
        curves.append(losses(into))
        assert [record["lr"] for record in records(into) if "loss" in record][6:] == [0.01] * 3
    assert curves[0].keys() == set(range(1, 10))
    assert curves[0] == pytest.approx(curves[1], abs=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not EXHAUSTIVE, reason="six runs; tests/unit/test_sweep.py has the search and the processes")
def test_a_sweep_finds_rates_that_do_not_diverge_and_goes_on_where_it_was(tokens, tmp_path):
    into = tmp_path / "swept"
    command = [sys.executable, "-m", "alto_distributed", "sweep", "--config", "configs/gpt2-tiny.yaml"]
    command += ["--into", str(into), "--optimizers", "adamw", "adamw:lr=1e18", "--budget", "6", "--rungs", "1"]
    command += ["--seeds", "1", f"data.directory={tokens}", *SETTINGS, *SMALL, "training.iterations=6"]
    said = run(command, timeout=900)
    rows = [[cell.strip() for cell in line.split("|")] for line in said.splitlines() if line.startswith("| adamw")]
    assert [row[1] for row in rows] == ["adamw", "adamw:lr=1e18"]
    assert float(rows[0][4]) < 6.8  # from 6.93
    assert rows[1][4] == "diverged"
    assert (into / "sweep.png").stat().st_size > 10_000
    assert len(list(into.glob("adamw/lr-*/trial.json"))) == 4
    assert len(list(into.glob("adamw/lr-*/checkpoints"))) == 1  # of the run at the best rate
    assert "seed 1234: " not in run(command)  # nothing runs again
