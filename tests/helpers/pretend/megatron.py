"""Megatron on the pretend accelerator: what asks ``torch.cuda`` gets ``torch.pretend``.

``install()`` before anything of Megatron's is imported, in place of scripts/megatron_on_cpu.py's, which then does
nothing. Two of that one's stand-ins are used: the name that Megatron lacks without TransformerEngine, on GPUs too, and
the one by which layers that are computed again find this device.
"""

import functools
import os
import sys

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from alto_distributed.import_hooks import AfterImport
from scripts import megatron_on_cpu

from . import NAME, device_module, device_of
from . import install as install_device

IS_CUDA = torch.Tensor.is_cuda.__get__


class CudaIsPretend(TorchFunctionMode):
    """Every call that asks for the device "cuda", by name or by argument, gets this one."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == IS_CUDA:
            return args[0].device.type == NAME
        if not kwargs and megatron_on_cpu.is_unconcerned(func, args):
            return func(*args)
        result = func(*map(_renamed, args), **{name: _renamed(value) for name, value in (kwargs or {}).items()})
        if func == megatron_on_cpu.TYPE_OF_TENSOR and isinstance(result, str):
            # Megatron's optimizers sort parameters by the names of CUDA's tensor types.
            return result.replace(f"torch.{NAME}.", "torch.cuda.", 1)
        return result


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
    CudaIsPretend().__enter__()  # for the rest of the process
    dist.init_process_group = _nccl_is_pretend(dist.init_process_group)
    dist.new_group = _nccl_is_pretend(dist.new_group)
    again = functools.partial(megatron_on_cpu.devices_of_recomputation, CudaIsPretend)
    experts = megatron_on_cpu.names_of_transformer_engine
    sys.meta_path.insert(
        0,
        AfterImport(
            {"megatron.core.tensor_parallel.random": again, "megatron.core.transformer.moe.moe_utils": experts}
        ),
    )


def _to_device(self, device=None, *more, **options):
    return self.to(device_of(_renamed(device)), *more, **options)


def _nccl_is_pretend(make):
    @functools.wraps(make)
    def made(*args, **options):
        options = {name: NAME if value == "nccl" else _renamed(value) for name, value in options.items()}
        return make(*(NAME if value == "nccl" else value for value in args), **options)

    return made
