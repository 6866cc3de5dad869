"""The device that rank tests run on: ``DEVICE=cpu`` (the default), ``pretend`` (see helpers/pretend) or ``cuda``."""

import os
import platform

import torch

from alto_distributed.sharding import collective

NAME = os.environ.get("DEVICE", "cpu")
BACKENDS = {"cpu": "gloo", "pretend": "pretend", "cuda": "nccl"}
if NAME not in BACKENDS:
    raise ValueError(f"DEVICE={NAME!r} is not one of {', '.join(BACKENDS)}")


def install(modules):
    """Before anything uses the device, in the process that forks the ranks. CUDA must not be touched there.

    Args:
        modules: names of the modules whose cases are to run, which tell the frameworks that they use.
    """
    if NAME == "pretend":
        from . import pretend
        from .pretend import deepspeed, megatron

        pretend.install()
        if any(word in modules for word in ("zero", "deepspeed")):
            deepspeed.install()
        if "megatron" in modules:
            megatron.install()
        if not os.environ.get("PRETEND_NO_FLOAT64"):
            collective.FLOAT64_BACKENDS.add(NAME)


def enough(world):
    """Whether there is a device for each rank."""
    return NAME != "cuda" or torch.cuda.device_count() >= world


def here():
    """This rank's device."""
    if NAME == "cpu":
        return torch.device("cpu")
    return torch.device(NAME, int(os.environ["LOCAL_RANK"]) % torch.get_device_module(NAME).device_count())


def connect():
    """Join the other ranks, as a program on this device would."""
    options = {}
    if NAME != "cpu":
        torch.get_device_module(NAME).set_device(here())
        if NAME == "cuda" or os.environ["WORLD_SIZE"] == "2":
            # As many programs do, and many do not. A group that is bound is split to make those of a mesh, which the
            # pretend one cannot do.
            options["device_id"] = here()
    torch.distributed.init_process_group(BACKENDS[NAME], **options)


def mesh(*shape, names=None):
    """A device mesh over the ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(NAME, shape, mesh_dim_names=names)


def report():
    """What a report on a device begins with."""
    from importlib.metadata import PackageNotFoundError, version

    import alto_distributed

    print(f"alto_distributed {alto_distributed.__version__}, Python {platform.python_version()}, {platform.platform()}")
    for name in ("torch", "triton", "deepspeed", "megatron-core", "transformer-engine"):
        try:
            print(f"{name} {version(name)}")
        except PackageNotFoundError:
            print(f"{name} is not installed")
    if NAME == "cuda":
        print(f"CUDA {torch.version.cuda}, HIP {torch.version.hip}, NCCL {torch.cuda.nccl.version()}")
        for index in range(torch.cuda.device_count()):
            print(f"cuda:{index} {torch.cuda.get_device_name(index)}, {torch.cuda.get_device_capability(index)}")


if __name__ == "__main__":
    report()
