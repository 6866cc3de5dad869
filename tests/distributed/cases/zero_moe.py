"""DeepSpeed's mixture of experts: expert norms over the experts' data-parallel ranks, dense ones over all."""

import functools

import deepspeed
import torch
import torch.distributed as dist

import alto_distributed.deepspeed  # noqa: F401
from tests.helpers.cases import each, worlds
from tests.helpers.zero import batches, config, running, trainable
from tests.helpers.zero_parallel import expert_network, step_on_four_ranks


@functools.cache
def train(stage):
    model = expert_network()
    with running(model, config({"stage": stage} if stage else None)) as engine:
        for step in batches():
            step_on_four_ranks(engine, step)
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
