"""ALTO's bookkeeping at sizes and worlds that are not at hand: layouts, plans and norms of one rank, simulated.

    python scripts/scale.py > table.md

The layouts are built by the package's own code from the shapes of a model, cut as ZeRO-2, ZeRO-3 and Megatron's
distributed optimizer cut it; the parameters are meta tensors, without memory. The norms of a step are then completed
with real tables (of zeros) through torch's fake process group, which has as many ranks as one likes and sends nothing:
what is counted is what this rank would send, and what is timed is what this rank does before and around it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from alto_distributed import ALTO, trust_ratio
from alto_distributed.sharding import LogicalParameter, Segment, ShardLayout
from alto_distributed.sharding.plan import StepPlan

WORLDS = (8, 64, 512, 1024)
TRIES = 5
Shapes = list[tuple[str, tuple[int, ...]]]


def gpt(layers: int, hidden: int, vocabulary: int, sequence: int) -> Shapes:
    """GPT-2's and GPT-3's parameters."""
    h = hidden
    shapes: Shapes = [("wte", (vocabulary, h)), ("wpe", (sequence, h))]
    for i in range(layers):
        for name, shape in {
            "attn_in": (3 * h, h),
            "attn_out": (h, h),
            "mlp_in": (4 * h, h),
            "mlp_out": (h, 4 * h),
        }.items():
            shapes += [(f"{i:03d}.{name}.weight", shape), (f"{i:03d}.{name}.bias", shape[:1])]
        shapes += [(f"{i:03d}.norm{n}.{kind}", (h,)) for n in (1, 2) for kind in ("weight", "bias")]
    return [*shapes, ("norm.weight", (h,)), ("norm.bias", (h,))]


def llama(layers: int, hidden: int, inner: int, vocabulary: int) -> Shapes:
    """Separate projections, three matrices in the MLP, no biases, untied output."""
    h = hidden
    shapes: Shapes = [("embedding", (vocabulary, h))]
    for i in range(layers):
        shapes += [(f"{i:03d}.attn_{kind}.weight", (h, h)) for kind in "qkvo"]
        shapes += [(f"{i:03d}.mlp_{kind}.weight", (inner, h)) for kind in ("gate", "up")]
        shapes += [(f"{i:03d}.mlp_down.weight", (h, inner)), (f"{i:03d}.norm1", (h,)), (f"{i:03d}.norm2", (h,))]
    return [*shapes, ("norm", (h,)), ("output", (vocabulary, h))]


MODELS: dict[str, Shapes] = {
    "GPT-2 345M": gpt(24, 1024, 50304, 1024),
    "7B": llama(32, 4096, 11008, 32000),
    "175B": gpt(96, 12288, 51200, 2048),
}
#: Tensor and pipeline parallel for Megatron, as such models are trained.
MODEL_PARALLEL = {"GPT-2 345M": (1, 1), "7B": (8, 1), "175B": (8, 8)}


@dataclass(frozen=True)
class Result:
    """Of one rank."""

    parameters: int
    """Logical parameters whose norms this rank takes part in."""
    segments: int
    """In all of its layouts: the work of building them."""
    held: int
    """Elements of its shards."""
    startup: float
    """Seconds until a step could be taken."""
    norms: float
    """Seconds for the norms and ratios of a step, without the network."""
    collectives: int
    """In a step."""
    sent: int
    """Bytes that the step's collectives reduce."""

    @property
    def states(self) -> int:
        return 12 * self.held


