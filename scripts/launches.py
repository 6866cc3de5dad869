"""Launches and bytes of one step, counted on meta tensors: what an accelerator would be asked to do.

    python scripts/launches.py > table.md

Every operator that a step dispatches is a launch, except views and what makes memory without writing it. A foreach
operation on CUDA is as many launches as its tensors need: 320 blocks of 65,536 elements, and 110, 64, 48 or 36 tensors
in one launch, by the number of lists (MultiTensorApply.cuh). A norm also fills the buffer of its blocks' sums, and adds
these up for 400 tensors in a launch (ForeachReduceOp.cu). `cat` takes 128 tensors in a launch, or 64 if one of them is
not contiguous, as an expanded number (Shape.cu). These limits are those of CUDA 12; with CUDA 13 they are wider. The
bytes are those of all tensors that an operator reads or writes, the extra memory that of all that a step has made and
not yet freed.
"""

from __future__ import annotations

import collections
import contextlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alto_distributed import ALTO
from alto_distributed.kernels.triton import step, table, values
from alto_distributed.kernels.triton.columns import HIGH, LOW
from alto_distributed.kernels.triton.table import Tables
from alto_distributed.sharding import LogicalParameter, ShardLayout
from scripts import scale

ROOT = Path(__file__).resolve().parent.parent
BLOCK, BLOCKS = 65536, 320
#: Tensors in a launch, by the number of lists.
TENSORS = (110, 64, 48, 36, 30)
#: Tensors in the last launch of a norm, and of a cat whose tensors are contiguous.
NORMS, CAT = 400, 128
#: Operators that launch nothing.
FREE = ("empty", "empty_like", "new_empty", "detach", "lift_fresh")


