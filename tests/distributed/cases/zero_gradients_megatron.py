"""Experts without tokens under Megatron's distributed optimizer, see zero_gradients.py."""

import torch
import torch.distributed as dist

from tests.helpers.cases import worlds
from tests.helpers.megatron_gpt import Job, Layout, Megatron, parallel

WARM, STEPS = 3, 100
IDLE, ALONE = "local_experts.1.", "local_experts.0."


@worlds(2)
def case_experts_without_tokens():
    """The router cannot be told where to send tokens, so what comes back from an expert is dropped."""
    job = Job(experts=4, layers=1)
    with parallel(Layout()):
        engine = Megatron(job, Layout())
        engine.assert_straddles()
        experts = {name: p for name, p in engine.named_parameters() if "local_experts" in name}
        silent = {name: p for name, p in experts.items() if IDLE in name or (ALONE in name and dist.get_rank() == 0)}
        assert silent

        def drop():
            for p in silent.values():
                p.main_grad.zero_()

        engine.train(WARM)
        warm = {name: p.detach().clone() for name, p in experts.items()}
        engine.before_reduction = drop
        for step in range(WARM, WARM + STEPS):
            engine.step(step % job.steps)
        moved = {name: not torch.equal(p, warm[name]) for name, p in experts.items()}
        assert moved == {name: IDLE not in name for name in experts}
        for name, value in engine.gathered(lambda inner, master: inner.state[master]["exp_avg"]).items():
            if IDLE in name:
                assert value.abs().max().item() < 1e-4, name
