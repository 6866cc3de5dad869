"""The all-reduces of a step: one a process group, and together where no parameter needs one before the other."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from alto_distributed import ALTO, LogicalParameter, ShardLayout


@pytest.fixture
def groups():
    """Of a job of eight ranks, of which this is the first and the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        yield {name: dist.new_group(ranks) for name, ranks in (("dp", [0, 1]), ("tp", [0, 2]), ("ep", [0, 4]))}
    finally:
        dist.destroy_process_group()


def events_of_a_step(monkeypatch, groups, over):
    """What a step with parameters over these groups starts and waits for, in its order."""
    names = {group: name for name, group in groups.items()}
    events = []
    start = dist.all_reduce

    class Watched:
        def __init__(self, work, name):
            self.work, self.name = work, name

        def wait(self):
            events.append(f"{self.name} is there")
            self.work.wait()

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        assert async_op
        events.append(f"{names[group]} starts")
        return Watched(start(tensor, op, group, async_op), names[group])

    tensors = [torch.ones(6) for _ in over]
    layouts = {
        t: ShardLayout.whole(LogicalParameter(f"{i}", (2, 6), tuple(groups[name] for name in some)), 6)
        for i, (t, some) in enumerate(zip(tensors, over, strict=True))
    }
    optimizer = ALTO(tensors)
    optimizer.set_layouts(layouts)
    optimizer._plans.agreed.add(tuple(str(i) for i in range(len(over))))  # there is nobody to agree with
    for t in tensors:
        t.grad = torch.ones(6)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    optimizer.step()
    return events


def test_groups_that_share_no_parameter_are_under_way_together(monkeypatch, groups):
    found = events_of_a_step(monkeypatch, groups, [("dp",), ("tp",), ("dp",), ("ep",)])
    assert found == ["dp starts", "tp starts", "ep starts", "dp is there", "tp is there", "ep is there"]


def test_a_parameter_over_two_groups_takes_one_after_the_other(monkeypatch, groups):
    found = events_of_a_step(monkeypatch, groups, [("dp", "tp"), ("dp",), ("ep",)])
    assert found == ["dp starts", "dp is there", "tp starts", "ep starts", "tp is there", "ep is there"]


def test_one_collective_a_group_however_many_parameters(monkeypatch, groups):
    found = events_of_a_step(monkeypatch, groups, [("dp",)] * 50)
    assert found == ["dp starts", "dp is there"]
