"""A logical parameter whose whole gradient is zero keeps its weights; one with a gradient on one rank does not."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from alto_distributed import ALTO, E, param_groups
from tests.helpers import devices, routed
from tests.helpers.cases import each, worlds
from tests.helpers.oracle import PaperALTO
from tests.helpers.releases import need_torch
from tests.helpers.sharded import HYPER, assert_same, full


def trained(model, *, sliced):
    """Returns the weights after the first steps, by name."""
    optimizer = ALTO(param_groups(model, 1e-2), **HYPER)
    rank, world = dist.get_rank(), dist.get_world_size()
    for k, *batch in routed.batches(torch.float64, devices.here()):
        if k == routed.WARM:
            warm = {name: full(p).clone() for name, p in model.named_parameters()}
        x, y, routes = (part.chunk(world)[rank] if sliced else part for part in batch)
        optimizer.zero_grad()
        (model(x, routes) - y).square().mean().backward()
        optimizer.step()
    return warm, optimizer


@worlds(2)
def case_experts_without_tokens():
    """FSDP2 against one process, and one process against the paper."""
    need_torch(2, 7, "FSDP2 on CPUs")
    plain = routed.network(torch.float64, devices.here())
    warm, optimizer = trained(plain, sliced=False)
    routed.check_idle(warm, {name: full(p) for name, p in plain.named_parameters()})
    for name, p in plain.named_parameters():
        if routed.is_idle(name):  # its moments decay as Adam's do
            assert optimizer.state[p]["exp_avg"].abs().max().item() < 1e-3
            assert optimizer.state[p]["step"].item() == routed.STEPS

    sharded = routed.network(torch.float64, devices.here())
    for module in (*sharded.up, *sharded.down, sharded):
        fully_shard(module, mesh=devices.mesh(2))
    warm, _ = trained(sharded, sliced=True)
    routed.check_idle(warm, {name: full(p) for name, p in sharded.named_parameters()})
    assert_same(sharded, plain)


MAKERS = {
    "ALTO": lambda x: ALTO([x], **HYPER),
    "E of LAMB": lambda x: E(ALTO([x], **{**HYPER, "alpha": 0.0}), HYPER["alpha"], HYPER["betas"][0]),
}


@worlds(2)
@each(name=MAKERS)
def case_one_rank_has_the_only_element_that_is_not_zero(name):
    """It is so small that its square is zero in float32. Weights move as in one process, on both ranks."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = devices.mesh(2)
    torch.manual_seed(5)
    whole = torch.randn(6, 4)
    p = torch.nn.Parameter(distribute_tensor(whole.to(devices.here()), mesh, [Shard(0)]))
    q = torch.nn.Parameter(whole.clone())
    paper = PaperALTO(whole, **HYPER)
    sharded, plain = (MAKERS[name](x) for x in (p, q))
    for k, value in enumerate((1.0, 0.0, 1e-30, 0.0)):
        gradient = torch.zeros(6, 4)
        gradient[5, 3] = value
        if k == 0:
            gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
        p.grad = distribute_tensor(gradient.to(devices.here()), mesh, [Shard(0)])
        q.grad = gradient
        before = full(p).clone()
        sharded.step()
        plain.step()
        expected = paper.step(gradient)
        assert torch.equal(full(p), before) == (value == 0), k
        torch.testing.assert_close(full(p), q.detach(), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(q.detach().double(), expected, rtol=1e-5, atol=1e-6)
