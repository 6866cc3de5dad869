"""A place of their own for the ranks of each start to find each other.

torchrun lends its ranks the store that its agents use, and after a restart they find there what the ranks before them
had left: addresses where nobody listens any more (pytorch/pytorch issues 135712 and 167288). Nothing that a rank knows
tells it apart from its predecessor in the same way on all machines, for each agent counts restarts by itself. So the
ranks of a start get to know one another by numbers drawn anew, and then leave that store for one that their first rank
holds.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from . import own_store


def rendezvous_again(seconds: float) -> None:
    """Move to a new store, where this process has been lent torchrun's. Called by all ranks.

    Raises:
        torch.distributed.DistError: another rank did not come within that time.
    """
    if os.environ.get(own_store.USE_EXISTING) != "True" or own_store.is_used():
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = timedelta(seconds=seconds)
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    stores: Any = dist  # torch's types leave them out
    store = stores.PrefixStore("alto_distributed", stores.TCPStore(*where, is_master=False, timeout=limit))
    own_store.use(_invite(store, world, limit) if rank == 0 else _accept(store, rank, seconds))


def _invite(store: Any, world: int, limit: timedelta) -> int:
    """Rank 0: say who it is, wait until all others have answered to that, and tell them whose answers it has."""
    one_machine = int(os.environ.get("LOCAL_WORLD_SIZE", world)) == world
    me, port = uuid.uuid4().hex, own_store.hold(os.environ["MASTER_ADDR"], one_machine=one_machine)
    store.set("first", me)
    answers = [f"{me}/{rank}" for rank in range(1, world)]
    if answers:
        store.wait(answers, limit)
    others = [value.decode() for value in store.multi_get(answers)] if answers else []
    store.set(f"{me}/begin", json.dumps({"port": port, "ranks": [me, *others]}))
    return port


def _accept(store: Any, rank: int, seconds: float) -> int:
    """Another rank: answer whoever says to be rank 0, until one of them has this very process among its ranks."""
    me, answered, until = uuid.uuid4().hex, "", time.monotonic() + seconds
    while time.monotonic() < until:
        first = store.get("first").decode()  # waits for one
        if first != answered:
            store.set(f"{first}/{rank}", me)
            answered = first
        if store.check([f"{first}/begin"]):
            begin = json.loads(store.get(f"{first}/begin"))
            if begin["ranks"][rank] == me:
                return int(begin["port"])
        time.sleep(0.02)
    raise dist.DistStoreError(f"rank 0 did not come within {seconds:g} seconds")
