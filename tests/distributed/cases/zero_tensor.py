"""DeepSpeed's tensor parallelism (AutoTP): the ratio of a matrix cut over TP ranks and over ZeRO shards."""

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import alto_distributed.deepspeed  # noqa: F401
from alto_distributed.deepspeed import layout
from tests.helpers.cases import each, worlds

from .zero import batches, config, largest_gap, loss_of, reference, running, trainable


class Net(nn.Module):
    """Two layers to cut (by columns, by rows); the rest is replicated over TP."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up, self.down = nn.Linear(6, 14), nn.Linear(14, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 11)

    def forward(self, x):
        h = self.embed(x)
        return self.head(self.norm(h + self.down(torch.tanh(self.up(h)))))


TENSOR_PARALLEL = {
    "autotp_size": 2,
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r".*up\.weight$"], "partition_type": "column"},
            {"patterns": [r".*down\.weight$"], "partition_type": "row"},
        ],
    },
}


def build():
    torch.manual_seed(11)
    return Net()


def train(engine):
    """Ranks of one TP group see the same rows."""
    share = dist.get_world_size() // 2
    rank = dist.get_rank() // 2
    for step in batches():
        for x, y in step:
            engine.backward(loss_of(engine(x.chunk(share)[rank]), y.chunk(share)[rank]))
            engine.step()


def whole(engine):
    """Whole weights by name: gathered over ZeRO, then glued together over TP."""
    out = {}
    for name, p in trainable(engine.module).items():
        with deepspeed.zero.GatheredParameters([p]):
            out[name] = p.detach().clone()
    return glued(out)


def glued(pieces_by_name, parameter_of=lambda name: name):
    """What lies in pieces over TP, put together along the dimension that was cut."""
    group = deepspeed.utils.groups.get_tensor_model_parallel_group()
    out, shapes = {}, {n: p.shape for n, p in trainable(build()).items()}
    for name, piece in pieces_by_name.items():
        shape = shapes[parameter_of(name)]
        if piece.shape != shape:
            pieces = [torch.empty_like(piece) for _ in range(2)]
            dist.all_gather(pieces, piece, group=group)
            (dim,) = [d for d in range(piece.ndim) if piece.shape[d] != shape[d]]
            piece = torch.cat(pieces, dim)
        out[name] = piece
    return out


def gap_of(stage):
    ds_config = config({"stage": stage} if stage else None, tensor_parallel=TENSOR_PARALLEL)
    ds_config["train_micro_batch_size_per_gpu"] = 8 // (dist.get_world_size() // 2)
    with running(build(), ds_config) as engine:
        cut = [n for n, p in trainable(engine.module).items() if deepspeed.runtime.utils.is_model_parallel_parameter(p)]
        assert {"up.weight", "down.weight"} <= set(cut), cut
        train(engine)
        return largest_gap(whole(engine), reference(make=Net))


@worlds(2)
@each({"stage 0": 0}, exhaustive={"stage 1": 1, "stage 2": 2, "stage 3": 3})
def case_tensor_parallel(setting):
    gap = gap_of(setting)
    assert gap < 1e-6, gap


@worlds(4)
@each(stage=(0, 1, 2, 3))
def case_tensor_and_data_parallel(stage):
    """What tensor parallelism has cut, ZeRO cuts once more."""
    gap = gap_of(stage)
    assert gap < 1e-6, gap


@worlds(2, 4)
def case_without_the_tensor_parallel_sum_the_comparison_fails():
    known = layout._tensor_parallel_group
    layout._tensor_parallel_group = lambda mpu: None
    try:
        gap = gap_of(2)
    finally:
        layout._tensor_parallel_group = known
    assert gap > 1e-4, gap
