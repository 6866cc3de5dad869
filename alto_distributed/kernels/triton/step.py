"""The update on a GPU: a kernel in the sense of this folder, with one launch of Triton's a phase.

Per step: one small copy to the device if an address or a number changed (gradients that were freed and
allocated anew, the bias corrections), one launch for each phase. Pieces of other dtypes than the rest of
the model need launches of their own. The host never waits for the device.

Triton is imported when someone asks whether it is there or launches, not before.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...spans import PLAIN
from .. import chunked
from ..shards import FlatShard
from ..skip import SkipIf
from .launch import launch_phase_one, launch_phase_two
from .table import Launch, Shape, Tiling, launches_of, shape_of
from .values import Values

_LOW_PRECISION = (torch.bfloat16, torch.float16)
_WEIGHTS_AND_GRADIENTS = (torch.float32, *_LOW_PRECISION)
_STATES = (torch.float32, torch.bfloat16)

# Earlier ones do not compile the kernels: they have no tuples.
_OLDEST_TRITON = (3, 4)

# Sets of pieces that take turns: those of several optimizers, of steps in which some gradients are None.
_KEPT = 16


def available(device: torch.device) -> bool:
    """Whether this kernel can serve ``device``: a GPU that Triton knows, and a Triton that is new enough."""
    if device.type not in ("cuda", "xpu") or not _triton_is_installed():
        return False
    if device.type == "cuda" and torch.version.hip is None:
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return True


@functools.cache
def _triton_is_installed() -> bool:
    try:
        version = importlib.import_module("triton").__version__
    except ImportError:
        return False
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and tuple(map(int, numbers.groups())) >= _OLDEST_TRITON


def serves(piece: FlatShard) -> bool:
    """Whether the kernel is written for a piece. Not float64, nor tensors whose elements are not side by side."""
    return (
        piece.param.dtype in _WEIGHTS_AND_GRADIENTS
        and piece.grad.dtype in _WEIGHTS_AND_GRADIENTS
        and piece.exp_avg_sq.dtype == torch.float32
        and piece.exp_avg.dtype in _STATES
        and (piece.grad_ema is None or piece.grad_ema.dtype in _STATES)
        and (piece.model_copy is None or piece.model_copy.dtype in _LOW_PRECISION)
        and all(
            tensor is None or (type(tensor) in PLAIN and tensor.is_contiguous())  # an expanded gradient is not
            for tensor in (
                piece.param,
                piece.grad,
                piece.exp_avg,
                piece.exp_avg_sq,
                piece.grad_ema,
                piece.model_copy,
            )
        )
    )


@dataclass(frozen=True)
class _Prepared:
    """What belongs to the pieces of one shape that step on one stream."""

    shape: Shape
    stream: int
    launches: tuple[Launch, ...]
    values: Values


class TritonKernel:
    """Keeps the tables of the pieces it has seen, by shape and not by tensor: it holds no tensor of the model.

    Args:
        tiling: how much a program does; by default what suits the device.
    """

    def __init__(self, tiling: Tiling | None = None) -> None:
        self._tiling = tiling
        self._kept: list[_Prepared] = []

    def phase_one(self, pieces: Sequence[FlatShard], sums: torch.Tensor, skip: torch.Tensor | None = None) -> None:
        ours, others = _divided(pieces)
        if ours:
            ready = self._ready(ours)
            values = ready.values
            launch_phase_one(ready.launches, ready.shape.tiling, values.pieces, values.coefficients, sums, skip)
        if others:
            (chunked if skip is None else SkipIf(chunked, skip)).phase_one(others, sums)

    def phase_two(
        self,
        pieces: Sequence[FlatShard],
        step_sizes: torch.Tensor,
        prepared: None = None,
        skip: torch.Tensor | None = None,
    ) -> None:
        ours, others = _divided(pieces)
        if ours:
            ready = self._ready(ours)
            values = ready.values
            launch_phase_two(ready.launches, ready.shape.tiling, values.pieces, values.coefficients, step_sizes, skip)
        if others:
            (chunked if skip is None else SkipIf(chunked, skip)).phase_two(others, step_sizes)

    def unless(self, skip: torch.Tensor) -> TritonUnless:
        """This kernel, but its programs end at once if ``skip`` (float32, on their device) is not 0."""
        return TritonUnless(self, skip)

    def _ready(self, pieces: Sequence[FlatShard]) -> _Prepared:
        """The launches for these pieces, with their addresses and numbers on the device."""
        device = pieces[0].param.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "a CUDA graph would replay the bias corrections and the learning rate of this one step for ever: "
                "capture a ReplayedStep (kernels/triton/graph.py), whose numbers live on the device"
            )
        shape, stream = shape_of(pieces, self._tiling), _stream(device)
        for place, kept in enumerate(self._kept):
            # Compared, not hashed: most tuples of spans are the very objects of last time.
            if kept.stream == stream and kept.shape == shape:
                ready = self._kept.pop(place)
                break
        else:
            ready = _Prepared(shape, stream, launches_of(shape), Values(len(pieces), device))
        self._kept.insert(0, ready)
        del self._kept[_KEPT:]
        ready.values.send(pieces)
        return ready


class TritonUnless:
    """See :meth:`TritonKernel.unless`."""

    def __init__(self, kernel: TritonKernel, skip: torch.Tensor) -> None:
        self._kernel = kernel
        self._skip = skip

    def phase_one(self, pieces: Sequence[FlatShard], sums: torch.Tensor) -> None:
        self._kernel.phase_one(pieces, sums, self._skip)

    def phase_two(self, pieces: Sequence[FlatShard], step_sizes: torch.Tensor, prepared: None = None) -> None:
        self._kernel.phase_two(pieces, step_sizes, skip=self._skip)


def _divided(pieces: Sequence[FlatShard]) -> tuple[list[FlatShard], list[FlatShard]]:
    """Pieces that the kernel serves, and those that go the way of plain torch operations."""
    ours = [piece for piece in pieces if serves(piece)]
    return ours, [] if len(ours) == len(pieces) else [piece for piece in pieces if not serves(piece)]


def _stream(device: torch.device) -> int:
    """Steps on different streams may run at the same time, so they do not share partial sums."""
    if device.type == "cpu":
        return 0
    return int(torch.get_device_module(device).current_stream(device).stream_id)


kernel = TritonKernel()
"""The one that all optimizers of a process share."""


def kernel_on(device: torch.device) -> TritonKernel:
    """That one, for a device that it can serve.

    Raises:
        ValueError: it cannot.
    """
    if not available(device):
        oldest = ".".join(map(str, _OLDEST_TRITON))
        raise ValueError(
            f'kernel="triton" cannot serve tensors on {device}: it needs triton {oldest} or later (pip install '
            "'alto-distributed[gpu]') and a GPU of compute capability 8.0 or later (or an AMD or Intel one); use "
            'kernel="auto"'
        )
    return kernel
