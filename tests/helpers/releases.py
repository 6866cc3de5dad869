"""Releases: which we support, and what other ones of the frameworks have and do (scripts/matrix.py)."""

import ast
import functools
import importlib.metadata
import os
import re
from pathlib import Path

import pytest
import torch
import torch.utils.cpp_extension

from .cases import REPO


def _version(name):
    """Of the release in the overlay, or of the installed one; () if there is none."""
    overlay = os.environ.get("ALTO_OVERLAY")
    for where in (overlay,) if overlay and any(Path(overlay).glob(f"{name.replace('-', '_')}-*")) else (None,):
        found = importlib.metadata.distributions(name=name, **({"path": [where]} if where else {}))
        for distribution in found:
            return tuple(int(part) for part in re.findall(r"\d+", distribution.version.partition("+")[0]))
    return ()


TORCH, DEEPSPEED, MEGATRON = _version("torch"), _version("deepspeed"), _version("megatron-core")


def need_torch(major, minor, what):
    """Skip a test or a case that an older torch has nothing for."""
    if (major, minor) > TORCH:
        pytest.skip(f"{what} needs torch {major}.{minor}")


def without_managed_memory():
    """Put right what megatron-core 0.15 does at its import where torch has CUDA and the machine has no GPU.

    It compiles an allocator. It expects that this may fail, but not in the way in which it fails there.
    """
    if MEGATRON < (0, 16) and not torch.cuda.is_available():
        torch.utils.cpp_extension.load_inline = _not_compiled


def _not_compiled(*args, **kwargs):
    raise RuntimeError("there is no GPU to compile for")


def wait_for_all_gathers():
    """Put right what DeepSpeed before 0.19.8 does wrong over gloo alone.

    Stage 3 starts several all-gathers and waits for the last of them. NCCL runs them in order; gloo does not, and then
    a rank computes with memory that has not arrived.
    """
    from deepspeed.comm.torch import TorchBackend

    for name in ("all_gather", "all_gather_into_tensor"):
        setattr(TorchBackend, name, _waiting(getattr(TorchBackend, name)))
    TorchBackend.all_gather_coalesced = _one_by_one


def _waiting(gather):
    @functools.wraps(gather)
    def waiting(*args, **kwargs):
        work = gather(*args, **kwargs)
        if work is not None:
            work.wait()
        return work

    return waiting


def _one_by_one(self, output_tensors, input_tensors, group=None, async_op=False):
    pairs = zip(output_tensors, input_tensors, strict=True)
    works = [self.all_gather_into_tensor(output, sent, group=group, async_op=async_op) for output, sent in pairs]
    return works[-1]


def supported(framework):
    """SUPPORTED_VERSIONS of a folder, read without importing the framework."""
    for node in ast.parse((REPO / "alto_distributed" / framework / "versions.py").read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "SUPPORTED_VERSIONS":
            return ast.literal_eval(node.value)
    raise LookupError(framework)
