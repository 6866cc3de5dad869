"""An engine of torch alone for the training loop: a model of two matrices, copied on every rank, under ALTO.

What surrounds an engine, the loop, its log, its checkpoints and its lock, is the real one. A run of it takes a fraction
of a second, so that tests can disturb it at every instant.
"""

import dataclasses

import torch
import torch.distributed as dist
from torch import nn

from alto_distributed import ALTO
from alto_distributed.pretrain.checkpoint.io import Written, describe, failing_late
from alto_distributed.pretrain.config.settings import parse
from alto_distributed.pretrain.engines.base import Step

STEPS, EVERY = 5, 2


def settings(data, **training):
    """Of a run of :data:`STEPS` steps that saves after every second one."""
    return parse(
        {
            "engine": "deepspeed",  # by name: a test puts this one in its place
            "model": {"layers": 1, "hidden": 8, "heads": 1, "sequence": 8, "vocabulary": 257, "dropout": 0.0},
            "training": {"iterations": STEPS, "global_batch": 4, "micro_batch": 2, "precision": "fp32", **training},
            "data": {"directory": str(data)},
            "schedule": {"warmup": 1},
            "evaluation": {"every": 0, "samples": 4},
            "checkpoints": {"every": EVERY, "keep": 2},
            "logs": {"every": 1, "tensorboard": False},
        }
    )


class LightEngine:
    device = torch.device("cpu")

    def __init__(self, run):
        self.data_parallel_rank, self.data_parallel_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(run.training.seed)
        size, hidden = run.model.vocabulary, run.model.hidden
        self.model = nn.Sequential(nn.Embedding(size, hidden), nn.Linear(hidden, size, bias=False))
        self.optimizer = ALTO(self.model.parameters(), lr=0.01)

    def _loss(self, micro_batches):
        each = [
            nn.functional.cross_entropy(self.model(batch[:, :-1].long()).flatten(0, 1), batch[:, 1:].long().flatten())
            for batch in micro_batches
        ]
        return torch.stack(each).mean()

    def train(self, micro_batches, lr):
        loss = self._loss(micro_batches)
        loss.backward()
        shared = [loss.detach(), *(p.grad for p in self.model.parameters())]
        for tensor in shared:
            dist.all_reduce(tensor)
            tensor /= self.data_parallel_size
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Step(shared[0].item(), float("nan"))

    @torch.no_grad()
    def evaluate(self, micro_batches):
        loss = self._loss(micro_batches)
        dist.all_reduce(loss)
        return loss.item() / self.data_parallel_size

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self, directory):
        path = directory / f"of_rank_{dist.get_rank()}.pt"
        with failing_late() as attempt:
            attempt(lambda: torch.save(self.state(), path))
            dist.barrier()
        return {path: Written(dist.get_rank(), describe(self.state()))}

    def load(self, directory, saved_by):
        saved = torch.load(directory / f"of_rank_{dist.get_rank() % saved_by}.pt", weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def diagnostics(self):
        return {}

    def close(self):
        pass


def with_timeout(run, seconds):
    return dataclasses.replace(run, training=dataclasses.replace(run.training, timeout=seconds))
