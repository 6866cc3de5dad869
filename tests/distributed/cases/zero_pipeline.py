"""DeepSpeed's pipeline engine, with an embedding tied across stages."""

import zlib

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

import alto_distributed.deepspeed  # noqa: F401
from alto_distributed import ALTO
from alto_distributed.deepspeed.build import split_bare_parameters
from tests.helpers.cases import each, worlds

from .zero import PARAMS, batches, config, loss_of

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


class Reference(nn.Module):
    """The whole pipeline in one module, with the names the pipeline gives its parameters."""

    def __init__(self):
        super().__init__()
        self.tied_modules = nn.ModuleDict({"embed": Embed()})
        for i in (1, 2, 3):
            self.add_module(str(i), Block())
        for name, p in self.named_parameters():
            fill(name, p)

    def forward(self, x):
        h = self.tied_modules["embed"](x)
        for i in (1, 2, 3):
            h = getattr(self, str(i))(h)
        return head(self.tied_modules["embed"], h)


def reference(clip):
    model = Reference()
    optimizer = ALTO(split_bare_parameters(list(model.parameters())), **PARAMS)
    for step in batches(accumulation=ACCUMULATION):
        optimizer.zero_grad()
        for x, y in step:
            (loss_of(model(x), y) / ACCUMULATION).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return dict(model.named_parameters())


def pipeline():
    layers = [TiedLayerSpec("embed", Embed, tied_weight_attr="weight")]
    layers += [LayerSpec(Block), LayerSpec(Block), LayerSpec(Block)]
    layers += [TiedLayerSpec("embed", Embed, forward_fn=head, tied_weight_attr="weight")]
    module = PipelineModule(layers, num_stages=2, loss_fn=loss_of, partition_method="uniform")
    for name, p in module.named_parameters():
        fill(name, p)
    return module


SETTINGS = {
    "stage 0": (None, 0.0),
    "stage 1": ({"stage": 1}, 0.0),
    "stage 1, clipping": ({"stage": 1}, 1.0),
}


@worlds(2, 4)
@each(SETTINGS)
def case_pipeline_with_tied_embedding(setting):
    deepspeed.init_distributed("gloo")
    zero, clip = setting
    replicas = dist.get_world_size() // 2
    expected = reference(clip)
    module = pipeline()
    ds_config = config(zero, accumulation=ACCUMULATION, clip=clip)
    ds_config["train_micro_batch_size_per_gpu"] = 8 // replicas
    engine, *_ = deepspeed.initialize(model=module, config=ds_config)
    rank = engine.grid.get_data_parallel_rank()
    for step in batches(accumulation=ACCUMULATION):
        engine.train_batch(iter([(x.chunk(replicas)[rank], y.chunk(replicas)[rank]) for x, y in step]))
    names = dict(module.named_parameters())
    assert "tied_modules.embed.weight" in names  # on both stages
    assert len(names) < len(expected)  # and the rest on one
    for name, p in names.items():
        gap = ((p.detach() - expected[name]).norm() / expected[name].norm()).item()
        assert gap < 1e-6, (name, gap)
    engine.destroy()


@worlds(2, 4)
def case_clipping_by_the_norm_of_one_pipeline_stage_is_refused():
    """Stage 0 in float32 clips by the norm of the first pipeline stage alone, whatever the optimizer."""
    deepspeed.init_distributed("gloo")
    with pytest.raises(ValueError, match="clips by the gradient norm of the first pipeline stage alone"):
        deepspeed.initialize(model=pipeline(), config=config(None, accumulation=ACCUMULATION))
