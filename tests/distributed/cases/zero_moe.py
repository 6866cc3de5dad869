"""DeepSpeed's mixture of experts: expert norms over the experts' data-parallel ranks, dense ones over all."""

import functools

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from torch import nn

import alto_distributed.deepspeed  # noqa: F401
from tests.helpers.cases import each, worlds

from .zero import batches, config, loss_of, running, trainable


class Net(nn.Module):
    """Every token is kept, so that routing depends on nothing but the weights."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        expert = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))
        self.moe = MoE(6, expert, num_experts=2, ep_size=2, k=1, drop_tokens=False, use_rts=False)
        self.head = nn.Linear(6, 11)

    def forward(self, x):
        h = self.embed(x)
        mixed, _, _ = self.moe(h)
        return self.head(h + mixed)


def build():
    torch.manual_seed(11 + dist.get_rank() % 2)  # ranks 0 and 2 hold one expert, 1 and 3 the other
    model = Net()
    torch.manual_seed(11)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "experts" not in name:
                p.copy_(torch.randn(p.shape) * 0.3)
    return model


def take(engine, step):
    for x, y in step:
        engine.backward(loss_of(engine(x.chunk(4)[dist.get_rank()]), y.chunk(4)[dist.get_rank()]))
        engine.step()


@functools.cache
def train(stage):
    model = build()
    with running(model, config({"stage": stage} if stage else None)) as engine:
        for step in batches():
            take(engine, step)
        out = {}
        for name, p in trainable(model).items():
            with deepspeed.zero.GatheredParameters([p]):
                out[name] = p.detach().clone()
        decays = [(bool(g.get("moe")), g["weight_decay"]) for g in engine.basic_optimizer.param_groups]
        return out, decays


@worlds(4)
@each(stage=(1, 2))
def case_experts(stage):
    """At stage 0 each rank has whole parameters and the ratio is plain; the sharded stages must agree."""
    plain, _ = train(0)
    experts = [n for n in plain if "experts" in n]
    assert experts
    pairs = [None] * 4
    dist.all_gather_object(pairs, plain[experts[0]])
    assert not torch.equal(pairs[0], pairs[1])  # different experts on neighbours
    assert torch.equal(pairs[0], pairs[2])  # the same on ranks of one expert group
    got, decays = train(stage)
    assert {moe for moe, _ in decays} == {True, False}
    assert {d for moe, d in decays if moe} == {0.01, 0.0}  # experts, too, are split into decayed and undecayed
    for name, p in got.items():
        gap = ((p - plain[name]).norm() / plain[name].norm()).item()
        assert gap < 1e-6, (name, gap)
