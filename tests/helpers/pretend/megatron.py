"""Megatron on the pretend accelerator: what asks ``torch.cuda`` gets ``torch.pretend``.

``install()`` before anything of Megatron's is imported, in place of scripts/megatron_on_cpu.py's, which then does
nothing. Two things of that one are used: the name that Megatron lacks without TransformerEngine, on GPUs too, and the
way to rename devices.
"""

import functools
import os
import sys

import torch
import torch.distributed as dist

from alto_distributed.import_hooks import AfterImport
from scripts import megatron_on_cpu

from . import NAME, device_module, device_of
from . import install as install_device


def _renamed(value):
    if isinstance(value, torch.device) and value.type == "cuda":
        return device_of(value.index)
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return device_of(torch.device(value).index)
    return value


@functools.cache
def install():
    install_device()
    torch.cuda.stands_in_for_a_gpu = True  # scripts/megatron_on_cpu.py is not needed
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # Megatron compiles small functions for the GPU
    for name, value in vars(device_module()).items():
        if not name.startswith("__"):
            setattr(torch.cuda, name, value)
    torch.cuda._lazy_call = lambda call, **_: call()
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state
    torch.Tensor.cuda = _to_device
    torch.nn.Module.cuda = _to_device
    # Every call that asks for the device "cuda", by name or by argument, gets this one.
    megatron_on_cpu.rename_devices(_renamed, f"torch.{NAME}.")
    torch.Tensor.is_cuda = property(lambda self: self.device.type == NAME)
    dist.Backend.backend_capability["gloo"].append(NAME)  # as it has CUDA's
    dist.init_process_group = _nccl_is_pretend(dist.init_process_group)
    dist.new_group = _nccl_is_pretend(dist.new_group)
    names = megatron_on_cpu.names_of_transformer_engine
    sys.meta_path.insert(0, AfterImport({"megatron.core.transformer.moe.moe_utils": names}))


def _to_device(self, device=None, *more, **options):
    return self.to(device_of(_renamed(device)), *more, **options)


def _nccl_is_pretend(make):
    @functools.wraps(make)
    def made(*args, **options):
        options = {name: NAME if value == "nccl" else _renamed(value) for name, value in options.items()}
        return make(*(NAME if value == "nccl" else value for value in args), **options)

    return made