def launches_of_cat(tensors: Sequence[torch.Tensor]) -> int:
    return -(-len(tensors) // (CAT if all(tensor.is_contiguous() for tensor in tensors) else CAT // 2))


def launches_of_lists(lists: Sequence[Sequence[torch.Tensor]]) -> int:
    """Of a foreach operation over lists of tensors of one length."""
    limit = TENSORS[len(lists) - 1]
    launches = blocks = tensors = 0
    for tensor in lists[0]:
        remaining = -(-tensor.numel() // BLOCK)
        while remaining:
            if tensors == limit or blocks == BLOCKS:
                launches, blocks, tensors = launches + 1, 0, 0
            taken = min(remaining, BLOCKS - blocks)
            remaining, blocks, tensors = remaining - taken, blocks + taken, tensors + 1
    return launches + bool(tensors)


class Counting(TorchDispatchMode):
    """Counts the operators of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.bytes = self.peak = 0
        self.by_name: collections.Counter[str] = collections.Counter()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._in_use = self._next = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        devices = {t.device.type for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)}
        before = self.launches
        if "meta" in devices and not func.is_view and not name.endswith("_"):
            self._made([t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)], result)
        if name.startswith("_foreach_") and devices == {"meta"}:
            self._lists(name, args, result)
        elif "meta" in devices and not func.is_view and name not in FREE:
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            written = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
            self.launches += launches_of_cat(args[0]) if name in ("cat", "stack") else 1
            self.bytes += sum(t.untyped_storage().nbytes() if 0 in t.stride() else _bytes(t) for t in tensors)
            self.bytes += sum(map(_bytes, written))
        self.by_name[name] += self.launches - before
        return result

    def _made(self, given: Sequence[torch.Tensor], result: Any) -> None:
        """Note the memory of a result that is no operand's."""
        old = {tensor.untyped_storage()._cdata for tensor in given}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in old:
                self._in_use += storage.nbytes()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if self._in_use > max(self.peak, self._next):  # to look at all of them each time would take too long
            self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
            self._in_use = sum(size for _, size in self._alive.values())
            self.peak = max(self.peak, self._in_use)
            self._next = 1.01 * self._in_use

    def _lists(self, name: str, args: Any, result: Any) -> None:
        lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], torch.Tensor)]
        read = list(lists)
        if name == "_foreach_norm":
            self.launches += 1 + -(-len(read[0]) // NORMS)
        elif not name.endswith("_"):
            lists.append(result)
        # The same list twice is read once.
        distinct = {tuple(map(id, some)): some for some in lists}
        self.launches += launches_of_lists(lists)
        written = result if not name.endswith("_") else read[0]
        self.bytes += sum(_bytes(t) for some in distinct.values() for t in some)
        self.bytes += sum(map(_bytes, written)) if name.endswith("_") else 0


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@contextlib.contextmanager
def triton_counted(counting: Counting) -> Iterator[None]:
    """The Triton kernel on meta tensors: its launches are counted, with the bytes of the elements, and not made."""

    def launched(phase: int, tables: Tables) -> None:
        counting.launches += len(tables.launches) + (phase == 1)  # one adds up the sums
        for launch in tables.launches:
            param, grad, m, u = (0 if dtype is None else dtype.itemsize for dtype in launch.dtypes)
            moved = param + grad + 2 * (m + u + 4) if phase == 1 else 2 * param + m + 4
            counting.bytes += moved * int((launch.chunks[:, HIGH] - launch.chunks[:, LOW]).sum())

    stubs: dict[tuple[Any, str], Any] = {
        (step, "available"): lambda device: True,
        (step, "_stream"): lambda device: 0,
        (step, "launch_phase_one"): lambda tables, *_: launched(1, tables),
        (step, "launch_phase_two"): lambda tables, *_: launched(2, tables),
        (values, "upload"): lambda sent, device, into: None,  # there is no memory to pin
        (table, "upload"): lambda sent, device: sent,
    }
    before = {name: getattr(*name) for name in stubs}
    try:
        for (module, name), stub in stubs.items():
            setattr(module, name, stub)
        yield
    finally:
        for (module, name), original in before.items():
            setattr(module, name, original)


class _Everything(set[Any]):
    def __contains__(self, _: Any) -> bool:
        return True


def step_of(tensors: Sequence[torch.Tensor], layouts: Any, groups: Any, **options: Any) -> Counting:
    """The second step of an ALTO over meta tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = ALTO(groups, **options)
    optimizer.set_layouts(layouts)
    optimizer._plans.agreed = _Everything()  # there is nobody to agree with
    optimizer._skipped.count_later = lambda *_: None  # there is no memory to pin
    counting = Counting()
    for _ in range(2):
        for tensor in tensors:
            tensor.grad = torch.empty_like(tensor)
        counting = Counting()
        with triton_counted(counting), counting:
            optimizer.step()
    return counting


MOE = [
    (f"{i:04d}.{n}", shape) for i in range(1000) for n, shape in (("up", (64, 32)), ("down", (32, 64)), ("b", (64,)))
]
CASES: dict[str, tuple[Any, int]] = {
    "345M, one GPU": (scale.MODELS["GPT-2 345M"], 1),
    "345M, ZeRO-2 over 8": (scale.MODELS["GPT-2 345M"], 8),
    "7B, ZeRO-2 over 8": (scale.MODELS["7B"], 8),
    "7B, ZeRO-2 over 64": (scale.MODELS["7B"], 64),
    "3,000 small tensors of a MoE": (MOE, 1),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16 grad_ema": {"grad_ema_dtype": "bfloat16"},
    "bf16 exp_avg": {"exp_avg_dtype": "bfloat16"},
    "skip_nonfinite": {"skip_nonfinite": True},
    "measured": {"diagnostics_every": 1},
    "Triton": {"kernel": "triton"},
}


class Counted(NamedTuple):
    elements: int
    """On the rank."""
    launches: int
    bytes: float
    """A parameter."""
    extra: int
    """MiB at the most that the step has made and not yet freed."""


def count(case: str, **options: Any) -> Counted:
    """The second step of an ALTO over the parameters of a case."""
    options = {"kernel": "torch", **options}
    shapes, ranks = CASES[case]
    if ranks == 1:
        groups = [
            {"params": [torch.empty(shape, device="meta") for _, shape in group], "weight_decay": decay}
            for group, decay in zip(scale.two_groups(shapes), (0.01, 0.0), strict=False)
        ]
        tensors = [tensor for group in groups for tensor in group["params"]]
        counted = step_of(tensors, {}, groups, **options)
    else:
        layouts = _shards(shapes, ranks)
        tensors = list(layouts)
        groups = [{"params": [t], "weight_decay": d} for t, d in zip(tensors, (0.01, 0.0), strict=True)]
        counted = step_of(tensors, layouts, groups, **options)
    elements = sum(tensor.numel() for tensor in tensors)
    return Counted(elements, counted.launches, counted.bytes / elements, -(-counted.peak // 2**20))


def _shards(shapes: scale.Shapes, ranks: int) -> dict[torch.Tensor, ShardLayout]:
    """The first rank's, as ZeRO-2 cuts them, without process groups: meta tensors cannot be sent."""
    layouts = {}
    for group in scale.two_groups(shapes):
        whole = [LogicalParameter(name, shape) for name, shape in group]
        piece = -(-sum(scale.numel(shape) for _, shape in group) // (2 * ranks)) * 2
        layouts[torch.empty(piece, device="meta")] = ShardLayout.of_flat_shard(whole, 0, piece)
    return layouts


def markdown() -> str:
    """The table in docs/benchmarks.md."""
    lines = [
        "| model | options | elements on the rank | launches | bytes a parameter | extra MiB |",
        "|---|---|--:|--:|--:|--:|",
    ]
    lines += [line(case, name, count(case, **OPTIONS[name])) for case in CASES for name in OPTIONS]
    return "\n".join(lines)


def line(case: str, name: str, counted: Counted) -> str:
    """A line of the table."""
    elements, launches, moved, extra = counted
    return f"| {case} | {name} | {elements:,} | {launches:,} | {moved:.0f} | {extra:,} |"


if __name__ == "__main__":
    print(markdown())
