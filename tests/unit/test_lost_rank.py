"""Which errors of a collective are taken for a lost rank: the others must be told as they are."""

import pytest
import torch
import torch.distributed as dist

from alto_distributed.sharding.agreement import require_agreement
from alto_distributed.sharding.lost_rank import lost_rank

LOST = [
    RuntimeError("[/a/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:41195. GLHF"),
    RuntimeError("Application timeout caused pair closure"),
    dist.DistBackendError("NCCL error: ncclRemoteError: A call failed possibly due to a remote process exiting"),
    dist.DistBackendError("NCCL communicator was aborted on rank 3."),
    dist.DistBackendError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 600000 ms"),
    dist.DistStoreError("wait timeout after 300000ms, keys: /default_pg/0//cpu//0/1"),
    dist.DistNetworkError("The client socket has timed out after 300000ms while trying to connect"),
    dist.DistStoreError("Timed out after 61 seconds waiting for clients. 1/2 clients joined."),
]
OTHERS = [
    dist.DistBackendError("Attempt to perform collective on tensor not on device passed to init_process_group"),
    dist.DistBackendError("NCCL error: invalid usage. Duplicate GPU detected : rank 0 and rank 1 both on CUDA device"),
    dist.DistBackendError("NCCL error: unhandled cuda error. Cuda failure 'out of memory'"),
    dist.DistBackendError("NCCL error: invalid usage, mismatched versions of NCCL: 2.27.3 and 2.29.7"),
    dist.DistNetworkError("The server socket has failed to listen on any local network address. EADDRINUSE"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("the loss is nan at step 3: lower optimizer.lr, or look at the data"),
    ValueError("no connection reset, and no collective either"),
]


@pytest.mark.parametrize("error", LOST, ids=str)
def test_a_lost_rank(error):
    said = lost_rank(error)
    assert said
    assert said in str(error)
    caused = RuntimeError("another")
    caused.__cause__ = error
    assert lost_rank(caused) == said


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_another_error(error):
    """A wrong device was reported as "lost contact with another rank", without its traceback."""
    assert lost_rank(error) is None


@pytest.mark.parametrize(("error", "told"), [(LOST[3], "not all of them came"), (OTHERS[0], "not on device passed")])
def test_the_first_comparison_of_settings_tells_them_apart(error, told, monkeypatch):
    def fails(*_, **__):
        raise error

    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        monkeypatch.setattr(dist, "all_gather", fails)
        with pytest.raises(RuntimeError, match=told):
            require_agreement(dist.group.WORLD, {"a": "b"})
    finally:
        dist.destroy_process_group()
