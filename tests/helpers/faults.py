"""Faults at named points: a process is killed, stopped, delayed or refused before or after what it does.

An :class:`Injector` stands between this process and the functions below, and counts the calls. Each is an event:

    file NAME          a file is opened for writing, or written by torch.save
    write NAME         os.write, as log lines are
    mkdir, sync, rename, remove NAME
    collective KIND    one of torch.distributed, outermost calls only

An instant is before or after an event, if it did not raise. What there is, a run without a fault tells
(:attr:`Injector.events`, :attr:`Injector.instants`). The package has no hook for it: functions of ``os``, ``io``,
``torch`` and ``torch.distributed`` are replaced meanwhile.

A process that tests start in another way than by a fork takes its fault from the environment:

    FAULT='{"event": 7, "after": true, "action": "kill", "rank": 1}' python -m tests.helpers.faults PROGRAM ...
"""

import builtins
import contextlib
import dataclasses
import errno
import functools
import io
import json
import os
import re
import resource
import runpy
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

#: What an instant may bring. "full" leaves this process no byte on any disk until the injector ends; "refuse" is one
#: ENOSPC and "deny" one EACCES, in place of what the event would have done, or after it.
ACTIONS = ("kill", "stop", "delay", "full", "refuse", "deny", "flip")
#: Those that only a disk does.
OF_DISKS = ("refuse", "deny", "flip")

_COLLECTIVES = (
    *("barrier", "monitored_barrier", "all_reduce", "broadcast", "all_gather", "all_gather_into_tensor"),
    *("reduce_scatter_tensor", "gather", "gather_object", "scatter_object_list", "all_gather_object"),
    *("broadcast_object_list", "all_to_all", "all_to_all_single", "send", "recv"),
)


@dataclasses.dataclass(frozen=True)
class Fault:
    event: int
    """Its number, from 0."""
    after: bool
    action: str

    def __post_init__(self):
        if self.action not in ACTIONS:
            raise ValueError(f"{self.action} is none of {', '.join(ACTIONS)}")


def on_disk(event):
    """Whether the disk could refuse it."""
    return not event.startswith("collective")


class Injector:
    """Counts events of this process while it is entered, and brings a fault at one of them.

    Args:
        fault: what happens, and when; None to count alone.
        within: only events of files whose path holds this text.
    """

    def __init__(self, fault=None, within=""):
        self.fault, self.within = fault, within
        self.events, self.instants, self.reached = [], [], False
        self._lock, self._inside, self._stack = threading.Lock(), threading.local(), contextlib.ExitStack()

    def __enter__(self):
        self._replace(builtins, "open", self._open)
        self._replace(io, "open", self._open)
        self._replace(torch, "save", functools.partial(self._named, "file", 1))
        self._replace(os, "write", self._write)
        for name, kind, which in (
            *(("mkdir", "mkdir", 0), ("fsync", "sync", 0), ("rename", "rename", 0), ("replace", "rename", 0)),
            *(("unlink", "remove", 0), ("remove", "remove", 0), ("rmdir", "remove", 0)),
        ):
            self._replace(os, name, functools.partial(self._named, kind, which))
        for name in _COLLECTIVES:
            for module in (dist, dist.distributed_c10d):
                if hasattr(module, name):
                    self._replace(module, name, functools.partial(self._collective, name))
        self._stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE))
        return self

    def __exit__(self, *_):
        self._stack.close()

    def _replace(self, owner, name, wrapped):
        original = getattr(owner, name)
        self._stack.callback(setattr, owner, name, original)
        setattr(owner, name, functools.wraps(original)(functools.partial(wrapped, original)))

    # -- what is replaced ------------------------------------------------------------------------------------

    def _open(self, original, file, mode="r", *args, **kwargs):
        if not set(mode) & set("wxa+"):
            return original(file, mode, *args, **kwargs)
        return self._event("file", file, lambda: original(file, mode, *args, **kwargs))

    def _named(self, kind, which, original, *args, **kwargs):
        where = args[which]
        if kwargs.get("dir_fd") is not None:  # as shutil.rmtree does
            where = f"{_path(kwargs['dir_fd'])}/{where}"
        return self._event(kind, where, lambda: original(*args, **kwargs))

    def _write(self, original, file, data):
        return self._event("write", file, lambda: original(file, data))

    def _collective(self, name, original, *args, **kwargs):
        return self._event("collective", name, lambda: original(*args, **kwargs))

    # -- what happens ----------------------------------------------------------------------------------------

    def _event(self, kind, what, work):
        path = what if kind == "collective" else _path(what)
        if getattr(self._inside, "one", False) or (kind != "collective" and self.within not in path):
            return work()
        self._inside.one = True
        try:
            with self._lock:
                number = len(self.events)
                self.events.append(f"{kind} {_without_numbers(path)}")
            self._at(number, False, path)
            result = work()
            self._at(number, True, path)
            return result
        finally:
            self._inside.one = False

    def _at(self, number, after, path):
        fault = self.fault
        self.instants.append((number, after))
        if fault is None or (fault.event, fault.after) != (number, after):
            return
        if fault.action in OF_DISKS and not on_disk(self.events[number]):
            return  # things were done in another order than when they were counted
        self.reached = True
        if fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.action == "delay":
            time.sleep(0.2)
        elif fault.action == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        elif fault.action == "flip":
            flip(path)
        else:
            reason = errno.ENOSPC if fault.action == "refuse" else errno.EACCES
            raise OSError(reason, f"{os.strerror(reason)} (injected)", path)


def flip(path, bit=None):
    """Change one bit of a file, by default in its middle."""
    bit = os.path.getsize(path) * 4 if bit is None else bit
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte[0] ^ (1 << bit % 8)]))


def _path(what):
    if isinstance(what, int):
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/self/fd/{what}")
        return ""
    return os.fspath(what) if isinstance(what, (str, os.PathLike)) else ""


def _without_numbers(path):
    """The last two parts of a path, with no number that differs from step to step."""
    return re.sub(r"step-\d+|beside-\d+", "N", "/".join(path.split("/")[-2:]))


def main(program, *arguments):
    """Run a module or a script with the fault that the environment names, on the rank that it names."""
    wanted = json.loads(os.environ["FAULT"])
    sys.argv = [program, *arguments]
    start = runpy.run_path if program.endswith(".py") else functools.partial(runpy.run_module, alter_sys=True)
    if int(os.environ.get("RANK", 0)) != wanted.pop("rank", 0):
        start(program, run_name="__main__")
        return
    within = wanted.pop("within", "")
    with Injector(Fault(**wanted), within):
        start(program, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
