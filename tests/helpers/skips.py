"""The training loop meets gradients that are not finite, on one rank: it goes on, and ends after too many in a row."""

import dataclasses
import json

import pytest
import torch
import torch.distributed as dist

from alto_distributed.pretrain import trainer as loop
from alto_distributed.pretrain.config.settings import Run
from alto_distributed.pretrain.data.prepare import prepare
from tests.helpers.cases import REPO

STEPS = 7
VOCABULARY = 512  # 257 are used: the bytes, and the end of a document


class Poisoned:
    """An engine whose last rank has a NaN in one gradient at some steps."""

    def __init__(self, engine, param, bad):
        self._engine, self._bad, self._step = engine, bad, 0
        param.register_hook(self._hook)

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def train(self, micro_batches, lr):
        self._step += 1
        return self._engine.train(micro_batches, lr)

    def close(self):
        """Not the engine: the next run may have the same."""

    def _hook(self, grad):
        if self._step in self._bad and dist.get_rank() == dist.get_world_size() - 1:
            grad = grad.clone()
            grad.view(-1)[-1] = torch.nan
        return grad


def skips_and_stops(run: Run, build, param_of, directory):
    """``build(run)`` gives the engine, ``param_of(engine)`` a parameter that the last rank has a gradient of."""
    if dist.get_rank() == 0:
        directory.mkdir()
        paragraphs = (REPO / "LICENSE").read_text().split("\n\n")
        text = directory / "licence.jsonl"
        text.write_text("".join(json.dumps({"text": paragraph}) + "\n" for paragraph in paragraphs))
        prepare(directory / "tokens", [text], kind="bytes", split=(0.7, 0.2, 0.1))
    dist.barrier()
    settings = {
        "data": dataclasses.replace(run.data, directory=str(directory / "tokens")),
        "training": dataclasses.replace(run.training, iterations=STEPS, max_skipped=3),
        "optimizer": dataclasses.replace(run.optimizer, lr=0.01),
        "schedule": dataclasses.replace(run.schedule, warmup=1),
        "evaluation": dataclasses.replace(run.evaluation, every=0, samples=8),
        "logs": dataclasses.replace(run.logs, every=1, tensorboard=False),
    }
    run, original = dataclasses.replace(run, **settings), loop.build
    try:
        for name, bad in (("goes on", {2, 3, 6}), ("stops", {2, 4, 5, 6, 7})):
            into = directory / name
            loop.build = lambda run, bad=bad: Poisoned(engine := build(run), param_of(engine), bad)
            if name == "goes on":
                assert loop.train(run, into) == STEPS
            else:
                with pytest.raises(RuntimeError, match=r"^3 steps in a row .* the last of them step 6:"):
                    loop.train(run, into)
                bad.discard(7)
            dist.barrier()
            records = [json.loads(line) for line in (into / "metrics.jsonl").read_text().splitlines()]
            found = {record["step"]: record["skipped"] for record in records if "skipped" in record}
            expected = STEPS if name == "goes on" else 5  # the last one ends the run before it is recorded
            assert found == {step: step in bad for step in range(1, expected + 1)}, found
    finally:
        loop.build = original
