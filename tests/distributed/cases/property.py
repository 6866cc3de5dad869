"""Any shapes, any cut into flat shards over 1..8 ranks, any padding: equal to unsharded.

Rank 0 lets hypothesis think of examples and sends each to all ranks; every rank builds its shards over a
real process group of the example's size, steps, and compares with the unsharded optimizer.
"""

import functools

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from alto_distributed import ALTO, LogicalParameter, Segment, ShardLayout
from tests.helpers.cases import EXHAUSTIVE, worlds

EXAMPLES = 200 if EXHAUSTIVE else 60
MAX_RANKS = 8


@st.composite
def examples(draw):
    world = draw(st.integers(1, MAX_RANKS))
    shape = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)
    buffers = []
    for _ in range(draw(st.integers(1, 2))):
        shapes = draw(st.lists(shape, min_size=1, max_size=5))
        total = sum(torch.Size(s).numel() for s in shapes)
        inner = sorted(draw(st.lists(st.integers(0, total), min_size=world - 1, max_size=world - 1)))
        buffers.append(
            {
                "shapes": shapes,
                "cuts": [0, *inner, total],
                "gap": draw(st.integers(0, 3)),  # padding before a shard's elements, as alignment leaves it
                "tail": draw(st.integers(0, 5)),  # and after them
                "options": {
                    "weight_decay": draw(st.sampled_from([0.0, 0.01])),
                    "lr": draw(st.sampled_from([0.01, 0.3])),
                },
            }
        )
    return {
        "world": world,
        "buffers": buffers,
        "seed": draw(st.integers(0, 2**16)),
        "alpha": draw(st.sampled_from([-5.0, 0.0, -90.0, 3.0])),
        "layerwise": draw(st.sampled_from(["decayed", "matrices", "all"])),
    }


@worlds(8)
def case_any_cut_into_flat_shards_equals_unsharded():
    groups = {n: dist.new_group(list(range(n))) for n in range(1, MAX_RANKS + 1)}
    straddled = [0]
    if dist.get_rank() == 0:

        @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(examples())
        def every_example(example):
            dist.broadcast_object_list([example])
            straddled[0] += together(functools.partial(check, example, groups))

        try:
            every_example()
        finally:
            dist.broadcast_object_list([None])
        assert straddled[0] > EXAMPLES / 2, f"only {straddled[0]} examples had a parameter on two ranks"
    else:
        while True:
            box = [None]
            dist.broadcast_object_list(box)
            if box[0] is None:
                return
            together(functools.partial(check, box[0], groups), report=False)


def together(work, report=True):
    """Run ``work`` on all ranks and bring their verdicts to rank 0, which raises for hypothesis to shrink."""
    try:
        verdict = work()
    except Exception as error:
        verdict = f"{type(error).__name__}: {error}"
    verdicts = [None] * dist.get_world_size()
    dist.all_gather_object(verdicts, verdict)
    problems = {rank: v for rank, v in enumerate(verdicts) if isinstance(v, str)}
    if problems and report:
        raise AssertionError(f"ranks disagree with the unsharded run: {problems}")
    return any(v is True for v in verdicts)


def check(example, groups):
    """Returns whether a parameter had elements on two ranks."""
    rank, group = dist.get_rank(), groups[example["world"]]
    if rank >= example["world"]:
        return None
    torch.manual_seed(example["seed"])
    options = {"alpha": example["alpha"], "layerwise": example["layerwise"]}
    whole_groups, shard_groups, layouts, straddles = [], [], {}, False
    for b, buffer in enumerate(example["buffers"]):
        scale = 10.0 ** torch.randint(-3, 3, (len(buffer["shapes"]),))
        wholes = [nn.Parameter(torch.randn(s) * x) for s, x in zip(buffer["shapes"], scale, strict=True)]
        parameters = [LogicalParameter(f"{b}.{i}", s, (group,)) for i, s in enumerate(buffer["shapes"])]
        low, high = buffer["cuts"][rank : rank + 2]
        shard = nn.Parameter(padded(torch.cat([w.detach().flatten() for w in wholes]), buffer, low, high))
        inner = ShardLayout.of_flat_shard(parameters, low, high - low).segments
        moved = [Segment(s.parameter, s.start + buffer["gap"], s.length) for s in inner]
        layouts[shard] = ShardLayout(shard.numel(), moved)
        straddles |= any(0 < s.length < torch.Size(s.parameter.shape).numel() for s in moved)
        whole_groups.append({"params": wholes, **buffer["options"]})
        shard_groups.append({"params": [shard], **buffer["options"]})
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # examples without any decay
        unsharded, sharded = ALTO(whole_groups, **options), ALTO(shard_groups, **options)
    sharded.set_layouts(layouts)
    for _ in range(4):
        for whole, part, buffer in zip(whole_groups, shard_groups, example["buffers"], strict=True):
            for w in whole["params"]:
                w.grad = torch.randn_like(w)
            low, high = buffer["cuts"][rank : rank + 2]
            part["params"][0].grad = padded(torch.cat([w.grad.flatten() for w in whole["params"]]), buffer, low, high)
        unsharded.step()
        sharded.step()
    for whole, part, buffer in zip(whole_groups, shard_groups, example["buffers"], strict=True):
        low, high = buffer["cuts"][rank : rank + 2]
        expected = torch.cat([w.detach().flatten() for w in whole["params"]])[low:high]
        shard = part["params"][0].detach()
        got = shard[buffer["gap"] : buffer["gap"] + high - low]
        torch.testing.assert_close(
            got, expected, rtol=1e-6, atol=1e-6 * expected.abs().max().item() if high > low else 0
        )
        assert shard[: buffer["gap"]].isnan().all()
        assert shard[shard.numel() - buffer["tail"] :].isnan().all()
    return straddles


def padded(flat, buffer, low, high):
    nan = functools.partial(torch.full, fill_value=torch.nan)
    return torch.cat([nan((buffer["gap"],)), flat[low:high], nan((buffer["tail"],))])
