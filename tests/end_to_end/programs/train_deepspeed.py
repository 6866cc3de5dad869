"""A user's training script as they come: it knows DeepSpeed, and not which optimizer its JSON names.

    deepspeed --num_gpus 2 train_deepspeed.py --deepspeed_config ds.json

Several configs are trained one after another, each from the same start. Rank 0 prints one line of JSON.
"""

import argparse
import json
import os
import sys

import torch
from torch import nn

VOCABULARY, LENGTH = 17, 8


class Model(nn.Module):
    """Predicts the next token. The sizes are odd, so that shards cut through parameters."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 15)
        self.up, self.norm, self.head = nn.Linear(15, 37), nn.LayerNorm(37), nn.Linear(37, VOCABULARY)

    def forward(self, tokens):
        logits = self.head(self.norm(torch.tanh(self.up(self.embed(tokens[:, :-1])))))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def build_model():
    torch.manual_seed(1234)
    return Model()


def global_batch(step, samples):
    """A random token, and then each follows from the one before, so there is something to learn."""
    tokens = [torch.randint(0, VOCABULARY, (samples,), generator=torch.Generator().manual_seed(step))]
    while len(tokens) < LENGTH:
        tokens.append((3 * tokens[-1] + 1) % VOCABULARY)
    return torch.stack(tokens, 1)


def train(config, steps):
    import deepspeed
    import deepspeed.comm as dist

    engine, optimizer, *_ = deepspeed.initialize(model=build_model(), config=config)
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(steps):
        mean = torch.zeros(())
        for micro in global_batch(step, engine.train_batch_size()).chunk(engine.gradient_accumulation_steps()):
            loss = engine(micro.chunk(world)[rank])
            engine.backward(loss)
            engine.step()
            mean += loss.detach() / engine.gradient_accumulation_steps() / world
        dist.all_reduce(mean)
        losses.append(mean.item())
    basic = engine.basic_optimizer
    report = {
        "losses": losses,
        "world": world,
        "wrapper": type(optimizer).__name__,
        "optimizer": type(basic).__name__,
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in basic.param_groups],
    }
    engine.destroy()
    return report


if __name__ == "__main__":
    import deepspeed

    from alto_distributed.sharding.shutdown import leave
    from tests.helpers.launcher import without_compiling

    without_compiling()
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1, help="DeepSpeed's launcher gives it; nobody else")
    parser.add_argument("--deepspeed_config", nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()

    # Under mpirun DeepSpeed asks MPI for the ranks and sets the port itself.
    deepspeed.init_distributed(distributed_port=int(os.environ.get("MASTER_PORT", "29500")), verbose=False)
    reports = {path: train(path, args.steps) for path in args.deepspeed_config}
    if deepspeed.comm.get_rank() == 0:
        print("REPORT " + json.dumps({"argv": sys.argv, "local_rank": args.local_rank, "reports": reports}), flush=True)
    leave()
