"""The store in which the ranks of a run meet, held by their first rank.

torch would listen on all interfaces, at a port that was free a moment ago and may be another's by then. Here the
socket is bound before anyone is told of its port, and to the one address at which the ranks look for it.

It has no secret. torch's store knows no password, and tells anyone who connects the names of all keys, so that secret
names would be none either.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from typing import Any

import torch.distributed as dist

#: torchrun's variable: ranks are clients of a store that is there already.
USE_EXISTING = "TORCHELASTIC_USE_AGENT_STORE"

_held: list[Any] = []
_used: list[int] = []


def hold(address: str, port: int = 0, *, one_machine: bool = True) -> int:
    """Open a store for as long as this process lives.

    Args:
        address: at which the other ranks reach this one.
        port: to listen at; 0 for any that is free.
        one_machine: whether all ranks are on this one.

    Returns:
        Its port.
    """
    listening = _listen(address, port, one_machine)
    port = int(listening.getsockname()[1])
    stores: Any = dist  # torch's types leave them out
    # Not libuv's: it does not take over a socket in every torch that is supported.
    options = {"is_master": True, "wait_for_workers": False, "use_libuv": False}
    _held.append(stores.TCPStore(address, port, master_listen_fd=listening.detach(), **options))
    return port


def use(port: int) -> None:
    """Have ``init_process_group`` meet in the store at MASTER_ADDR and ``port``, which is open."""
    os.environ["MASTER_PORT"] = str(port)
    os.environ[USE_EXISTING] = "True"
    # Part of the keys under which ranks look for each other. Each of torchrun's agents counts restarts by itself.
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    _used.append(port)


def is_used() -> bool:
    """Whether this process meets the others in such a store."""
    return bool(_used)


def _listen(address: str, port: int, one_machine: bool) -> socket.socket:
    """At one address; at all of this host's if that one is not its own, as behind a service of Kubernetes, or is one
    that other machines do not reach: many hosts give their own name a loopback address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listening = socket.create_server((address, port), family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        return socket.create_server(("", port), backlog=2048)
    if one_machine or not ipaddress.ip_address(listening.getsockname()[0]).is_loopback:
        return listening
    listening.close()
    return socket.create_server(("", port), backlog=2048)
