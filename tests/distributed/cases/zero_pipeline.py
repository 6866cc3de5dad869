"""DeepSpeed's pipeline engine, with an embedding tied across stages."""

import deepspeed
import pytest
import torch.distributed as dist
from torch import nn

import alto_distributed.deepspeed  # noqa: F401
from alto_distributed import ALTO
from alto_distributed.deepspeed.build import split_bare_parameters
from tests.helpers.cases import each, worlds
from tests.helpers.zero import PARAMS, batches, config, loss_of
from tests.helpers.zero_parallel import ACCUMULATION, Block, Embed, fill, head, pipeline


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
