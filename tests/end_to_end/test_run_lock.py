"""A second job in the directory of a run is refused, until the first has ended, in whatever way."""

import errno
import fcntl
import gc
import shutil
import subprocess
import sys
import time

import pytest

from alto_distributed.pretrain.runtime import run_lock
from tests.helpers.faults import Injector
from tests.helpers.launcher import REPO, environment

OCCUPY = """
import sys, time
from pathlib import Path
from alto_distributed.pretrain.runtime.run_lock import lock_run
lock_run(Path(sys.argv[1]), patience=0)
print("mine", flush=True)
time.sleep(float(sys.argv[2]))
"""


def another_job(directory, seconds=60.0, before=""):
    """A process that has taken the directory."""
    command = [sys.executable, "-c", before + OCCUPY, str(directory), str(seconds)]
    process = subprocess.Popen(command, cwd=REPO, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "mine\n"
    return process


def test_a_second_job_is_refused_until_the_first_is_killed(tmp_path):
    first = another_job(tmp_path / "run")
    with first:
        with pytest.raises(
            ValueError, match=rf"is another job's, which still runs \(process {first.pid} on .*, since "
        ):
            run_lock.lock_run(tmp_path / "run", patience=0.3)
        run_lock.lock_run(tmp_path / "another", patience=0)
        first.kill()
    run_lock.lock_run(tmp_path / "run", patience=0)
    run_lock.lock_run(tmp_path / "run", patience=0)  # it is this process's own
    second = subprocess.run(
        [sys.executable, "-c", OCCUPY, str(tmp_path / "run"), "0"],
        cwd=REPO,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert "is another job's" in second.stderr  # this one has it now


def test_a_loss_of_power_does_not_undo_a_directory_that_was_made(tmp_path):
    with Injector(within=str(tmp_path)) as seen:
        run_lock.lock_run(tmp_path / "all" / "runs" / "run", patience=0)
    synced = [event for event in seen.events if event.startswith("sync")]
    assert [event.rpartition("/")[2] for event in synced] == ["runs", "all", tmp_path.name]


def test_deleting_the_file_does_not_let_a_second_job_in(tmp_path):
    run_lock.lock_run(tmp_path, patience=0)
    (tmp_path / f"{run_lock.NAME}.lock").unlink()
    with pytest.raises(AssertionError):
        another_job(tmp_path, seconds=0)
    with pytest.warns(UserWarning, match="was deleted while this job held it"):
        run_lock.keep_run_lock(tmp_path)
    run_lock.keep_run_lock(tmp_path)


def test_deleting_the_directory_is_noticed_before_anything_is_replaced(tmp_path):
    for name in ("mine", "taken"):
        run_lock.lock_run(tmp_path / name, patience=0)
        shutil.rmtree(tmp_path / name)
    with pytest.warns(UserWarning, match="was deleted while this job held it"):
        run_lock.keep_run_lock(tmp_path / "mine")
    with pytest.raises(AssertionError):
        another_job(tmp_path / "mine", seconds=0)
    with another_job(tmp_path / "taken") as second:
        with pytest.raises(ValueError, match=rf"is another job's, which still runs \(process {second.pid} on "):
            run_lock.keep_run_lock(tmp_path / "taken")
        second.kill()


#: The second job's program, where directories cannot be locked, as on NFS.
NO_DIRECTORIES = """
import errno, fcntl, os, stat
flock = fcntl.flock
def of_files(handle, kind):
    if stat.S_ISDIR(os.fstat(handle).st_mode):
        raise OSError(errno.EBADF, "Bad file descriptor")
    return flock(handle, kind)
fcntl.flock = of_files
"""


def test_where_directories_cannot_be_locked_the_first_job_notices(tmp_path, monkeypatch):
    """The second job gets a lock of its own; the first notices before it writes again."""
    monkeypatch.setattr(fcntl, "flock", fcntl.flock)  # to be put back
    exec(NO_DIRECTORIES, {})
    mine, taken = tmp_path / "mine", tmp_path / "taken"
    for directory in (mine, taken):
        run_lock.lock_run(directory, patience=0)
        run_lock.keep_run_lock(directory)
        (directory / f"{run_lock.NAME}.lock").unlink()
    with pytest.warns(UserWarning, match="was deleted while this job held it"):
        run_lock.keep_run_lock(mine)
    run_lock.keep_run_lock(mine)
    gc.collect()
    with pytest.raises(AssertionError):
        another_job(mine, 0, NO_DIRECTORIES)
    with another_job(taken, before=NO_DIRECTORIES) as second:
        with pytest.raises(ValueError, match=rf"is another job's, which still runs \(process {second.pid} on "):
            run_lock.keep_run_lock(taken)
        second.kill()


def test_a_job_that_is_about_to_end_is_waited_for(tmp_path):
    with another_job(tmp_path, seconds=1.0):
        began = time.monotonic()
        run_lock.lock_run(tmp_path, patience=30)
        assert 0.1 < time.monotonic() - began < 20


@pytest.mark.parametrize("reason", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_where_there_are_no_locks_a_run_goes_on_with_a_warning(reason, tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(reason, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.warns(UserWarning, match="has no locks"):
        run_lock.lock_run(tmp_path, patience=0)


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(OSError, match="run"):
        run_lock.lock_run(tmp_path / "run")
