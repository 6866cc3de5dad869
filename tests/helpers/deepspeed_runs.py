"""Training with tests/end_to_end/programs, with and without DeepSpeed: what programs report, and what they should."""

import json
from pathlib import Path

import torch

from alto_distributed import ALTO, param_groups
from tests.end_to_end.programs import train_deepspeed

from .cases import REPO

CONFIGS = REPO / "configs" / "deepspeed"
PROGRAMS = REPO / "tests" / "end_to_end" / "programs"


def report_in(output):
    (line,) = [line for line in output.splitlines() if "REPORT " in line]
    return json.loads(line.split("REPORT ", 1)[1])


def unsharded_losses(model, loss_of, steps, **options):
    """The same training in one process, with the plain optimizer and torch's clipping."""
    optimizer = ALTO(param_groups(model), **options)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def unsharded(path, steps):
    """Losses of tests/end_to_end/programs/train_deepspeed.py with a config, without DeepSpeed."""
    config = json.loads(Path(path).read_text())

    def loss_of(model, step):
        return model(train_deepspeed.global_batch(step, config["train_batch_size"]))

    return unsharded_losses(train_deepspeed.build_model(), loss_of, steps, **config["optimizer"]["params"])
