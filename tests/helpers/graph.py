"""What a CUDA graph does, without CUDA: operators of a block are recorded with their tensors, and replayed.

Views are the recorded ones. Other results are copied into the tensors that were recorded, so that each operator finds
its operands where they were. What the host computes is not replayed.
"""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alto_distributed.kernels.triton import step as triton_step


class Graph(TorchDispatchMode):
    """Records a block, on a device whose module says that it is capturing meanwhile."""

    def __init__(self, device):
        super().__init__()
        self.device = torch.device(device)
        self._recorded = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == self.device.type:
            raise AssertionError("the host reads a value while a graph is captured")
        result = func(*args, **kwargs)
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
        if any(t.device.type == self.device.type for t in tensors):
            if any(t.device.type == "cpu" for t in tree_leaves(result) if isinstance(t, torch.Tensor)):
                raise AssertionError(f"{func} copies to the host while a graph is captured")
            if not func.is_view:
                self._recorded.append((func, args, kwargs, result))
        return result

    def launched(self, launch):
        """Records a launch of Triton's as one operator."""

        def call(*args):
            with _without(self):
                launch(*args)
            self._recorded.append((launch, args, {}, None))

        return call

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, result in self._recorded:
            again = func(*args, **kwargs)
            old, new = ([t for t in tree_leaves(some) if isinstance(t, torch.Tensor)] for some in (result, again))
            for before, after in zip(old, new, strict=True):
                if before is not after:
                    before.copy_(after)

    @property
    def launches(self):
        return len(self._recorded)

    @contextlib.contextmanager
    def capture(self):
        module = torch.get_device_module(self.device)
        names = ("launch_phase_one", "launch_phase_two")
        launches = {name: getattr(triton_step, name) for name in names}
        asked, module.is_current_stream_capturing = module.is_current_stream_capturing, lambda: True
        try:
            for name, launch in launches.items():
                setattr(triton_step, name, self.launched(launch))
            with self:
                yield self
        finally:
            module.is_current_stream_capturing = asked
            for name, launch in launches.items():
                setattr(triton_step, name, launch)


@contextlib.contextmanager
def _without(mode):
    with torch.utils._python_dispatch._disable_current_modes():
        yield
