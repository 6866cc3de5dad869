"""A small network, trained by FSDP2 over the ranks and by one process alone, in float64.

There a wrong ratio cannot hide behind rounding.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from alto_distributed import ALTO, param_groups

from . import devices
from .releases import need_torch

HYPER = dict(lr=0.05, betas=(0.99, 0.9, 0.99), alpha=-5.0, eps=(1e-6, 1e-6, 1e-10), weight_decay=1e-2)
STEPS = 8
TIGHT = dict(rtol=1e-10, atol=1e-12)


class Net(nn.Module):
    """Sizes that divide nothing: rows are split unevenly, and ``head`` has fewer rows than there are ranks."""

    def __init__(self, hidden=13):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up, self.down = nn.Linear(6, hidden), nn.Linear(hidden, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 1)

    def forward(self, x):
        h = self.embed(x)
        return self.head(self.norm(h + self.down(torch.tanh(self.up(h)))))


def network(dtype=torch.float64, hidden=13):
    torch.manual_seed(11)
    return Net(hidden).to(devices.here(), dtype)


def batches(dtype=torch.float64):
    generator = torch.Generator().manual_seed(17)
    for _ in range(STEPS):
        x = torch.randint(0, 11, (8, 5), generator=generator)
        y = torch.randn(8, 5, 1, dtype=torch.float64, generator=generator)
        yield x.to(devices.here()), y.to(devices.here(), dtype)


def train(model, optimizer, *, sliced, dtype=torch.float64, steps=STEPS, counts=None):
    """``sliced``: this rank sees its share of each batch only. ``counts`` collects collectives per step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for k, (x, y) in enumerate(batches(dtype)):
        if k == steps:
            break
        if sliced:
            x, y = x.chunk(world)[rank], y.chunk(world)[rank]
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        with CommDebugMode() if counts is not None else contextlib.nullcontext() as comms:
            optimizer.step()
        if counts is not None:
            counts.append(comms.get_total_counts())


def full(parameter):
    """The whole of it, on the host."""
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().cpu()


def assert_same(model, reference, **tolerance):
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(p), full(q), msg=lambda m, name=name: f"{name}: {m}", **tolerance or TIGHT)


def reference_run(dtype=torch.float64, make=lambda m: ALTO(param_groups(m, 1e-2), **HYPER), **options):
    model = network(dtype, **options)
    train(model, make(model), sliced=False, dtype=dtype)
    return model


def assert_straddles(model, group):
    """Some parameter has elements on at least two ranks of ``group``, some are uneven, and some empty."""
    sizes = {}
    for name, p in model.named_parameters():
        gathered = [None] * group.size()
        dist.all_gather_object(gathered, p.to_local().numel(), group=group)
        sizes[name] = gathered
    assert any(sum(n > 0 for n in s) >= 2 for s in sizes.values()), sizes
    assert any(len(set(s)) > 1 for s in sizes.values()), sizes
    assert any(0 in s for s in sizes.values()), sizes


def sharded_network(mesh, dtype=torch.float64):
    need_torch(2, 7, "FSDP2 on CPUs")
    if mesh.ndim > 1:
        need_torch(2, 8, "HSDP over gloo")
    model = network(dtype)
    for module in (model.up, model.down):
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
