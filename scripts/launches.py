"""Launches and bytes of one step, counted on meta tensors: what an accelerator would be asked to do.

    python scripts/launches.py > table.md

Every operator that a step dispatches is a launch, except views and what makes memory without writing it. A foreach
operation on CUDA is as many launches as its tensors need: 320 blocks of 65,536 elements, and 110, 64, 48 or 36 tensors
in one launch, by the number of lists. The bytes are those of all tensors that an operator reads or writes. Triton's
path is one launch of each phase for tensors of the same dtypes, and one more for the sums.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alto_distributed import ALTO
from alto_distributed.sharding import LogicalParameter, ShardLayout
from scripts import scale

BLOCK, BLOCKS = 65536, 320
#: Tensors in a launch, by the number of lists.
TENSORS = (110, 64, 48, 36, 30)
#: Operators that launch nothing.
FREE = ("empty", "empty_like", "new_empty", "detach", "_to_copy_meta", "lift_fresh")


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
        self.launches = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        devices = {t.device.type for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)}
        if name.startswith("_foreach_") and devices == {"meta"}:
            self._lists(name, args, result)
        elif "meta" in devices and not func.is_view and name not in FREE:
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            written = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
            self.launches += -(-len(args[0]) // 128) if name in ("cat", "stack") else 1
            self.bytes += sum(t.untyped_storage().nbytes() if 0 in t.stride() else _bytes(t) for t in tensors)
            self.bytes += sum(map(_bytes, written))
        return result

    def _lists(self, name: str, args: Any, result: Any) -> None:
        lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], torch.Tensor)]
        read = list(lists)
        if name == "_foreach_norm":
            self.launches += 1  # adds up what the blocks have found
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
        with counting:
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
    "skip_nonfinite": {"skip_nonfinite": True},
    "measured": {"diagnostics_every": 1},
}


def count(case: str, kernel: str, **options: Any) -> tuple[int, int, float]:
    """Elements on the rank, launches, and bytes a parameter."""
    shapes, ranks = CASES[case]
    if ranks == 1:
        groups = [
            {"params": [torch.empty(shape, device="meta") for _, shape in group], "weight_decay": decay}
            for group, decay in zip(scale.two_groups(shapes), (0.01, 0.0), strict=False)
        ]
        tensors = [tensor for group in groups for tensor in group["params"]]
        counted = step_of(tensors, {}, groups, kernel=kernel, **options)
    else:
        layouts = _shards(shapes, ranks)
        tensors = list(layouts)
        groups = [{"params": [t], "weight_decay": d} for t, d in zip(tensors, (0.01, 0.0), strict=True)]
        counted = step_of(tensors, layouts, groups, kernel=kernel, **options)
    elements = sum(tensor.numel() for tensor in tensors)
    return elements, counted.launches, counted.bytes / elements


def _shards(shapes: scale.Shapes, ranks: int) -> dict[torch.Tensor, ShardLayout]:
    """The first rank's, as ZeRO-2 cuts them, without process groups: meta tensors cannot be sent."""
    layouts = {}
    for group in scale.two_groups(shapes):
        whole = [LogicalParameter(name, shape) for name, shape in group]
        piece = -(-sum(scale.numel(shape) for _, shape in group) // (2 * ranks)) * 2
        layouts[torch.empty(piece, device="meta")] = ShardLayout.of_flat_shard(whole, 0, piece)
    return layouts


def table() -> str:
    lines = [
        "| model | options | elements on the rank | launches | bytes a parameter |",
        "|---|---|--:|--:|--:|",
    ]
    for case in CASES:
        for name, options in OPTIONS.items():
            elements, launches, moved = count(case, "torch", **options)
            lines.append(f"| {case} | {name} | {elements:,} | {launches:,} | {moved:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
