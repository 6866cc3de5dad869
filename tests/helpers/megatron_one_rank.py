"""A GPT on one rank, and what Megatron builds and trains for it from a config."""

import contextlib
import functools

import torch

from .megatron_gpt import Job, Layout, build, named_parameters, parallel

# isort: split
# The imports below need what megatron_gpt puts in place of a GPU.

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import get_megatron_optimizer

JOB = Job(layers=1)
_groups = contextlib.ExitStack()


@functools.cache
def groups():
    """Megatron's process groups, made once and never closed: they serve all cases."""
    _groups.enter_context(parallel(Layout()))


def model(distributed=False):
    """A GPT in Megatron's data-parallel wrapper; all are alike."""
    groups()
    (chunk,) = build(JOB)
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
    return DistributedDataParallel(chunk.config, settings, chunk)


def optimizer_of(config, chunk=None, **options):
    chunk = chunk or model(config.use_distributed_optimizer)
    return get_megatron_optimizer(config, [chunk], use_gloo_process_groups=False, **options)


def trained(config, steps=3, chunk=None, finish=None):
    """(optimizer, weights) after some steps on gradients that follow from the step."""
    chunk = chunk or model(config.use_distributed_optimizer)
    optimizer = optimizer_of(config, chunk)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for p in chunk.parameters():
            p.main_grad.copy_(torch.randn(p.shape, generator=generator))
        optimizer.step()
        if finish:
            finish(optimizer)
    return optimizer, {name: p.detach().clone() for name, p in named_parameters([chunk])}


def assert_same_weights(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name
