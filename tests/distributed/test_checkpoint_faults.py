"""Checkpoints survive faults: ranks killed while they save, damaged and crafted files, full and read-only disks."""

import json
import subprocess
import sys

import pytest

from tests.helpers.cases import EXHAUSTIVE, REPO, every_case
from tests.helpers.launcher import check, environment
from tests.helpers.pretrain_runs import arguments, losses

DEEPSPEED, MEGATRON = "faults", "faults_megatron"
#: Instants at which ranks are killed, in everyday runs and in exhaustive ones.
TRIALS = {"light": (24, 120), "deepspeed": (2, 16), "megatron": (2, 16)}


@pytest.mark.parametrize("engine", TRIALS)
def test_killed_while_it_saves(engine, tmp_path):
    """kill -9 of one rank or of both at random instants, and at the points between the steps of a save."""
    count = TRIALS[engine][EXHAUSTIVE]
    command = [
        sys.executable,
        "-m",
        "tests.distributed.programs.checkpoint_faults",
        engine,
        str(tmp_path / "run"),
        str(count),
        "7",
    ]
    done = subprocess.run(command, cwd=REPO, env=environment(), capture_output=True, text=True, timeout=900)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr[-3000:]
    *trials, end = lines
    assert len(trials) == count
    last = 0
    for trial in trials:
        assert trial["damage"] == [], trial
        # The newest is the last that was reported as saved, or the one that the kill came too late for.
        assert trial["newest"] in (trial["saved"], trial["saved"] + 1), trial
        assert trial["newest"] > last, trial  # it had gone on from the one before
        last = trial["newest"]
        for rank, code in enumerate(trial["codes"]):
            # The victim died by the signal; the other noticed and ended by itself: None would be a rank that hung.
            assert code == (-9 if rank in trial["victims"] else 3), (trial, done.stderr[-3000:])
        assert trial["phases"][0] != "outside", trial
        if trial["point"]:
            assert trial["phases"][trial["victims"][0]] == trial["point"], trial
        if trial["point"] in ("named", "deleting"):
            assert trial["newest"] == trial["saved"] + 1, trial
    assert end == {"loaded": [0, 0]}, done.stderr[-3000:]
    if engine == "light":
        assert len({trial["phases"][0] for trial in trials}) >= 7, trials
        assert {tuple(trial["victims"]) for trial in trials} == {(0,), (1,), (0, 1)}
        assert len({trial["phases"][0] for trial in trials if trial["point"] is None}) >= 3, trials


@pytest.mark.parametrize("case", every_case(DEEPSPEED, 2))
def test_deepspeed(case, directory):
    check(case, directory)


@pytest.mark.parametrize("case", every_case(MEGATRON, 2))
def test_megatron(case, directory):
    check(case, directory)


@pytest.mark.slow
def test_the_program_goes_on_without_checkpoints_and_ends_with_an_error(tokens, tmp_path):
    """All of it, where no file may be larger than 500 kB, as under a quota."""
    into = tmp_path / "run"
    more = ["training.iterations=3", "checkpoints.every=1", "schedule.warmup=1", "evaluation.every=0"]
    command = [sys.executable, *arguments("deepspeed", tokens, into, *more)]
    limited = ["bash", "-c", 'ulimit -f 500; exec "$@"', "-", *command]
    done = subprocess.run(limited, cwd=REPO, env=environment(), capture_output=True, text=True, timeout=300)
    output = done.stdout + done.stderr
    assert done.returncode == 1, output[-3000:]
    for step in (1, 2):
        assert f"step {step}: NOT saved, going on without: {into}/checkpoints/step-0000000{step} could not" in output
    assert f"alto_distributed pretrain: {into}/checkpoints/step-00000003 could not be written: " in output
    assert "There is no checkpoint of this run yet" in output
    assert list(losses(into)) == [1, 2, 3]
    assert list((into / "checkpoints").iterdir()) == []
