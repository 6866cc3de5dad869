"""Saves in the background (``--async-save``): what is written is what there was when the save began.

On a GPU the tensors are copied to the host before training goes on. Here there is no such copy: a forked process has
the memory as it was, and a persistent one reads what the ranks share with it, which is why those ranks wait.
"""

import contextlib
import multiprocessing
from unittest import mock

import pytest
import torch

from tests.helpers import devices
from tests.helpers.cases import each, worlds
from tests.helpers.megatron_saves import (
    AFTER,
    BEFORE,
    BF16,
    EP2,
    EXPERTS,
    OFFLOAD,
    RUNS,
    Run,
    advance,
    assert_same,
    engine_for,
    load,
    other_engine_for,
    picture,
    place,
    save,
)

from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async  # isort: skip

ON_HOST = (*OFFLOAD[:1], ("optimizer_offload_fraction", 1.0))


@contextlib.contextmanager
def writing(persistent):
    """Megatron's queue of saves. Its processes are forked, for a spawned one has no stand-ins for a GPU."""
    forked = torch.multiprocessing.get_context("fork")
    with (
        multiprocessing.get_context("fork").Manager() as manager,
        mock.patch.object(filesystem_async, "_results_queue", manager.Queue()),
        mock.patch.object(async_utils.mp, "get_context", return_value=forked),
        mock.patch.object(torch.cuda, "device_count", return_value=1),
    ):
        queue = async_utils.AsyncCallsQueue(persistent=persistent)
        try:
            yield queue
        finally:
            queue.close()


def saved_beside_training(directory, label, run, kind, persistent):
    """What there was when a save began, and what was loaded from it."""
    with engine_for(run) as engine, writing(persistent) as calls:
        advance(engine, 0, BEFORE)
        at_save = picture(engine, run)
        calls.schedule_async_request(save(engine, place(directory, label, kind), kind, async_sharded_save=True))
        assert calls.get_num_unfinalized_calls() == 1
        if persistent:
            assert calls.maybe_finalize_async_calls(blocking=True) == [0]
        advance(engine, BEFORE, BEFORE + AFTER)
        at_end = picture(engine, run)
        calls.maybe_finalize_async_calls(blocking=True)
        assert calls.get_num_unfinalized_calls() == 0
    assert not torch.equal(at_save["steps"], at_end["steps"])
    with other_engine_for(run) as engine:
        load(engine, place(directory, label, kind), kind)
        yield at_save, picture(engine, run)
        advance(engine, BEFORE, BEFORE + AFTER)
        yield at_end, picture(engine, run)


IN_THE_BACKGROUND = {
    "dp": (RUNS["DP2, bf16"], "dp", False),
    "fully": (RUNS["DP2"], "fully", False),
}
MORE_IN_THE_BACKGROUND = {
    "experts": (Run(("fully",), EXPERTS, EP2), "fully", False),
    "offload": (Run(("dp",), BF16, options=ON_HOST), "dp", False),
    "persistent": (RUNS["DP2"], "dp", True),
}


@worlds(2)
@each(IN_THE_BACKGROUND, exhaustive=MORE_IN_THE_BACKGROUND)
def case_saved_beside_training(directory, label, setting):
    if devices.NAME != "cpu":
        pytest.skip("processes that are forked have no device")
    for expected, got in saved_beside_training(directory, f"async, {label}", *setting):
        assert_same(label, got, expected)


@worlds(2)
def case_states_on_the_host_are_copied_first(directory):
    """A worker may write when the next steps are done already. Weights of the model are on the device, where there is
    one, and copied by Megatron; here they are not compared."""
    run, folder = Run(("dp",), BF16, options=ON_HOST), place(directory, "async, host", "dp")

    def of_the_optimizer(engine):
        return {key: value for key, value in picture(engine, run).items() if not key.endswith(" model")}

    with engine_for(run) as engine:
        advance(engine, 0, BEFORE)
        at_save = of_the_optimizer(engine)
        request = save(engine, folder, "dp", async_sharded_save=True)
        advance(engine, BEFORE, BEFORE + AFTER)
        request.execute_sync()
    with other_engine_for(run) as engine:
        load(engine, folder, "dp")
        assert_same("loaded", of_the_optimizer(engine), at_save)
