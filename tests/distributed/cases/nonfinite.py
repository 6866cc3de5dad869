"""A NaN in one rank's shard: all ranks skip the step, and nothing has changed on any of them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from alto_distributed import ALTO, LogicalParameter, ShardLayout, param_groups
from alto_distributed.nonfinite import SkippedSteps
from tests.helpers import devices
from tests.helpers.cases import each, worlds
from tests.helpers.sharded import HYPER, batches, full, network, sharded_network


def everything(optimizer):
    """Bytes of this rank's weights and states, step counts included."""
    tensors = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            tensors += [p, *(value for _, value in sorted(optimizer.state[p].items()))]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return [t.detach().clone().reshape(-1).view(torch.uint8) for t in local]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def poison(optimizer, rank, group):
    """One element of the last gradient of a group, on one rank only; a shard that is not empty there."""
    if dist.get_rank() == rank:
        local = [g.to_local() if hasattr(g, "to_local") else g for g in (p.grad for p in group["params"])]
        [g for g in local if g.numel()][-1].view(-1)[-1] = torch.nan


def train(model, optimizer, bad=()):
    """``bad``: step -> (rank, which group) of a NaN. Without an entry for it a step is an ordinary one."""
    for k, (x, y) in enumerate(batches()):
        if k in bad and bad[k] is None:
            continue  # the run that never had it
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        before = everything(optimizer)
        if k in bad:
            rank, g = bad[k]
            poison(optimizer, rank, optimizer.param_groups[g])
        optimizer.step()
        assert optimizer.skipped_in_a_row == int(k in bad), k
        if k in bad and k:
            assert same(before, everything(optimizer)), k


def check(make, ways=("read by the host", "on the device")):
    """The bad elements are on each end of the ranks, and in the last group only as well as in the first."""
    last = dist.get_world_size() - 1
    bad = {1: (last, 1), 4: (0, 0), 7: (last, 0)}
    for way in ways:
        with pytest.MonkeyPatch.context() as patch:
            if way == "on the device":  # as accelerators do it; here the device is the CPU
                patch.setattr(SkippedSteps, "is_readable", staticmethod(lambda flag: False))
            model, optimizer = make(True)
            train(model, optimizer, bad)
            never, plain = make(False)
            train(never, plain, dict.fromkeys(bad))
        assert optimizer.skipped_steps == len(bad)
        for p, q in zip(model.parameters(), never.parameters(), strict=True):
            assert torch.equal(full(p), full(q)), way
        assert same(everything(optimizer), everything(plain)), way


@worlds(2, 4)
def case_a_nan_in_one_shard_skips_the_step_everywhere():
    """FSDP2: the other ranks' gradients are good, and their shards must not move either."""
    mesh = devices.mesh(dist.get_world_size())

    def make(skips):
        model = sharded_network(mesh)
        return model, ALTO(param_groups(model, 1e-2), skip_nonfinite=skips, **HYPER)

    check(make)


@worlds(4)
def case_a_nan_reaches_replicas_and_other_meshes():
    """HSDP: the norms are summed over two ranks, and all four must agree."""
    mesh = devices.mesh(2, 2, names=("replicate", "shard"))

    def make(skips):
        model = sharded_network(mesh)
        return model, ALTO(param_groups(model, 1e-2), skip_nonfinite=skips, **HYPER)

    check(make, ways=("read by the host",))


def flags_of(optimizer):
    return optimizer._skipped.flags((p.grad.to_local() for g in optimizer.param_groups for p in g["params"]), None, ())


@worlds(2)
def case_the_flag_is_that_of_the_ranks_that_must_agree():
    """Each rank for itself, the rank with the NaN alone would know of it."""
    mesh = devices.mesh(2)
    model = sharded_network(mesh)
    optimizer = ALTO(param_groups(model, 1e-2), skip_nonfinite=True, **HYPER)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    optimizer.agree_over(alone)
    optimizer.zero_grad()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    poison(optimizer, 1, optimizer.param_groups[0])
    assert flags_of(optimizer)[0] == float(dist.get_rank() == 1)
    optimizer.agree_over(dist.group.WORLD)
    assert flags_of(optimizer)[0] == 1.0


