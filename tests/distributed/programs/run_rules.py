"""What the training loop sees to: one job a directory, the data of the checkpoint, and the end of its launcher.

Each rule is tried with forked ranks and an engine of torch alone (tests/helpers/light_engine.py), for run_faults.py.
What the parts do by themselves is in tests/end_to_end/test_run_lock.py and test_restarts.py; here it is seen that the
loop asks them.
"""

import dataclasses
import logging
import os
import shutil
import signal
import time
import warnings
from pathlib import Path

from alto_distributed.pretrain import trainer
from alto_distributed.pretrain.checkpoint.manager import Checkpoints
from alto_distributed.pretrain.runtime.run_lock import NAME, lock_run
from tests.helpers.faults import flip
from tests.helpers.light_engine import EVERY, LightEngine

from .fault_matrix import in_ranks


def outcomes(run, place):
    """By rule: how each start of it ended, with what was said."""
    rules = (other_data, own_data, second_job, lock_deleted, orphans)
    return {rule.__name__: rule(run, place / rule.__name__) for rule in rules}


def start(run, place, directory, **options):
    """How the ranks ended, and what the last one had to say. ``run`` is a run, or gives one for a rank."""
    said = place / "said"
    said.unlink(missing_ok=True)

    def work(rank):
        warnings.simplefilter("ignore")
        logging.disable()
        trainer.build = options.pop("build", LightEngine)
        try:
            trainer.train(run(rank) if callable(run) else run, directory, **options)
        except Exception as error:
            said.write_text(str(error))
            raise

    codes = in_ranks(work, place / "meeting")
    return codes, said.read_text() if said.exists() else ""


def other_data(run, place):
    place.mkdir()
    elsewhere = dataclasses.replace(run, data=dataclasses.replace(run.data, directory=str(place.parent / "other data")))
    return [
        start(run, place, place / "run", stop_at=EVERY),
        start(elsewhere, place, place / "run"),
        start(elsewhere, place, place / "run", other_data=True),
    ]


def own_data(run, place):
    """Each rank has a directory of its own: with other data, with the same, and with the same but for a bit."""
    place.mkdir()
    copy = place / "copy"
    shutil.copytree(run.data.directory, copy)

    def on_rank_1(directory):
        elsewhere = dataclasses.replace(run, data=dataclasses.replace(run.data, directory=str(directory)))
        return lambda rank: elsewhere if rank else run

    ended = [
        start(on_rank_1(place.parent / "other data"), place, place / "run"),
        start(on_rank_1(copy), place, place / "not there" / ".." / "run", stop_at=1),  # as --into may be given
    ]
    saved = Checkpoints(place / "run" / "checkpoints", run).newest()
    flip(copy / "train.bin")
    return [*ended, start(on_rank_1(copy), place, place / "run"), saved and saved.step]


def second_job(run, place):
    """While another process has the directory, and after that was killed."""
    place.mkdir()
    run = dataclasses.replace(run, training=dataclasses.replace(run.training, timeout=2.0))  # waits for half of it
    holder = in_the_background(lambda: lock_run(place / "run", patience=0))
    refused = start(run, place, place / "run")
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    return [refused, start(run, place, place / "run", stop_at=1)]


def lock_deleted(run, place):
    """Somebody deletes the lock in mid-run, and another job comes: it is refused, and the first goes on."""
    place.mkdir()
    deleted, answer = place / "deleted", place / "answer"

    class Deleting(LightEngine):
        def train(self, *arguments):
            if self.data_parallel_rank == 0 and not deleted.exists():
                (place / "run" / f"{NAME}.lock").unlink()
                deleted.touch()
                wait_until(answer.exists)
            return super().train(*arguments)

    def come():
        wait_until(deleted.exists)
        try:
            lock_run(place / "run", patience=0)
        except ValueError as error:
            (place / "said by the second").write_text(str(error))
        answer.touch()

    other = in_the_background(come, wait=False)
    codes, said = start(run, place, place / "run", build=Deleting)
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    second = place / "said by the second"
    saved = Checkpoints(place / "run" / "checkpoints", run)
    return [second.read_text() if second.exists() else "", (codes, said), saved.newest() and saved.newest().step]


def orphans(run, place):
    """The launcher is killed in mid-run: the ranks save and end."""
    place.mkdir()
    run = dataclasses.replace(run, training=dataclasses.replace(run.training, iterations=10**6))
    os.environ["TORCHELASTIC_RUN_ID"] = "here"  # as torchrun sets it
    launcher = in_the_background(lambda: start(run, place, place / "run"), wait=False)
    del os.environ["TORCHELASTIC_RUN_ID"]
    saved = Checkpoints(place / "run" / "checkpoints", run)
    wait_until(lambda: saved.newest() is not None)
    ranks = [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    ended = wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
    for pid in ranks if not ended else ():
        os.kill(pid, signal.SIGKILL)
    return [len(ranks), ended, saved.newest().step % EVERY, saved.damage(saved.newest())]


def in_the_background(work, wait=True):
    """A process that does something and stays there until it is killed, or its parent dies. Returns its id."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os.write(writing, b"x")
            parent = os.getppid()
            while os.getppid() == parent:
                time.sleep(0.05)
        finally:
            os._exit(0)
    os.close(writing)
    if wait:
        os.read(reading, 1)
    os.close(reading)
    return pid


def wait_until(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return bool(condition())