@contextlib.contextmanager
def world_of(ranks: int, rank: int) -> Iterator[None]:
    """A process group of ``ranks`` in which nobody else is."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def numel(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def two_groups(shapes: Shapes) -> list[Shapes]:
    """Decayed and not, as the factories and both engines split them."""
    groups = [[entry for entry in shapes if (len(entry[1]) >= 2) is decayed] for decayed in (True, False)]
    return [group for group in groups if group]


def simulate(engine: str, shapes: Shapes, ranks: int, rank: int, tensor: int = 1, pipeline: int = 1) -> Result:
    """What ``rank`` of ``ranks`` does at start-up and in a step."""
    with world_of(ranks, rank):
        if engine == "Megatron":
            process_groups = _megatron_groups(ranks, rank, tensor, pipeline)
            shapes = _stage(shapes, pipeline)
        began = time.process_time()
        joined: list[LogicalParameter] = []
        if engine == "Megatron":
            layouts, joined = _megatron(shapes, *process_groups, tensor)
            calls = [_by_decay(layouts)]  # all at once
        else:
            layouts = (_zero2 if engine == "ZeRO-2" else _zero3)(shapes, ranks, rank)
            calls = [[[tensor]] for tensor in layouts]  # one flat tensor after the other
        optimizer = ALTO([{"params": group} for call in calls for group in call], kernel="torch")
        optimizer.set_layouts(layouts, joined)
        remaining, plans = iter(list(optimizer.param_groups)), []
        for call in calls:
            optimizer.param_groups = [next(remaining) for _ in call]
            plan = StepPlan(optimizer.param_groups, layouts, joined)
            for entry in (entry for entries in plan.groups for entry in entries):
                entry.spans("every")
            plans.append((plan, optimizer.param_groups))
        startup = time.process_time() - began

        cpu = torch.device("cpu")
        with _counting() as counted:
            for plan, stepped in plans:  # warm: index tensors are made once
                optimizer.param_groups = stepped
                hypers = [optimizer._checked(group) for group in stepped]
                trust_ratio.complete(plan, stepped, hypers, {cpu: plan.norms.zeros(cpu)})
            counted.clear()
            began = time.process_time()
            for plan, stepped in plans:
                hypers = [optimizer._checked(group) for group in stepped]
                trust_ratio.complete(plan, stepped, hypers, {cpu: plan.norms.zeros(cpu)})
            norms = time.process_time() - began
        return Result(
            parameters=sum(len(plan.norms.slots) for plan, _ in plans),
            segments=sum(len(layout.segments) for layout in layouts.values()),
            held=sum(layout.numel for layout in layouts.values()),
            startup=startup,
            norms=norms,
            collectives=len(counted),
            sent=sum(counted),
        )


def _by_decay(layouts: dict[torch.Tensor, ShardLayout]) -> list[list[torch.Tensor]]:
    """Megatron's two groups, either of which may be empty on a rank."""
    matrix = {tensor: len(layout.segments[0].parameter.shape) >= 2 for tensor, layout in layouts.items()}
    return [[tensor for tensor in layouts if matrix[tensor] is decayed] for decayed in (True, False)]