@worlds(2, 4)
def case_a_rank_without_tensors_takes_part():
    """The last rank holds nothing; it joins in the norms, and in the decision."""
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = LogicalParameter("w", (world - 1, 3), (dist.group.WORLD,))
    flat = torch.arange(3.0, device=devices.here()) + rank
    optimizer = ALTO([{"params": [flat] if rank < world - 1 else []}], skip_nonfinite=True)
    layouts = {flat: ShardLayout.of_flat_shard([whole], rank * 3, 3)} if rank < world - 1 else {}
    optimizer.set_layouts(layouts, joined=[whole])
    for k in range(4):
        flat.grad = torch.ones_like(flat)
        if k == 2 and rank == 0:
            flat.grad[1] = torch.inf
        before = flat.clone()
        optimizer.step()
        assert torch.equal(before, flat) == (k == 2 or rank == world - 1)
        assert optimizer.skipped_steps == int(k >= 2)


def tensor_parallel():
    """The first gradient is replicated, so torch's scaler does not ask the other rank about those that are sharded."""
    mesh = devices.mesh(2)
    torch.manual_seed(1)
    first, second = (torch.randn(4, 6, device=devices.here()) for _ in range(2))
    params = [nn.Parameter(distribute_tensor(first, mesh, [Replicate()]))]
    params.append(nn.Parameter(distribute_tensor(second, mesh, [Shard(0)])))
    return params, ALTO(params, **HYPER)


def scaled_gradients(params, scaler, bad):
    for p in params:
        p.grad = torch.ones_like(p) * scaler.get_scale()
    if bad and dist.get_rank() == 1:
        params[1].grad.to_local()[0, 0] = torch.inf


@worlds(2)
def case_scalers_that_disagree_neither_hang_nor_drift():
    """One rank's scaler saw the infinity; it skipped the step, and the other waited in the norms for its next one."""
    params, optimizer = tensor_parallel()
    scaler = torch.amp.GradScaler(devices.here().type, init_scale=8.0)
    scaler.scale(torch.ones(1, device=devices.here()))
    scaled_gradients(params, scaler, bad=False)
    scaler.step(optimizer)
    scaler.update()
    before = everything(optimizer)
    scaled_gradients(params, scaler, bad=True)
    if devices.here().type != "cpu":  # an accelerator tells it when the next step begins
        scaler.step(optimizer)
        scaler.update()
        scaled_gradients(params, scaler, bad=False)
    with pytest.raises(RuntimeError, match="ShardedGradScaler"):
        scaler.step(optimizer)
    assert same(before, everything(optimizer))
    assert optimizer.skipped_steps == 1


@worlds(2)
def case_a_sharded_scaler_agrees():
    """What the message of the case above tells people to do; and the weights are those of a run without a scaler."""
    params, optimizer = tensor_parallel()
    others, plain = tensor_parallel()
    scaler = ShardedGradScaler(devices.here().type, init_scale=8.0)
    scaler.scale(torch.ones(1, device=devices.here()))
    for k in range(4):
        scaled_gradients(params, scaler, bad=k == 2)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (8.0 if k < 2 else 4.0)
        if k != 2:
            for p in others:
                p.grad = torch.ones_like(p)
            plain.step()
    assert optimizer.skipped_steps == 1
    assert same(everything(optimizer), everything(plain))


@worlds(2)
@each(skips=(False, True))
def case_the_flag_is_one_collective(skips):
    from torch.distributed.tensor.debug import CommDebugMode

    model = network()
    optimizer = ALTO(param_groups(model, 1e-2), skip_nonfinite=skips, **HYPER)
    (model(next(iter(batches()))[0])).square().mean().backward()
    with CommDebugMode() as comms:
        optimizer.step()
    assert comms.get_total_counts() == int(skips)
