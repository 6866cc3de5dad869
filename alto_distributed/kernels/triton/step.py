"""The update on a GPU: a kernel in the sense of this folder, with one launch of Triton's a phase.

Per step: one small copy to the device if an address or a number changed (gradients that were freed and
allocated anew, the bias corrections), one launch for each phase. Shards of other dtypes than the rest of
the model need launches of their own. The host never waits for the device.

Triton is imported when someone asks whether it is there or launches, not before.
"""

from __future__ import annotations

import functools
import importlib
import re
import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..capture import is_capturing, refuse_cold
from ..foreach import ForeachKernel
from ..protocol import Kernel
from ..shards import Dtypes, FlatShard, Memory, batch_of
from .launch import launch_phase_one, launch_phase_two
from .table import ShardTable, Tables, Tiling
from .values import Values

if TYPE_CHECKING:
    from typing import TypeGuard

_LOW_PRECISION = (torch.bfloat16, torch.float16)
_WEIGHTS_AND_GRADIENTS = (torch.float32, *_LOW_PRECISION)
_STATES = (torch.float32, torch.bfloat16)

# Earlier ones do not compile the kernels: they have no tuples.
_OLDEST_TRITON = (3, 4)


def available(device: torch.device) -> bool:
    """Whether this kernel can serve ``device``: a GPU that Triton knows, and a Triton that is new enough."""
    if device.type not in ("cuda", "xpu") or not _triton_is_installed():
        return False
    if device.type == "cuda" and torch.version.hip is None:
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return True


def _triton_version() -> str:
    """What is installed; "" if nothing is."""
    try:
        return str(importlib.import_module("triton").__version__)
    except ImportError:
        return ""


@functools.cache
def _triton_is_installed() -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", _triton_version())
    return numbers is not None and tuple(map(int, numbers.groups())) >= _OLDEST_TRITON


def serves(shard: FlatShard) -> bool:
    """Whether the kernel is written for a shard. Not float64, nor tensors whose elements are not side by side, nor
    weights that are rounded stochastically."""
    return _dtypes(shard, shard.memory) is not None


def _dtypes(shard: FlatShard, memory: Memory | None) -> Dtypes | None:
    """What a launch for a shard in this memory is compiled for; None if there is none."""
    return None if memory is None or shard.rounds_weights else _launch(*memory.dtypes)


@functools.cache
def _launch(
    param: torch.dtype, grad: torch.dtype, m: torch.dtype, v: torch.dtype, u: torch.dtype | None
) -> Dtypes | None:
    known = (
        param in _WEIGHTS_AND_GRADIENTS
        and grad in _WEIGHTS_AND_GRADIENTS
        and m in _STATES
        and v == torch.float32
        and (u is None or u in _STATES)
    )
    return Dtypes(param, grad, m, u) if known else None


class Prepared(NamedTuple):
    """What phase one has made ready for phase two."""

    tables: Tables
    tiling: Tiling
    values: Values
    ours: bool
    """Whether this kernel has anything to do."""
    others: list[FlatShard]
    """Which go the way of plain torch operations."""
    rest: Any
    """What that way has made ready."""


