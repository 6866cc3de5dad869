"""Checkpoints survive faults: ranks killed while they save, damaged and crafted files, full and read-only disks."""

import json
import subprocess
import sys

import pytest

from tests.helpers.cases import EXHAUSTIVE, REPO, every_case
from tests.helpers.launcher import check, environment
from tests.helpers.pretrain_runs import arguments, losses

DEEPSPEED, MEGATRON = "faults", "faults_megatron"
#: Random instants at which ranks are killed, in everyday runs and in exhaustive ones.
RANDOM_KILLS = (24, 120)
#: Of the matrix: instants of kills, instants of refusals and delays, flipped bits; -1 is all that there are.
MATRIX = {
    "light": ((4, 40, 200), (-1, -1, 20_000)),
    "deepspeed": ((1, 12, 100), (-1, -1, 20_000)),
    "megatron": ((1, 12, 100), (-1, -1, 20_000)),
}

#: Of a whole run: instants by action. Those of a real engine take minutes.
RUN = {
    "light": (
        {"kill": 3, "stop": 1, "full": 1, "refuse": 1, "deny": 1, "delay": 1, "refuse@metrics": 1},
        {"kill": -1, "stop": 40, "full": -1, "refuse": -1, "deny": -1, "delay": 40},
    ),
    "deepspeed": ({}, {"kill": 40, "stop": 4, "full": 10, "refuse": 20}),
    "megatron": ({"kill": 1}, {"kill": 40, "stop": 4, "full": 10, "refuse": 20}),
}


#: Files that are written down for people alone.
LOGS = ("metrics.jsonl", "metrics.csv", "starts.jsonl")


