"""A small network, trained by DeepSpeed with a config, and by the plain optimizer in one process."""

import contextlib
import dataclasses
import functools
import warnings
from itertools import chain

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

from alto_distributed import ALTO
from alto_distributed.deepspeed.build import split_bare_parameters
from alto_distributed.deepspeed.layout import LayoutBuilder
from alto_distributed.sharding import ShardLayout

from . import devices

# Half precision runs on any CPU in torch; DeepSpeed asks for hardware support, which this is not about.
get_accelerator().is_fp16_supported = lambda: True
warnings.simplefilter("ignore", FutureWarning)

STEPS = 10
PARAMS = {"lr": 0.05, "betas": [0.99, 0.9, 0.99], "alpha": -5, "eps": 1e-6, "weight_decay": 0.01}
if devices.NAME != "cpu":
    PARAMS["kernel"] = "torch"  # also of what is computed on the host to compare with: C adds up in another order
# Bitwise, only the definition serves there: torch's lerp on some CPUs rounds the last elements of a tensor otherwise,
# and shards end where parameters do not.
BITWISE = PARAMS if devices.NAME == "cpu" else {**PARAMS, "kernel": "reference"}
# So large that no gradient is subnormal in float16: an average over four ranks would be rounded.
SCALE = 4096
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale": SCALE}}


class Net(nn.Module):
    """Odd sizes, so that shards cut through parameters and are padded; a tied, a frozen and an unused one."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up, self.down = nn.Linear(6, 13), nn.Linear(13, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(3, 3))

    def forward(self, x):
        h = self.embed(x.to(self.scale.device))
        return self.head(self.norm(h + self.scale * self.frozen(self.down(torch.tanh(self.up(h))))))


def network(make=Net):
    torch.manual_seed(11)
    return make()


def batches(steps=STEPS, accumulation=1):
    """Per step, ``accumulation`` global micro-batches."""
    generator = torch.Generator().manual_seed(17)
    for _ in range(steps):
        x = torch.randint(0, 11, (accumulation, 8, 5), generator=generator)
        yield list(zip(x, torch.randint(0, 11, x.shape, generator=generator), strict=True))


def loss_of(out, y):
    return nn.functional.cross_entropy(out.float().flatten(0, 1), y.flatten().to(out.device))


def trainable(model):
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


@functools.cache
def reference(*, clip=1.0, accumulation=1, steps=STEPS, groups=None, schedule=None, make=Net, **params):
    """The same training in one process with the plain optimizer; it is held to the paper in tests/unit/test_paper.py.

    DeepSpeed gives an unused parameter a gradient of zero, in every stage, so it is decayed like the others.
    """
    model = network(make)
    options = {**PARAMS, **params}
    optimizer = ALTO(groups(model) if groups else split_bare_parameters(list(model.parameters())), **options)
    for k, step in enumerate(batches(steps, accumulation)):
        optimizer.zero_grad()
        for x, y in step:
            (loss_of(model(x), y) / accumulation).backward()
        for p in trainable(model).values():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if schedule is not None:
            for group in optimizer.param_groups:
                group.update(schedule(k))
        optimizer.step()
    return model


def config(zero=None, *, clip=1.0, accumulation=1, name="ALTO", params=None, **more):
    world = dist.get_world_size()
    out = {
        "train_micro_batch_size_per_gpu": 8 // world,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "optimizer": {"type": name, "params": PARAMS if params is None else params},
        **more,
    }
    return {**out, "zero_optimization": zero} if zero else out


def train(engine, *, steps=STEPS, accumulation=1, sliced=True):
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in batches(steps, accumulation):
        for x, y in step:
            if sliced:
                x, y = x.chunk(world)[rank], y.chunk(world)[rank]
            engine.backward(loss_of(engine(x), y))
            engine.step()


@contextlib.contextmanager
def running(model, ds_config, **options):
    engine, *_ = deepspeed.initialize(model=model, config=ds_config, **options)
    try:
        yield engine
    finally:
        engine.destroy()


def weights(engine):
    """Whole weights by name, as the model sees them."""
    out = {}
    for name, p in trainable(engine.module).items():
        with deepspeed.zero.GatheredParameters([p]):
            out[name] = p.detach().float().cpu().clone()
    return out


def masters(engine):
    """Whole float32 weights by name."""
    unfused = getattr(engine.optimizer, "fp32_groups", None)
    if unfused is None:
        return {name: safe_get_full_fp32_param(p).cpu().clone() for name, p in trainable(engine.module).items()}
    pairs = zip(chain(*engine.optimizer.fp16_groups), chain(*unfused), strict=True)
    return {engine.param_names[p]: clone.detach().cpu().clone() for p, clone in pairs}


def largest_gap(got, expected):
    """Largest |difference| relative to the parameter's norm; NaN if there is one (Python's max would lose it)."""
    assert got.keys() == trainable(expected).keys()
    return torch.stack([(got[n] - p).norm() / p.norm() for n, p in trainable(expected).items()]).max().item()


def assert_straddles(engine):
    """Some parameter has elements on two ranks, by the layouts and by what other ranks say of theirs."""
    held = {
        s.parameter.name
        for layout in LayoutBuilder(engine).build().values()
        for s in layout.segments
        if s.length and s.length < torch.Size(s.parameter.shape).numel()
    }
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, held)
    assert set.union(*everywhere), "no parameter lies on two ranks"


def shifted(layouts):
    """Every segment by one element."""
    return {
        flat: ShardLayout(layout.numel, [dataclasses.replace(s, offset=s.offset + 1) for s in layout.segments])
        for flat, layout in layouts.items()
    }


def same_bits(a, b):
    """Equal also where both are NaN, as stage 3's uninitialised padding may be."""
    return torch.equal(a.detach().view(torch.int32), b.detach().view(torch.int32))