@contextlib.contextmanager
def _counting() -> Iterator[list[int]]:
    """The bytes of each all-reduce."""
    counted: list[int] = []
    original = dist.all_reduce

    def counting(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        counted.append(tensor.numel() * tensor.element_size())
        return original(tensor, *arguments, **options)

    dist.all_reduce = counting
    try:
        yield counted
    finally:
        dist.all_reduce = original


def _zero2(shapes: Shapes, ranks: int, rank: int) -> dict[torch.Tensor, ShardLayout]:
    """As deepspeed/layout.py: each group is one flat buffer, aligned to two elements a rank, and cut evenly."""
    layouts = {}
    for group in two_groups(shapes):
        whole = [LogicalParameter(name, shape, (dist.group.WORLD,)) for name, shape in group]
        piece = -(-sum(numel(shape) for _, shape in group) // (2 * ranks)) * 2
        layouts[torch.empty(piece, device="meta")] = ShardLayout.of_flat_shard(whole, rank * piece, piece)
    return layouts


def _zero3(shapes: Shapes, ranks: int, rank: int, sub_group: int = 10**9) -> dict[torch.Tensor, ShardLayout]:
    """As deepspeed/layout.py: each parameter is cut evenly; pieces lie end to end in sub-groups of 1e9 elements."""
    layouts = {}
    for group in two_groups(shapes):
        segments, start = [], 0
        for i, (name, shape) in enumerate(group):
            size = numel(shape)
            piece = -(-size // ranks)
            real = max(0, min(piece, size - rank * piece))
            segments.append(Segment(LogicalParameter(name, shape, (dist.group.WORLD,)), start, real))
            start += piece
            if start >= sub_group or i == len(group) - 1:
                layouts[torch.empty(start, device="meta")] = ShardLayout(start, segments)
                segments, start = [], 0
    return layouts


def _megatron_groups(ranks: int, rank: int, tensor: int, pipeline: int) -> tuple[Any, Any]:
    """Tensor-parallel ranks are neighbors, then data-parallel ones, as in Megatron."""
    data = ranks // (tensor * pipeline)
    first = rank // (tensor * data) * (tensor * data)
    within = rank % tensor
    return (
        dist.new_group([first + within + i * tensor for i in range(data)]),
        dist.new_group([rank - within + i for i in range(tensor)]),
    )


def _stage(shapes: Shapes, pipeline: int) -> Shapes:
    """The first stage: what comes before the layers, and its share of them."""
    layers = sorted({name[:3] for name, _ in shapes if name[:3].isdigit()})
    mine = set(layers[: -(-len(layers) // pipeline)])
    return [(n, s) for n, s in shapes if n[:3] in mine or (not n[:3].isdigit() and (pipeline == 1 or "norm" not in n))]


def _megatron(
    shapes: Shapes, data_parallel: Any, tensor_parallel: Any, tensor: int
) -> tuple[dict[torch.Tensor, ShardLayout], list[LogicalParameter]]:
    """As megatron/layout.py: one tensor for each parameter with a piece in this rank's part of the buffer."""
    every, sizes = [], []
    for name, shape in shapes:
        cut = tensor > 1 and ((len(shape) >= 2 and name != "wpe") or name.endswith("_in.bias"))
        groups = (data_parallel, tensor_parallel) if cut else (data_parallel,)
        every.append(LogicalParameter(name, shape, groups))
        sizes.append(numel(shape) // (tensor if cut else 1))
    piece = -(-sum(sizes) // data_parallel.size())
    low, begin, layouts = data_parallel.rank() * piece, 0, {}
    for parameter, size in zip(every, sizes, strict=True):
        held = min(begin + size, low + piece) - max(begin, low)
        if held > 0:
            layouts[torch.empty(held, device="meta")] = ShardLayout(held, [Segment(parameter, 0, held)])
        begin += size
    return layouts, every


def table() -> str:
    """All models, worlds and engines; the figures of the rank with the most, of the first, middle and last."""
    lines = [
        "| model | engine | ranks | parameters summed | segments | start-up, ms | norms of a step, ms "
        "| collectives a step | bytes in them | states a rank |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for model, shapes in MODELS.items():
        for engine in ("ZeRO-2", "ZeRO-3", "Megatron"):
            for ranks in WORLDS:
                tensor, pipeline = (1, 1) if engine != "Megatron" else MODEL_PARALLEL[model]
                pipeline = min(pipeline, ranks // tensor)
                some = [
                    [simulate(engine, shapes, ranks, rank, tensor, pipeline) for _ in range(TRIES)]
                    for rank in (0, ranks // 2, ranks - 1)
                ]
                # The fullest rank; of a duration, the best try, for the machine does other things as well.
                most = {
                    key: max(min(getattr(result, key) for result in tries) for tries in some)
                    for key in Result.__dataclass_fields__
                }
                cut = f" TP {tensor} PP {pipeline}" if tensor * pipeline > 1 else ""
                lines.append(
                    f"| {model} | {engine}{cut} | {ranks:,} | {most['parameters']:,} | {most['segments']:,} "
                    f"| {most['startup'] * 1e3:.1f} | {most['norms'] * 1e3:.2f} | {most['collectives']} "
                    f"| {most['sent']:,} | {12 * most['held'] / 2**20:,.1f} MiB |"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
