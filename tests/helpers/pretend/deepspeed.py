"""DeepSpeed on the pretend accelerator: its own accelerator for CUDA, with the names changed.

``install()`` before anything asks DeepSpeed for its accelerator.
"""

import functools
import importlib.util
import os
import sys
import types
from pathlib import Path

import torch

from . import NAME
from . import install as install_device

#: In DeepSpeed's accelerator/cuda_accelerator.py.
RENAMED = {
    "import torch.cuda": "import torch",
    "torch.cuda": f"torch.{NAME}",
    "'cuda": f"'{NAME}",
    '"cuda': f'"{NAME}',
    "'nccl'": f"'{NAME}'",
    "from .abstract_accelerator": "from deepspeed.accelerator.abstract_accelerator",
}


@functools.cache
def install():
    install_device()
    folder = Path(importlib.util.find_spec("deepspeed").submodule_search_locations[0], "accelerator")
    source = (folder / "cuda_accelerator.py").read_text()
    for old, new in RENAMED.items():
        assert old in source or old == '"cuda', f"DeepSpeed's accelerator for CUDA has no {old!r}"
        source = source.replace(old, new)
    module = types.ModuleType("tests.helpers.pretend.cuda_accelerator")
    sys.modules[module.__name__] = module
    exec(compile(source, module.__name__, "exec"), module.__dict__)

    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class Accelerator(module.CUDA_Accelerator):
        """Nothing is compiled for the device: extensions are the CPU's."""

        op_builder_dir = CPU_Accelerator.op_builder_dir
        create_op_builder = CPU_Accelerator.create_op_builder
        get_op_builder = CPU_Accelerator.get_op_builder

    set_accelerator(Accelerator())
    torch.distributed.init_process_group = _bound(torch.distributed.init_process_group)


def _bound(connect):
    """DeepSpeed binds a rank to its device where that is called "cuda" (comm/torch.py)."""

    @functools.wraps(connect)
    def init_process_group(backend=None, **options):
        if backend == NAME:
            options.setdefault("device_id", torch.device(NAME, int(os.environ.get("LOCAL_RANK", "0"))))
        return connect(backend, **options)

    return init_process_group
