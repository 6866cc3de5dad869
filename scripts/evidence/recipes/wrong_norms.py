"""Layouts that make ALTO take the norms of pieces, as an optimizer does that knows nothing of sharding.

They are layouts of the project's own: what is one parameter is said to be several, or the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from alto_distributed.sharding.layout import LogicalParameter, Segment, ShardLayout

#: Name -> what a rank takes for a layer.
KINDS = {
    "tensor pieces": "its part of each tensor (FSDP)",
    "buffer pieces": "its part of each tensor in a flat buffer",
    "buffer": "all of its flat buffer (ZeRO)",
}


def layouts_of(parameters: Sequence[torch.Tensor], kind: str, pieces: int) -> dict[torch.Tensor, ShardLayout]:
    """Layouts of ``parameters`` over ``pieces`` ranks.

    Raises:
        ValueError: there is no such kind.
    """
    if kind not in KINDS:
        raise ValueError(f"norms={kind!r} is not one of {', '.join(KINDS)}")
    total = sum(p.numel() for p in parameters)
    per_rank = -(-total // pieces)
    cut: list[list[tuple[str, int, int]]] = []
    begin = 0
    for i, parameter in enumerate(parameters):
        size = parameter.numel()
        share = -(-size // pieces) if kind == "tensor pieces" else per_rank
        first = 0 if kind == "tensor pieces" else begin
        here = []
        while (at := sum(length for *_, length in here)) < size:
            rank = (first + at) // share
            name = f"rank {rank:03d}" if kind == "buffer" else f"{i:04d} on rank {rank:03d}"
            here.append((name, at, min((rank + 1) * share - first, size) - at))
        cut.append(here)
        begin += size
    sizes: dict[str, int] = {}
    for name, _, length in (item for here in cut for item in here):
        sizes[name] = sizes.get(name, 0) + length
    logical = {name: LogicalParameter(name, (size,)) for name, size in sizes.items()}
    return {
        parameter: ShardLayout(parameter.numel(), [Segment(logical[name], at, length) for name, at, length in here])
        for parameter, here in zip(parameters, cut, strict=True)
    }
