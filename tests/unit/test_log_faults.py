"""Faults at every instant at which a run writes its log: training goes on, and what is there are whole records."""

import contextlib
import os
import shutil
import warnings

import pytest

from alto_distributed.pretrain import metrics as logs
from alto_distributed.pretrain import starts
from alto_distributed.pretrain.checkpoint import changes
from alto_distributed.pretrain.checkpoint.manager import HISTORY
from alto_distributed.pretrain.config.settings import Run
from tests.helpers.faults import Fault, Injector

STEPS = range(1, 7)


def trained(directory):
    """A run that begins, is resumed after three steps, and writes a record a step."""
    for start in (0, 3):
        with logs.Log(directory, start, 9, tensorboard=False, speaks=True) as log:
            for step in range(start + 1, start + 4):
                log.record(step, {"loss": float(step)})
                log.progress(float(step))


def counted(directory):
    """All instants, as (number, after), and the events."""
    with Injector(within=str(directory)) as injector:
        trained(directory)
    assert {event.split()[0] for event in injector.events} == {"mkdir", "file", "rename", "write"}
    return injector.instants, injector.events


def noted(directory):
    """What else a start writes down: itself, and what it changes."""
    starts.note_start(directory, Run(), 3, 2)
    changes.note_changes(directory / HISTORY, 3, [changes.Change("training.clip", 1.0, 2.0)])


@pytest.mark.parametrize("action", ["full", "refuse", "deny"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("event", ["write N/starts.jsonl", f"write N/{HISTORY}"])
def test_a_disk_that_refuses_the_lines_of_a_start(event, after, action, tmp_path):
    directory = tmp_path / "step-3"
    with Injector(within=str(tmp_path)) as injector:
        noted(directory)
    number = injector.events.index(event)
    shutil.rmtree(directory)
    with (
        warnings.catch_warnings(record=True) as said,
        Injector(Fault(number, after, action), str(tmp_path)) as injector,
    ):
        warnings.simplefilter("always")
        noted(directory)
    assert injector.reached
    late = after and action == "full" and HISTORY in event  # nothing is written after it
    assert all("cannot be written" in str(one.message) for one in said)
    assert bool(said) != late
    for path in directory.iterdir():
        assert path.read_text().count("\n") in (0, 1)  # a whole line, or none
    noted(directory)
    assert len(starts.read(directory)) in (1, 2)
    assert len((directory / HISTORY).read_text().splitlines()) == 1


def test_a_directory_in_the_place_of_a_start_s_files_does_not_end_a_run(tmp_path):
    for name in (HISTORY, starts.FILE):
        (tmp_path / name).mkdir()
    with pytest.warns(UserWarning, match="Is a directory"):
        noted(tmp_path)


def steps(directory):
    found = [record["step"] for record in logs.read(directory)]  # raises at a line that is none
    assert found == sorted(set(found)), found
    return set(found)


@pytest.mark.parametrize("action", ["full", "refuse", "deny"])
def test_a_disk_that_refuses_at_any_instant(action, tmp_path):
    instants, _ = counted(tmp_path / "counted")
    for count, (number, after) in enumerate(instants):
        directory = tmp_path / f"{count}"
        with warnings.catch_warnings(), Injector(Fault(number, after, action), str(directory)) as injector:
            warnings.simplefilter("ignore")
            trained(directory)
        assert injector.reached
        # One that was refused lost a record of one file at most; a full disk all that came after.
        there = steps(directory)
        assert action == "full" or len(set(STEPS) - there) <= 1, (injector.events[number], after, there)


def test_killed_at_any_instant(tmp_path):
    instants, events = counted(tmp_path / "counted")
    for count, (number, after) in enumerate(instants):
        directory = tmp_path / f"{count}"
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException), Injector(Fault(number, after, "kill"), str(directory)):
                trained(directory)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -9
        known = steps(directory)
        assert known == set(range(1, len(known) + 1))
        written = [event for event in events[: number + after] if event.startswith("write") and "jsonl" in event]
        assert len(known) == len(written), (events[number], after)  # none before the kill is lost
        with logs.Log(directory, len(known), 9, tensorboard=False, speaks=True) as log:
            log.record(len(known) + 1, {"loss": 1.0})
        assert steps(directory) == {*known, len(known) + 1}
