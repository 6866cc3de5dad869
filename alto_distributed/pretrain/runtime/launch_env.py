"""Who this process is: from torchrun's variables, or from MPI where mpirun started it."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import signal
import socket
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from ...errors import MissingExtra
from ...extras import what_to_install
from . import own_store

#: Set by the mpirun of Open MPI, of MPICH and Intel MPI, and of MVAPICH.
_MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def read_launch_env() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT if a launcher other than torchrun did not.

    Under mpirun they come from mpi4py: the first rank's host is the master, and it picks a free port. A
    process that nobody launched is a world of one.
    """
    if "RANK" in os.environ:
        return
    if any(name in os.environ for name in _MPI_VARIABLES):
        try:
            from mpi4py import MPI
        except ModuleNotFoundError:
            raise MissingExtra(
                f"mpirun started this process, and {what_to_install('mpi4py')}, or start it with torchrun"
            ) from None
        world = MPI.COMM_WORLD
        rank, size = world.Get_rank(), world.Get_size()
        here = world.Split_type(MPI.COMM_TYPE_SHARED)
        local, one_machine = here.Get_rank(), here.Get_size() == size
        address = world.bcast(os.environ.get("MASTER_ADDR") or _address(one_machine) if rank == 0 else None)
        if not address:
            raise ValueError(
                "mpirun started ranks on several machines, and the first one finds no address of its own that the "
                "others could reach: set MASTER_ADDR to one, as in mpirun -x MASTER_ADDR=10.0.0.1"
            )
        asked = int(os.environ.get("MASTER_PORT", "0"))
        port = world.bcast(own_store.hold(address, asked, one_machine=one_machine) if rank == 0 else None)
    else:
        rank, size, local, address = 0, 1, 0, "127.0.0.1"
        port = own_store.hold(address)
    for name, value in {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local, "MASTER_ADDR": address}.items():
        os.environ[name] = str(value)
    own_store.use(port)


def _address(one_machine: bool) -> str:
    """A number of this host at which all ranks reach it; "" if there is none.

    Many hosts give their own name a loopback address, which on another machine is that machine. Then it is the number
    of the interface that packets to elsewhere leave from.
    """
    if one_machine:
        return "127.0.0.1"
    for find in (_number_of_name, _number_of_route):
        with contextlib.suppress(OSError):
            number = find()
            if not ipaddress.ip_address(number).is_loopback:
                return number
    return ""


def _number_of_name() -> str:
    return socket.gethostbyname(socket.gethostname())


def _number_of_route() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address for documentation; connecting a datagram socket sends nothing
        return str(probe.getsockname()[0])


def end_with_launcher() -> None:
    """Be asked to end, as by SIGTERM, when torchrun dies: nobody else would, and this rank would hold the run's lock.

    Linux alone can do that. A program that was started in another way may outlive its parent, as with nohup.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it died before
            signal.raise_signal(signal.SIGTERM)


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether any rank says so. All of them must ask."""
    said = torch.tensor([float(flag)], dtype=torch.float32, device=device)
    dist.all_reduce(said, op=dist.ReduceOp.MAX)
    return bool(said.item())


def wait_at_most(seconds: float) -> None:
    """Limit how long this rank waits for the others in an exchange, in every process group that there is.

    A group that is made without a limit gets torch's default, not that of the group it was made from.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
