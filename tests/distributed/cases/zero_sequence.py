"""DeepSpeed's sequence parallelism (Ulysses): a rank has a part of every sequence, and ZeRO shards over all ranks."""

import functools

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence.layer import DistributedAttention
from torch import nn

import alto_distributed.deepspeed  # noqa: F401
from alto_distributed import ALTO
from alto_distributed.deepspeed import refuse
from alto_distributed.deepspeed.build import split_bare_parameters
from tests.helpers.cases import each, worlds
from tests.helpers.zero import PARAMS, assert_straddles, batches, config, largest_gap, network, running, weights

LENGTH, HEADS, STEPS = 4, 2, 6
BY_JSON = {"sequence_parallel_size": 2, "data_parallel_size": 1}


def attention(query, key, value):
    """Of tensors with the dimensions batch, sequence, heads, head."""
    several = (t.transpose(1, 2) for t in (query, key, value))
    return nn.functional.scaled_dot_product_attention(*several).transpose(1, 2).contiguous()


class Net(nn.Module):
    """Attention over whole sequences, whose parts are on the ranks of ``group``."""

    def __init__(self, group=None):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        # Without biases: the gradient of the key's is nothing but rounding errors.
        self.query, self.key, self.value = (nn.Linear(6, 6, bias=False) for _ in range(3))
        self.head = nn.Linear(6, 11)
        self.attend = attention
        if group is not None:
            self.attend = functools.partial(DistributedAttention(attention, group, 2, 1), batch_dim_idx=0)

    def forward(self, x):
        h = self.embed(x)
        heads = [layer(h).unflatten(-1, (HEADS, -1)) for layer in (self.query, self.key, self.value)]
        return self.head(h + self.attend(*heads).flatten(2))


def loss_of(out, y):
    """This rank's share of the mean over the whole batch."""
    return nn.functional.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="sum") / (len(y) * LENGTH)


@functools.cache
def reference():
    model = network(Net)
    optimizer = ALTO(split_bare_parameters(list(model.parameters())), **PARAMS)
    for ((x, y),) in batches(STEPS):
        optimizer.zero_grad()
        loss_of(model(x[:, :LENGTH]), y[:, :LENGTH]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def gap_of(stage, group, settings=None, **options):
    """Largest difference to the reference, with two ranks to a sequence."""
    parallel, replicas = 2, dist.get_world_size() // 2
    ds_config = config({"stage": stage} if stage else None, **(settings or {}))
    ds_config["train_micro_batch_size_per_gpu"] = 8 // replicas
    part, replica = dist.get_rank() % parallel, dist.get_rank() // parallel
    with running(network(lambda: Net(group)), ds_config, **options) as engine:
        if stage and "mpu" in options:
            assert_straddles(engine)
        for ((x, y),) in batches(STEPS):
            x, y = (t[:, :LENGTH].chunk(replicas)[replica].chunk(parallel, 1)[part] for t in (x, y))
            # DeepSpeed adds up gradients over a sequence's ranks, and averages them at stage 3.
            engine.backward(loss_of(engine(x), y) * (parallel if stage == 3 else 1))
            engine.step()
        return largest_gap(weights(engine), reference())


@worlds(2, exhaustive=(4,))
@each({"stage 1": 1, "stage 3": 3}, exhaustive={"stage 0": 0, "stage 2": 2})
def case_ulysses(setting):
    deepspeed.init_distributed("gloo")
    parallel_state_sp.initialize_sequence_parallel(2)
    gap = gap_of(setting, parallel_state_sp.get_sequence_parallel_group(), mpu=parallel_state_sp)
    assert gap < 1e-6, gap


@worlds(2)
@each({"stage 1": 1}, exhaustive={"stage 0": 0, "stage 2": 2})
def case_ulysses_by_the_json_is_refused(setting):
    """DeepSpeed makes groups of its own then, and does not add up gradients over a sequence's ranks."""
    mesh = torch.distributed.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "sequence"))
    with pytest.raises(ValueError, match='"sequence_parallel_size" makes groups .* pass mpu=parallel_state_sp to'):
        gap_of(setting, mesh.get_group("sequence"), BY_JSON)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refuse, "_sums_over_sequences", lambda _: True)
        gap = gap_of(setting, mesh.get_group("sequence"), BY_JSON)
        assert gap > 1e-4, gap  # the fault that is told


@worlds(2)
def case_ulysses_by_the_json_at_stage_3():
    mesh = torch.distributed.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "sequence"))
    gap = gap_of(3, mesh.get_group("sequence"), BY_JSON)
    assert gap < 1e-6, gap
