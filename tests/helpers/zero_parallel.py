"""Networks for DeepSpeed's tensor parallelism, pipelines and experts, and what of them lies on other ranks."""

import zlib

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from .zero import loss_of, trainable

# -- tensor parallelism --------------------------------------------------------------------------------


class TensorParallelNet(nn.Module):
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


def tensor_parallel_network():
    torch.manual_seed(11)
    return TensorParallelNet()


def whole_weights(engine):
    """Whole weights by name: gathered over ZeRO, then glued together over TP."""
    out = {}
    for name, p in trainable(engine.module).items():
        with deepspeed.zero.GatheredParameters([p]):
            out[name] = p.detach().clone()
    return glued(out)


def glued(pieces_by_name, parameter_of=lambda name: name):
    """What lies in pieces over TP, put together along the dimension that was cut."""
    group = deepspeed.utils.groups.get_tensor_model_parallel_group()
    out, shapes = {}, {n: p.shape for n, p in trainable(tensor_parallel_network()).items()}
    for name, piece in pieces_by_name.items():
        shape = shapes[parameter_of(name)]
        if piece.shape != shape:
            pieces = [torch.empty_like(piece) for _ in range(2)]
            dist.all_gather(pieces, piece, group=group)
            (dim,) = [d for d in range(piece.ndim) if piece.shape[d] != shape[d]]
            piece = torch.cat(pieces, dim)
        out[name] = piece
    return out


# -- pipelines -----------------------------------------------------------------------------------------

ACCUMULATION = 2


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(11, 6))

    def forward(self, x):
        return nn.functional.embedding(x, self.weight)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 13), nn.Linear(13, 6)

    def forward(self, h):
        return h + self.down(torch.tanh(self.up(h)))


def head(module, h):
    return nn.functional.linear(h, module.weight)


def fill(name, p):
    """Weights that follow from a parameter's name, so that stages and the reference start alike."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    with torch.no_grad():
        p.copy_(torch.randn(p.shape, generator=generator) * 0.3)


def pipeline(stages=2):
    """Three blocks between an embedding and a head that share their weight."""
    layers = [TiedLayerSpec("embed", Embed, tied_weight_attr="weight"), *[LayerSpec(Block)] * 3]
    layers += [TiedLayerSpec("embed", Embed, forward_fn=head, tied_weight_attr="weight")]
    module = PipelineModule(layers, num_stages=stages, loss_fn=loss_of, partition_method="uniform")
    for name, p in module.named_parameters():
        fill(name, p)
    return module


# -- experts -------------------------------------------------------------------------------------------


class ExpertNet(nn.Module):
    """Every token is kept, so that routing depends on nothing but the weights."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        expert = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))
        self.moe = MoE(6, expert, num_experts=2, ep_size=2, k=1, drop_tokens=False, use_rts=False)
        self.head = nn.Linear(6, 11)

    def forward(self, x):
        h = self.embed(x)
        mixed, _, _ = self.moe(h)
        return self.head(h + mixed)


def expert_network():
    torch.manual_seed(11 + dist.get_rank() % 2)  # ranks 0 and 2 hold one expert, 1 and 3 the other
    model = ExpertNet()
    torch.manual_seed(11)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "experts" not in name:
                p.copy_(torch.randn(p.shape) * 0.3)
    return model


def step_on_four_ranks(engine, step):
    """Each rank takes a quarter of the step's batches."""
    for x, y in step:
        engine.backward(loss_of(engine(x.chunk(4)[dist.get_rank()]), y.chunk(4)[dist.get_rank()]))
        engine.step()
