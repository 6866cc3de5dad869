"""DeepSpeed against Megatron: one model, one optimizer, two engines that shard it each in its own way."""

import contextlib

import deepspeed
import torch
import torch.distributed as dist

import alto_distributed.deepspeed  # noqa: F401
from tests.helpers.cases import worlds
from tests.helpers.megatron_gpt import (
    ALTO_OPTIONS,
    LR,
    MICROBATCHES,
    SEQUENCES,
    Job,
    Layout,
    Megatron,
    build,
    loss_of,
    microbatches,
    mine,
    named_parameters,
    parallel,
)

JOB = Job(steps=12)
ZERO_2 = {
    "train_micro_batch_size_per_gpu": SEQUENCES // 2,
    "gradient_accumulation_steps": MICROBATCHES,
    "gradient_clipping": JOB.clip,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "ALTO", "params": {**ALTO_OPTIONS, "lr": LR, "weight_decay": JOB.weight_decay}},
}


def by_deepspeed():
    (model,) = build(JOB)
    engine, *_ = deepspeed.initialize(model=model, config=ZERO_2)
    losses = []
    with contextlib.ExitStack() as stack:
        stack.callback(engine.destroy)
        for step in range(JOB.steps):
            losses.append(torch.zeros((), dtype=torch.float64))
            for batch in microbatches(step):
                out, mean = loss_of(engine, mine(batch))
                loss = mean(out)
                losses[-1] += loss.item() / MICROBATCHES / dist.get_world_size()
                engine.backward(loss)
                engine.step()
        weights = {name: p.detach().clone() for name, p in named_parameters([model])}
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    return losses, weights


def by_megatron():
    engine = Megatron(JOB, Layout())
    engine.assert_straddles()
    engine.train()
    return engine.mean_losses(), {name: p.detach() for name, p in engine.named_parameters()}


@worlds(2)
def case_deepspeed_and_megatron_agree():
    with parallel(Layout()):
        losses, weights = by_deepspeed()
        expected_losses, expected = by_megatron()
    assert len(losses) == len(expected_losses) == 12
    assert (expected_losses[1:] - expected_losses[0]).abs().max() > 1e-3  # the weights do matter to the loss
    gap = ((losses - expected_losses).abs() / expected_losses).max()
    assert gap <= 1e-6, gap
    assert weights.keys() == expected.keys()
    gap = torch.stack([(weights[n] - p).abs().max() / p.abs().max() for n, p in expected.items()]).max()
    assert gap <= 1e-6, gap
