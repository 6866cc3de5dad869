"""The end of a program that has process groups: their threads end before the interpreter does.

A gloo group runs collectives in threads of its own. Such a thread may hold the last reference to a tensor for a moment
after the collective is done. If it frees the tensor while the interpreter shuts down, the process ends with SIGABRT
("terminate called without an active exception"), and a finished job counts as failed (pytorch/pytorch issue 190489).
``destroy_process_group`` alone does not prevent it: only the destructor of a group joins its threads, and that does not
run while anything refers to the group.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import torch

#: The name that torch gives to the threads of a gloo group.
_WORKER = "pt_gloo_runloop"


def shutdown() -> None:
    """Finish what is under way, destroy all process groups and join their threads.

    Call it on every rank, when engine, model and optimizer are no longer in any variable, for they refer to groups. It
    begins with a barrier, so do not call it after an exception: other ranks may never come.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return
    _synchronize()
    dist.barrier()  # rank 0 may hold the store, which others need while they connect
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    _remove_from_modules(groups)
    gc.collect()
    # These are the last references. Python joins the threads without the interpreter lock, for which they may be
    # waiting. C++ objects that refer to a group, such as DDP's reducer, would hold the lock.
    groups.clear()


def leave() -> None:
    """The last line of a program that has succeeded: :func:`shutdown`, and the exit if threads remain.

    They remain where a framework never drops a group: DeepSpeed's stage 3, whose caches and autograd hooks keep the
    engine, and a DeviceMesh, which FSDP2 has. The interpreter must not shut down then.
    """
    shutdown()
    if not worker_threads():
        return
    end(0)


def end(code: int) -> NoReturn:
    """Exit with process groups alive: all that comes before the interpreter's shutdown, in the same order, and no more.

    A program that succeeds calls :func:`leave` instead. This is for a rank that has lost the others.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if code == 0 and mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()  # mpi4py leaves it to the interpreter's end
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def worker_threads() -> int:
    """Threads of gloo groups in this process. 0 without /proc: the abort is that of Linux's C library."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        try:
            names.append(path.read_text().strip())
        except OSError:  # it has just ended
            continue
    return names.count(_WORKER)


def _synchronize() -> None:
    """Wait for the accelerator, if this process has used one."""
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        is_initialized = getattr(torch.get_device_module(device), "is_initialized", None)
        if is_initialized is None or is_initialized():
            torch.accelerator.synchronize()


def _remove_from_modules(groups: list[Any]) -> None:
    """Remove groups from the variables of all modules, and from lists and dicts there.

    DeepSpeed has no function for it, and Megatron's ``destroy_model_parallel`` leaves some of its variables out.
    """
    known = {id(group) for group in groups}
    for module in list(sys.modules.values()):
        variables = getattr(module, "__dict__", None)
        if not isinstance(variables, dict):
            continue
        for name, value in list(variables.items()):
            if id(value) in known:
                variables[name] = None
            elif type(value) is list and any(id(item) in known for item in value):
                value[:] = [item for item in value if id(item) not in known]
            elif type(value) is dict and any(id(item) in known for item in value.values()):
                for key in [key for key, item in value.items() if id(item) in known]:
                    del value[key]
