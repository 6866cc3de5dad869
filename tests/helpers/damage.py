"""What tests do to checkpoints and disks, and the checks that both engines share. Called by two ranks."""

import contextlib
import json
import os
import pickle
import re
import resource
import shutil
import subprocess

import pytest
import torch
import torch.distributed as dist

from alto_distributed.pretrain.checkpoint import manifest
from alto_distributed.pretrain.checkpoint.manager import Checkpoint, Checkpoints


def once(work):
    """On rank 0, while the other waits, having come out of what was before."""
    dist.barrier()
    result = [work() if dist.get_rank() == 0 else None]
    dist.barrier()
    return result[0]


def same_everywhere(message):
    messages = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    assert len(set(messages)) == 1, messages
    return message


def refused(kind, work):
    """The message of an error that all ranks must raise, and the same."""
    with pytest.raises(kind) as caught:
        work()
    return same_everywhere(str(caught.value))


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def swap(path, other):
    aside = path.with_name("aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


def damaged_are_refused(engine, checkpoints, shard, other):
    """Every kind of damage to rank 1's ``shard``, a path in a checkpoint; ``other`` is another file of it."""
    first, second = (checkpoints.directory / f"step-{step:08d}" for step in (1, 2))
    kept = {name: (second / name).read_bytes() for name in (shard, other, manifest.NAME)}
    newest = checkpoints.newest()
    states = next(iter(manifest.read(second).files[shard].states.items()))
    for damage, message in (
        (truncate, "truncated: .* bytes instead of "),
        (flip, "changed since it was written: its checksum is another"),
        (os.remove, "missing"),
        (lambda path: swap(path, second / other), f"swapped: it holds what {other} should hold"),
    ):
        once(lambda damage=damage: damage(second / shard))
        said = refused(ValueError, lambda: checkpoints.load(engine, newest))
        assert f"{second} is damaged and was not loaded: " in said
        part = next(part for part in said.split("; ") if f"{shard}, written by" in part)
        assert f"{shard}, written by rank 1 ({' '.join(states)}" in part, said
        assert re.search(message, part), said
        assert f"The checkpoint of step 1, {first}, is whole" in said
        assert f"start again: mv {second} {second}.damaged" in said
        once(lambda: [(second / name).write_bytes(content) for name, content in kept.items()])
    once(lambda: flip(second / manifest.NAME))
    assert f"{manifest.NAME}: " in refused(ValueError, lambda: checkpoints.load(engine, newest))
    once(lambda: os.remove(second / manifest.NAME))
    assert f"{manifest.NAME}: missing" in refused(ValueError, lambda: checkpoints.load(engine, newest))
    # What the message says to do works, and then a damaged first one has nothing before it.
    once(lambda: second.rename(f"{second}.damaged"))
    assert checkpoints.newest() == Checkpoint(1, first)
    checkpoints.load(engine, checkpoints.newest())
    once(lambda: flip(first / shard))
    said = refused(ValueError, lambda: checkpoints.load(engine, checkpoints.newest()))
    assert "There is no whole one before it" in said


class Payload:
    """Pickled code: it leaves a file where it is told."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def reseal(checkpoint, name):
    """A manifest that fits a file that was exchanged: the enemy's work is no worse than ours."""
    content = json.loads((checkpoint / manifest.NAME).read_text())
    whole = manifest.read(checkpoint)
    entry = manifest.entry_of(checkpoint / name, 1, whole.files[name].states)
    files = {**whole.files, name: entry}
    manifest.write(checkpoint, manifest.Manifest(whole.step, whole.world_size, content["versions"], files))


def code_is_not_run(engine, checkpoints, name, poison):
    """``poison(path, payload)`` puts code into a file of the newest checkpoint."""
    newest = checkpoints.newest()
    trace = checkpoints.directory / f"it ran {name.replace('/', ' ')}"
    kept = (newest.path / name).read_bytes(), (newest.path / manifest.NAME).read_bytes()
    once(lambda: (poison(newest.path / name, Payload(trace)), reseal(newest.path, name)))
    said = refused(ValueError, lambda: checkpoints.load(engine, newest))
    assert f"{newest.path} was not loaded, for it holds more than data: " in said
    assert os.path.basename(name) in said
    assert "posix.mkdir" in said, said
    assert not trace.exists()
    dist.barrier()
    once(lambda: [(newest.path / n).write_bytes(c) for n, c in zip((name, manifest.NAME), kept, strict=True)])
    checkpoints.load(engine, newest)


def poison_torch(path, payload):
    content = torch.load(path, weights_only=False)
    content["more"] = payload
    torch.save(content, path)


def poison_pickle(path, payload):
    content = pickle.loads(path.read_bytes())
    content.planner_data = payload
    path.write_bytes(pickle.dumps(content))


@contextlib.contextmanager
def files_no_larger_than(limit, ranks):
    """The kernel refuses more, as with a quota, on some of the ranks."""
    if dist.get_rank() in ranks:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def a_quota_on_one_rank_stops_all(engine, run, directory):
    """Whichever rank it is: all raise the same, nothing is left, the one before stays, and the next save works."""
    checkpoints = Checkpoints(directory, run)
    checkpoints.save(engine, 1)
    for limit, ranks in ((2000, [1]), (2000, [0]), (500, [0]), (2000, [0, 1])):
        with files_no_larger_than(limit, ranks):
            said = refused(OSError, lambda: checkpoints.save(engine, 2))
        assert f"{directory / 'step-00000002'} could not be written" in said
        assert "A checkpoint needs " in said
        assert f"The newest checkpoint is {directory / 'step-00000001'}" in said
        assert sorted(path.name for path in directory.iterdir()) == ["step-00000001"]
        dist.barrier()
    checkpoints.save(engine, 2)
    checkpoints.load(engine, checkpoints.newest())
    assert checkpoints.newest().step == 2


@contextlib.contextmanager
def small_disk(directory, size):
    """A file system of so many bytes; yields whether it is there, for not everybody may mount."""
    told = [None]
    if dist.get_rank() == 0:
        directory.mkdir(parents=True)
        options = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
        told = [1 if shutil.which("mount") is None else subprocess.run(options, capture_output=True).returncode]
    dist.broadcast_object_list(told, src=0)
    try:
        yield told[0] == 0
    finally:
        dist.barrier()
        if dist.get_rank() == 0 and told[0] == 0:
            subprocess.run(["umount", "-l", str(directory)], check=True)
        dist.barrier()