def program(name, *arguments, timeout=900):
    """What a program of this folder says, line by line, and what else it printed."""
    command = [sys.executable, "-m", f"tests.distributed.programs.{name}", *map(str, arguments)]
    done = subprocess.run(command, cwd=REPO, env=environment(), capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")], done.stderr[-3000:]


@pytest.mark.parametrize("engine", MATRIX)
def test_faults_at_every_instant_of_a_save(engine, tmp_path):
    """Killed, without a byte of space, refused, denied or late, before and after each file, rename and collective."""
    counts = MATRIX[engine][EXHAUSTIVE]
    lines, said = program("fault_matrix", engine, tmp_path / "run", *counts, 7, timeout=7200 if EXHAUSTIVE else 900)
    events, trials, ends = lines[0]["events"], [line for line in lines if "action" in line], lines[-1]
    assert {"survivors": 0} in lines, (said, [line for line in lines if "said" in line])
    kinds = {event.split()[0] for of_rank in events for event in of_rank}
    assert {"mkdir", "file", "sync", "rename", "remove", "collective"} <= kinds, kinds
    assert all(any(event.startswith("file") for event in of_rank) for of_rank in events)
    kills = [trial for trial in trials if trial["action"] == "kill"]
    others = [trial for trial in trials if trial["action"] != "kill"]
    for trial in others:
        assert trial["right"], (trial, [line for line in lines if "said" in line])
        # A bit that flips after a file was read back is in the checkpoint, and found.
        assert len(trial["damage"]) == (trial["action"] == "flip" and trial["reached"]), trial
        assert trial["action"] not in ("delay", "flip") or trial["ends"] == ["saved", "saved"], trial
    for trial in kills:
        assert trial["damage"] == [], trial
        assert trial["newest"] in (2, 3), trial
        assert trial["loaded"] == [0, 0], (trial, said)
        victim = trial["rank"]
        assert trial["codes"][1 - victim] is not None, trial  # it did not hang
    # Threads of a rank may do things in another order than they were counted in.
    reached = [t["reached"] for t in others] + [t["codes"][t["rank"]] == -9 for t in kills]
    assert sum(reached) >= 0.9 * len(reached), trials
    wanted = [sum(map(len, lines[0]["instants"])) if counts[0] < 0 else counts[0], counts[1]]
    assert len(kills) == wanted[0]
    assert wanted[1] < 0 or len(others) == wanted[1]
    assert ends["flips"] == counts[2]
    assert ends["missed"] == []


def run_lines(engine, directory, *more, timeout=900):
    """What tests/distributed/programs/run_faults.py tells: the run that was left alone, and the rest."""
    counts = [f"{action}={count}" for action, count in RUN[engine][EXHAUSTIVE].items()]
    (about, *lines), said = program("run_faults", engine, directory, 7, *more, *counts, timeout=timeout)
    return about, lines, said


def check_run(about, trials, said):
    assert about["steps"] == ["1", "2", "3", "4", "5"]
    kinds = {event.split()[0] for of_rank in about["events"] for event in of_rank}
    assert {"mkdir", "file", "write", "sync", "rename", "remove", "collective"} <= kinds, kinds
    # The name of the first checkpoint's directory is on the disk too.
    assert any(
        event.startswith("sync") and event.endswith("/peace") for of_rank in about["events"] for event in of_rank
    )
    for trial in trials:
        victim, codes = trial["rank"], trial["codes"]
        assert None not in codes, (trial, said)  # no rank waits for ever
        assert trial["damage"] == [], trial
        assert trial["known"], trial  # what was logged has the bits of the run that was left alone
        assert trial["same"], (trial, said)  # and so have the weights and states at the end
        assert trial["starts"] <= 2, (trial, said)
        assert trial.get("again", [0, 0]) == [0, 0], (trial, said)
        if trial["action"] in ("kill", "stop", "full", "delay"):
            # After a new start there is a record of every step: one is lost only if the disk refused that very one.
            assert trial["losses"] == [] or (trial["action"], trial["starts"]) == ("full", 1), trial
        else:
            assert len(trial["losses"]) <= 1, trial
        if trial["action"] in ("refuse", "deny") and any(log in trial["at"] for log in LOGS):
            assert (codes, trial["starts"]) == ([0, 0], 1), trial  # logging never ends a run
        if trial["action"] == "delay":
            assert (codes, trial["starts"]) == ([0, 0], 1), trial
        if trial["action"] in ("kill", "stop"):
            assert codes[victim] in (-9, 0), trial
    fatal = [trial for trial in trials if trial["action"] in ("kill", "stop")]
    assert sum(trial["codes"][trial["rank"]] == -9 for trial in fatal) >= 0.9 * len(fatal), trials


def test_faults_at_every_instant_of_a_run(tmp_path):
    """Killed, stopped, late, refused or without a byte of space at any collective, log line, file or lock: the same
    command goes on, and losses and weights end with the bits of a run that was left alone."""
    about, (rules, *trials), said = run_lines("light", tmp_path / "run", "rules", timeout=7200 if EXHAUSTIVE else 900)
    check_run(about, trials, said)
    counts = RUN["light"][EXHAUSTIVE]
    for action in {wanted.partition("@")[0] for wanted in counts}:
        done = len([trial for trial in trials if trial["action"] == action])
        count = sum(number for wanted, number in counts.items() if wanted.partition("@")[0] == action)
        assert done == count or (count < 0 and done > 150), (action, done)
    assert any(trial["action"] == "refuse" and "metrics" in trial["at"] for trial in trials)
    rules = rules["rules"]
    ended, (refused, why), meant = rules["other_data"]
    assert (ended, refused, meant) == ([[0, 0], ""], [1, 1], [[0, 0], ""])
    assert "was trained on other data than" in why
    (refused, why), same, (damaged, found), step = rules["own_data"]
    assert (refused, same, damaged, step) == ([1, 1], [[0, 0], ""], [1, 1], 1)
    assert "the ranks of this job do not agree: the checksum of train.bin in data.directory is " in why
    assert "own_data/copy/train.bin is missing or damaged: it is not what was prepared" in found
    (refused, why), later = rules["second_job"]
    assert (refused, later) == ([1, 1], [[0, 0], ""])
    assert "is another job's, which still runs" in why
    why, first, newest = rules["lock_deleted"]
    assert (first, newest) == ([[0, 0], ""], 5)
    assert "is another job's, which still runs" in why
    ranks, ended, _, damage = rules["orphans"]
    assert (ranks, ended, damage) == (2, True, [])


#: Every day one kill in Megatron; in DeepSpeed it costs more, and test_pretrain_runs.py has one under torchrun.
OF_ENGINES = [engine for engine, counts in RUN.items() if engine != "light" and counts[EXHAUSTIVE]]


@pytest.mark.parametrize("engine", OF_ENGINES)
def test_faults_at_instants_of_a_run_of_an_engine(engine, tmp_path):
    about, trials, said = run_lines(engine, tmp_path / "run", timeout=7200)
    check_run(about, trials, said)
    assert len(trials) == sum(RUN[engine][EXHAUSTIVE].values())


def test_killed_while_it_saves(tmp_path):
    """kill -9 of one rank or of both at random instants, and at the points between the steps of a save."""
    count = RANDOM_KILLS[EXHAUSTIVE]
    lines, said = program("checkpoint_faults", "light", tmp_path / "run", count, 7)
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
            assert code == (-9 if rank in trial["victims"] else 3), (trial, said)
        assert trial["phases"][0] != "outside", trial
        if trial["point"]:
            assert trial["phases"][trial["victims"][0]] == trial["point"], trial
        if trial["point"] in ("named", "deleting"):
            assert trial["newest"] == trial["saved"] + 1, trial
    assert end == {"loaded": [0, 0]}, said
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
@pytest.mark.skipif(not EXHAUSTIVE, reason="cases and the light engine have it every day; EXHAUSTIVE=1 runs it")
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
