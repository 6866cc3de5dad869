"""Experts without tokens under Megatron's distributed optimizer, see zero_gradients.py."""

import pytest
import torch
import torch.distributed as dist

from tests.helpers.cases import each, worlds
from tests.helpers.megatron_gpt import Job, Layout, Megatron, parallel

# isort: split
from megatron.core.transformer.moe.router import TopKRouter

WARM = 3
#: The numbers of experts that the router never chooses, and of one that it chooses on the last rank alone.
IDLE, ALONE = (1, 3), 0
#: The layout, and how many steps without tokens.
CELLS = {"data parallel": (Layout(), 100), "expert parallel": (Layout(expert=2), 10)}


def starve(patch, experts):
    """Routers send these experts no tokens."""
    gating = TopKRouter.gating

    def starving(router, *args, **kwargs):
        logits = gating(router, *args, **kwargs)
        away = torch.zeros_like(logits)
        away[..., list(experts)] = -1e9
        return logits + away

    patch.setattr(TopKRouter, "gating", starving)


def named(names, experts):
    """Which names are of these experts; names have an expert's number in the whole model."""
    return {name: any(f"local_experts.{number}." in name for number in experts) for name in names}


@worlds(2)
@each(CELLS)
def case_experts_without_tokens(setting):
    """Their gradients are zeros, not None: the weights stay, and the moments decay."""
    layout, steps = setting
    job = Job(experts=4, layers=1)
    with parallel(layout):
        engine = Megatron(job, layout)
        engine.assert_straddles()
        experts = {name: p for name, p in engine.named_parameters() if "local_experts" in name}
        engine.train(WARM)
        warm = {name: p.detach().clone() for name, p in experts.items()}
        # With expert parallelism a rank has all of an expert, and tokens of the other rank come to it.
        silent = {*IDLE, ALONE} if layout.expert == 1 and dist.get_rank() == 0 else {*IDLE}

        def look():
            assert {name: not p.main_grad.any() for name, p in experts.items()} == named(experts, silent)

        engine.before_reduction = look
        with pytest.MonkeyPatch.context() as patch:
            starve(patch, silent)
            for step in range(WARM, WARM + steps):
                engine.step(step % job.steps)
        idle = named(experts, IDLE)
        assert 0 < sum(idle.values()) < len(idle)
        assert {name: torch.equal(p, warm[name]) for name, p in experts.items()} == idle
        for name, value in engine.gathered(lambda inner, master: inner.state[master]["exp_avg"]).items():
            if idle.get(name):
                assert steps < 100 or value.abs().max().item() < 1e-4, name
