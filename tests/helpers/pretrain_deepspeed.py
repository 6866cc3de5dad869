"""The DeepSpeed engine of the training program with a tiny GPT-2, on batches that follow from the step."""

import contextlib
import math

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param

from alto_distributed.pretrain.config.settings import parse
from alto_distributed.pretrain.engines.deepspeed import engine as pretrain

from .cases import REPO

# Half precision runs on any CPU in torch; DeepSpeed asks for hardware support, which this is not about.
get_accelerator().is_fp16_supported = lambda: True

BATCH, SEQUENCE, VOCABULARY = 16, 12, 61
LR = {"alto": 0.04, "lamb": 0.04, "adamw": 1e-3, "adam": 1e-3, "lion": 1e-3, "adabelief": 1e-3, "ademamix": 1e-3}
LR |= dict.fromkeys(("muon", "mars", "soap"), 1e-3)


def run_of(stage=2, *, precision="fp32", micro=4, dropout=0.0, name="alto", diagnostics=0, json_file=None, **options):
    config = REPO / f"configs/deepspeed/pretrain-stage{stage}.json" if json_file is None else json_file
    shape = {"layers": 2, "hidden": 24, "heads": 3, "sequence": SEQUENCE, "vocabulary": VOCABULARY, "dropout": dropout}
    training = {"global_batch": BATCH, "micro_batch": micro, "precision": precision, "clip": 1.0, "seed": 7}
    return parse(
        {
            "model": shape,
            "training": {"iterations": 100, **training},
            "optimizer": {"name": name, "lr": 123.0, "weight_decay": 0.1, "options": options},
            "deepspeed": {"config": str(config) if stage else ""},
            "logs": {"diagnostics_every": diagnostics},
        }
    )


def tokens_of(step, samples=BATCH):
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, VOCABULARY, (samples, SEQUENCE + 1), generator=generator)


def mine(tokens, micro):
    """This rank's micro-batches of it."""
    return list(tokens.chunk(dist.get_world_size())[dist.get_rank()].split(micro))


@contextlib.contextmanager
def engine_of(run):
    engine = pretrain.build(run)
    try:
        yield engine
    finally:
        engine.close()


def advance(engine, run, start, stop, repeated=False):
    """Steps with a rate that changes; (loss, norm) of each."""
    out = []
    for step in range(start, stop):
        batch = mine(tokens_of(0 if repeated else step), run.training.micro_batch)
        result = engine.train(batch, rate(run, step))
        assert not result.skipped
        # DeepSpeed clips at stage 0 in float32 without saying what the norm was.
        assert math.isfinite(result.grad_norm) == bool(run.deepspeed.config)
        assert set(result.seconds) == {"forward", "backward", "optimizer"}
        out.append((result.loss, result.grad_norm))
    return out


def rate(run, step):
    return LR[run.optimizer.name] * (1 + step % 3)


def weights(engine):
    """Whole float32 weights by name; DeepSpeed's master copies if there are any."""
    out = {}
    for name, p in engine._engine.module.named_parameters():
        if engine._engine.zero_optimization():
            out[name] = safe_get_full_fp32_param(p).cpu().clone()
        else:
            out[name] = p.detach().float().cpu().clone()
    return out


def assert_same(label, got, expected):
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(got[key], value), f"{label}: {key} differs by {(got[key] - value).abs().max():.1e}"