class TritonKernel:
    """Keeps its tables with the plan of a step, see :class:`..shards.Batch`.

    Args:
        tiling: how much a program does; by default what suits the device.
        skip: float32, on the device of the shards: programs end at once if it is not 0.
        only: dtypes of the shards that it may serve; by default all that it can.
    """

    def __init__(
        self,
        tiling: Tiling | None = None,
        skip: torch.Tensor | None = None,
        only: Collection[Dtypes] | None = None,
    ) -> None:
        self._tiling = tiling
        self._skip = skip
        self._only = only

    def phase_one(self, shards: Sequence[FlatShard], sums: torch.Tensor) -> Prepared:
        prepared = self._prepare(shards)
        if prepared.ours:
            launch_phase_one(prepared.tables, prepared.tiling, prepared.values, sums, self._skip)
        rest = self._other_way.phase_one(prepared.others, sums) if prepared.others else None
        return prepared._replace(rest=rest)

    def phase_two(
        self, shards: Sequence[FlatShard], step_sizes: torch.Tensor, prepared: Prepared | None = None
    ) -> None:
        prepared = prepared or self._prepare(shards)
        if prepared.ours:
            launch_phase_two(prepared.tables, prepared.tiling, prepared.values, step_sizes, self._skip)
        if prepared.others:
            self._other_way.phase_two(prepared.others, step_sizes, prepared.rest)

    def unless(self, skip: torch.Tensor) -> TritonKernel:
        """This kernel, but its programs end at once if ``skip`` (float32, on their device) is not 0."""
        return TritonKernel(self._tiling, skip, self._only)

    def only(self, dtypes: Collection[Dtypes]) -> TritonKernel:
        """This kernel for shards of these dtypes; others go the way of plain torch operations."""
        return TritonKernel(self._tiling, self._skip, dtypes)

    def _serves(self, shard: FlatShard) -> bool:
        return self._allowed(_dtypes(shard, shard.memory))

    def _allowed(self, dtypes: Dtypes | None) -> TypeGuard[Dtypes]:
        return dtypes is not None and (self._only is None or dtypes in self._only)

    @property
    def _other_way(self) -> Kernel:
        return ForeachKernel(self._skip)

    def _prepare(self, shards: Sequence[FlatShard]) -> Prepared:
        """The tables of these shards, with their addresses and numbers on the device."""
        batch = batch_of(shards)
        ours: list[tuple[FlatShard, Memory, Dtypes]] = []
        others: list[FlatShard] = []
        for shard in batch:
            memory = shard.memory
            dtypes = _dtypes(shard, memory)
            if memory is not None and self._allowed(dtypes):
                ours.append((shard, memory, dtypes))
            else:
                others.append(shard)
                if dtypes is not None:
                    _warn_of_unproved(dtypes)
        device = batch[0].param.device if batch else torch.device("cpu")
        if ours and is_capturing(device.type):
            table, tables, values = self._for_capture(ours, batch.kept)
        else:
            table, values = self._in_use(ours, device, batch.kept)
            tables = table.tables
        if ours:
            values.send(ours, table.rows)
        return Prepared(tables, table.tiling, values, bool(ours), others, None)

    def _in_use(
        self, shards: Sequence[tuple[FlatShard, Memory, Dtypes]], device: torch.device, kept: dict[Any, Any]
    ) -> tuple[ShardTable, Values]:
        table, values = kept.get(key := ("triton", self._tiling, _stream(device)), (None, None))
        if table is None:
            table = ShardTable(device, self._tiling)
        if table.update(shards) or values is None:
            values = Values(len(table.rows), device)
        kept[key] = kept["triton", self._tiling] = table, values
        return table, values

    def _for_capture(
        self, shards: Sequence[tuple[FlatShard, Memory, Dtypes]], kept: dict[Any, Any]
    ) -> tuple[ShardTable, Tables, Values]:
        """What no step changes is that of the last step, on whatever stream; what is written is the graph's own."""
        table, values = kept.get(("triton", self._tiling), (None, None))
        own = None
        if table is not None and all(table.knows(shard, dtypes) for shard, _, dtypes in shards):
            own = values.for_capture()
        if own is None:
            refuse_cold("the tables of the Triton kernel are not on the device yet, or another graph has taken them")
        return table, replace(table.tables, partials=torch.empty_like(table.tables.partials)), own


@functools.cache
def _warn_of_unproved(dtypes: Dtypes) -> None:
    """Once a process for the same dtypes. To prove them now would take the other ranks, which may not have them."""
    warnings.warn(
        f"ALTO does not use its Triton kernel for tensors of {dtypes.in_words()}: it was checked at the first step, "
        "and there were no gradients of these dtypes. They take torch's own operations, with the same result and more "
        'launches. Have all gradients at the first step, or choose with kernel="triton" or kernel="torch"',
        stacklevel=2,
    )


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
        oldest, found = ".".join(map(str, _OLDEST_TRITON)), _triton_version()
        raise ValueError(
            f'kernel="triton" cannot serve tensors on {device}: it needs triton {oldest} or later (here is '
            f"{found or 'none'}; pip install 'alto-distributed[gpu]') and a GPU of compute capability 8.0 or later (or "
            'an AMD or Intel one); use kernel="auto"'
        )
    return kernel
