"""All-reduces of a few numbers, wherever these live and whatever memory the process group works in."""

from __future__ import annotations

import datetime
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Seconds for which a rank waits for what others say through the store. Compiling the kernels takes some of them.
PATIENCE = 60.0

_exchanges = itertools.count()

#: Backends that add float64. Sums travel as float32 with any other.
FLOAT64_BACKENDS = {"gloo", "nccl", "mpi", "ucc", "xccl", "fake", "threaded"}


def all_reduce(table: torch.Tensor, group: ProcessGroup, op: str = "SUM") -> torch.Tensor:
    """The sum (or "MAX") of ``table`` over ``group``, back on the table's device.

    With parameters offloaded to the CPU the table is on the CPU too, while NCCL works in GPU memory only: then the
    table is copied there and back, as the offloading engines do with their own norms.
    """
    return reduce_on_group_device(table, group, op).to(table.device)


def reduce_on_group_device(table: torch.Tensor, group: ProcessGroup, op: str = "SUM") -> torch.Tensor:
    """The same, left on the device where ``group`` communicates: one kind of device on all of its ranks."""
    return start_all_reduce(table, group, op)()


def start_all_reduce(table: torch.Tensor, group: ProcessGroup, op: str = "SUM") -> Callable[[], torch.Tensor]:
    """The same, under way; the result waits for it. With NCCL that is the device's stream, not the host."""
    import torch.distributed as dist

    there = table.to(device_for(table.device, group))
    narrow = there.dtype == torch.float64 and not adds_float64(group, there.device)
    sent = there.float() if narrow else there
    work = dist.all_reduce(sent, op=getattr(dist.ReduceOp, op), group=group, async_op=True)

    def result() -> torch.Tensor:
        if work is not None:
            work.wait()
        return sent.double() if narrow else sent

    return result


def adds_float64(group: ProcessGroup, device: torch.device) -> bool:
    """Whether ``group`` has a float64 all-reduce for a device. Those of Ascend, Gaudi and others have none.

    It follows from the name of the backend, so that all ranks give the same answer.
    """
    import torch.distributed as dist

    return _backends(dist.get_backend_config(group)).get(device.type) in FLOAT64_BACKENDS


def gathered_sum(counts: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The exact sum of whole numbers over ``group``, with any backend: they travel as bytes. ``counts`` is int64."""
    import torch.distributed as dist

    sent = counts.contiguous().view(torch.uint8).to(home_of(group))
    received = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(received, sent, group=group)
    return torch.stack([piece.to(counts.device).view(torch.int64) for piece in received]).sum(0)


def anyone_objects(objects: bool, groups: Iterable[ProcessGroup]) -> bool:
    """Whether this rank, or any rank that the groups connect it with, objects to something. Waits for the device.

    A fault goes one group further in each pass. A mesh of n ranks has at most log2(n) dimensions of two or more, so
    after as many passes it is known everywhere, in whatever order ranks list their groups.

    Args:
        objects: whether this rank does.
        groups: each is asked, on whatever device it communicates; so all of its ranks are.
    """
    asked = [group for group in groups if group.size() > 1]
    passes = 1
    if not spans_the_job(group.size() for group in asked):
        import torch.distributed as dist

        passes = (dist.get_world_size() - 1).bit_length() if asked else 0
    for _ in range(passes):
        for group in asked:
            found = torch.full((1,), float(objects), dtype=torch.float32, device=home_of(group))
            objects = bool(all_reduce(found, group, "MAX").item())
    return objects


def spans_the_job(sizes: Iterable[int]) -> bool:
    """Whether something of one of these sizes has all ranks of the job in it, which are several."""
    world = everyone()
    return world is not None and world.size() in sizes


def replicas_object(objects: bool, seconds: float = PATIENCE) -> bool:
    """Whether any rank of the job objects to something, told through the job's store. It cannot hang.

    For replicas that share no process group that the optimizer knows, as under DistributedDataParallel. A rank that
    says nothing in time, because it has no such optimizer, is warned of, and then this rank's own word counts.

    Args:
        objects: whether this rank does.
        seconds: how long to wait for the others.
    """
    import torch.distributed as dist

    if everyone() is None:
        return objects
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    number = next(_exchanges)
    keys = [f"alto_distributed/objects/{number}/{other}" for other in range(dist.get_world_size())]
    store.set(keys[rank], str(int(objects)))
    try:
        store.wait(keys, datetime.timedelta(seconds=seconds))
    except RuntimeError:
        silent = [other for other, key in enumerate(keys) if not store.check([key])]
        warnings.warn(
            f"ALTO: rank {', '.join(map(str, silent))} did not say within {seconds:g} s whether its kernel passed the "
            'self-check. If these ranks hold replicas, name the kernel on all ranks: kernel="triton" or kernel="torch"',
            stacklevel=2,
        )
        return objects
    return any(store.get(key) == b"1" for key in keys)


def device_for(device: torch.device, group: ProcessGroup) -> torch.device:
    """The device on which this rank exchanges numbers with ``group``.

    Its type follows from the group alone. If it followed from the tensors that a rank happens to hold, a rank without
    any would use another backend of the group than the others, and all of them would hang.

    Args:
        device: where the numbers are; it is returned if it is of that type.
        group: the process group.
    """
    import torch.distributed as dist

    device_type = _device_type(dist.get_backend_config(group), accelerator_type())
    if device.type == device_type:
        return device
    bound: torch.device | None = group.bound_device_id
    return bound if bound is not None and bound.type == device_type else torch.device(device_type)


def home_of(group: ProcessGroup) -> torch.device:
    """The device on which a rank makes what it has to exchange with ``group``, if it has no tensors of its own."""
    return device_for(torch.device("cpu"), group)


@functools.lru_cache
def _device_type(backend_config: str, accelerator: str | None) -> str:
    """Of the accelerator if the group has a backend of its own for it; else of the CPU if it has one for that.

    Args:
        backend_config: like "cpu:gloo,cuda:nccl". Gloo serves all devices through the host: "cpu:gloo,cuda:gloo".
        accelerator: the type of this machine's, if it has one.
    """
    backends = _backends(backend_config)
    if accelerator in backends and backends[accelerator] != backends.get("cpu"):
        return accelerator
    return "cpu" if "cpu" in backends else next(iter(backends))


@functools.lru_cache
def _backends(backend_config: str) -> dict[str, str]:
    """Device type -> backend."""
    return dict(entry.split(":", 1) for entry in backend_config.split(","))


@functools.lru_cache(maxsize=1)
def accelerator_type() -> str | None:
    """The device type of this machine's accelerator, if it has one."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if found is None else found.type


class HostCopy:
    """A few numbers on their way from a device to the host, which does not wait for them until it reads them.

    Args:
        numbers: not copied if they are on the host.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self.host = numbers
        self._arrived: torch.Event | None = None
        if numbers.device.type != "cpu":
            self.host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self.host.copy_(numbers, non_blocking=True)
            self._arrived = torch.Event(numbers.device)
            self._arrived.record(torch.accelerator.current_stream(numbers.device))

    def read(self) -> torch.Tensor:
        """They, once they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self.host


def everyone(group: ProcessGroup | None = None) -> ProcessGroup | None:
    """``group``, or all ranks of the job; None where there is nobody to talk to."""
    import torch.distributed as dist

    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = dist.group.WORLD
    return group if group is not None and group.size() > 1 else None
