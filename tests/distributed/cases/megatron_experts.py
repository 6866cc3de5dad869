"""Experts that share a parameter: each has its own layer-wise ratio, whatever the expert parallelism.

GroupedMLP is megatron-core's own, up to 0.16; its forward pass needs a GPU, so gradients are made by hand. The other
module has the form of TransformerEngine's, which is not there. Weights and gradients of an expert follow from its
number in the whole model. All is held to the paper's formula in float64, for each expert alone.
"""

import zlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.cases import each, worlds
from tests.helpers.megatron_gpt import (
    ALTO_OPTIONS,
    LR,
    WEIGHT_DECAY,
    Job,
    Layout,
    Megatron,
    alto_config,
    parallel,
    transformer_config,
)
from tests.helpers.oracle import PaperALTO

# isort: split
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import experts as megatron_experts

from alto_distributed.megatron import diagnostics

EXPERTS, STEPS = 4, 4
# One vector beside them, so that the border between two ranks is not one between experts.
JOB = Job(layers=1, experts=EXPERTS, clip=0.0, layerwise="matrices", trained="final_layernorm.weight")
OUT, IN = 8, 10


class SingleGrouped(nn.Module):
    """As TransformerEngine's GroupedLinear is with ``single_grouped_weight``: an expert is an entry of the weight."""

    single_grouped_weight = True

    def __init__(self, config):
        super().__init__()
        self.num_gemms = EXPERTS // config.expert_model_parallel_size
        self.weight = nn.Parameter(torch.empty(self.num_gemms, OUT // config.expert_tensor_parallel_size, IN))
        self.weight.allreduce = config.expert_model_parallel_size == 1
        # By which TransformerEngine counts the dimensions of an expert.
        self.weight.tensor_model_parallel, self.weight.partition_dim = True, 0


class TEGroupedLinear(nn.Module):
    """As Megatron has it up to 0.18: a weight for each expert, which TransformerEngine 2.13 and later do not mark."""

    def __init__(self, config):
        super().__init__()
        for i in range(EXPERTS // config.expert_model_parallel_size):
            for name, shape in (("weight", (OUT // config.expert_tensor_parallel_size, IN)), ("bias", (OUT,))):
                param = nn.Parameter(torch.empty(shape))
                param.allreduce = config.expert_model_parallel_size == 1
                self.register_parameter(f"{name}{i}", param)


class TEColumnParallelGroupedLinear(TEGroupedLinear):
    """Biases are cut like weights."""


class TERowParallelGroupedLinear(TEGroupedLinear):
    """Biases are not cut."""


def grouped_mlp(config):
    if not hasattr(megatron_experts, "GroupedMLP"):
        pytest.skip("GroupedMLP is gone since 0.17")
    with pytest.MonkeyPatch.context() as patch:  # the package whose kernels its forward pass calls
        patch.setattr(megatron_experts.gg, "assert_grouped_gemm_is_available", lambda: None)
        groups = ProcessGroupCollection.use_mpu_process_groups(["ep", "expt_tp", "expt_dp"])
        return megatron_experts.GroupedMLP(EXPERTS // config.expert_model_parallel_size, config, groups)


MODULES = {"GroupedMLP": grouped_mlp, "single_grouped_weight": SingleGrouped}


def numbers(kind, name, expert, numel):
    """Of one expert, the larger its number the larger they are."""
    seed = zlib.crc32(f"{kind} {name} {expert}".encode())
    return (1 + expert) * torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def parts(name, p):
    """(number in the whole model, this rank's elements) of each expert in a parameter."""
    here = EXPERTS // parallel_state.get_expert_model_parallel_world_size()
    first = here * parallel_state.get_expert_model_parallel_rank()
    return [(first + i, part) for i, part in enumerate(p.detach().view(here, -1))]


def trained(make, layout, distributed, steps=STEPS):
    """The engine, and the packed parameters by name, after some steps on gradients by hand."""

    class WithPacked(Megatron):
        def _data_parallel(self, config, ddp_config, chunk, **options):
            chunk.packed = make(transformer_config(JOB, layout))
            for name, p in chunk.packed.named_parameters():
                for expert, part in parts(name, p):
                    part.copy_(numbers("weights", name, expert, part.numel()))
            return Megatron._data_parallel(config, ddp_config, chunk, **options)

    engine = WithPacked(JOB, layout, distributed=distributed, optimizer=alto_config(JOB, alto_diagnostics_every=1))
    packed = dict(engine.chunks[0].module.packed.named_parameters())
    for step in range(steps):
        for chunk in engine.chunks:
            chunk.zero_grad_buffer()
        for name, p in packed.items():
            for (expert, _), grad in zip(parts(name, p), p.main_grad.view(len(parts(name, p)), -1), strict=True):
                grad.copy_(numbers(f"gradients {step}", name, expert, grad.numel()))
        engine.optimizer.step()
    return engine, packed


def of_the_paper(name, expert, numel):
    options = {**ALTO_OPTIONS, "eps": (ALTO_OPTIONS["eps"], 1e-6, 1e-10)}
    paper = PaperALTO(numbers("weights", name, expert, numel), lr=LR, weight_decay=WEIGHT_DECAY, **options)
    for step in range(STEPS):
        paper.step(numbers(f"gradients {step}", name, expert, numel))
    return paper.theta


@worlds(2, exhaustive=[4])
@each(MODULES, expert=(1, 2), distributed=(True, False))
def case_each_expert_has_its_own_ratio(setting, expert, distributed):
    check(setting, Layout(expert=expert), distributed)


@worlds(exhaustive=[4])
@each(MODULES)
def case_each_of_four_ranks_has_an_expert(setting):
    check(setting, Layout(expert=4), True)


CUT = {**MODULES, "columns": TEColumnParallelGroupedLinear, "rows": TERowParallelGroupedLinear}


@worlds(2, 4)
@each(CUT)
def case_experts_over_tensor_parallelism(setting):
    """Norms are those of whole experts, of which each rank has a part. On four ranks they have groups of their own."""
    layout = Layout(tensor=2) if dist.get_world_size() == 2 else Layout(expert=2, expert_tensor=2)
    with parallel(layout):
        engine, packed = trained(setting, layout, True, steps=1)
        readings = {name: reading for name, reading in diagnostics(engine.optimizer).items() if "packed" in name}
        several = setting in MODULES.values()
        assert len(readings) == len(packed) * (EXPERTS // layout.expert if several else 1)
        for name, reading in readings.items():
            label, _, number = name.removeprefix("0.module.packed.").partition(", expert ")
            p = packed[label]
            numbered = [(expert, part.numel()) for expert, part in parts(label, p) if number in ("", str(expert))]
            here = torch.cat([numbers("weights", label, expert, numel) for expert, numel in numbered])
            whole = "bias" in label and setting is TERowParallelGroupedLinear
            norm = (1 if whole else 2**0.5) * here.norm().item()  # both ranks have the same numbers
            assert abs(reading.param_norm - norm) <= 1e-6 * norm, (name, reading.param_norm, norm)


def check(make, layout, distributed):
    with parallel(layout):
        engine, packed = trained(make, layout, distributed)
        assert packed
        if distributed and layout.expert == 1:
            shards = [(p, m) for w in engine.wrappers for p, _, m in engine.shards(w)]
            cut = [m.numel() % (p.numel() // EXPERTS) for p, m in shards if any(p is q for q in packed.values())]
            everywhere = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, any(cut))
            assert any(everywhere), "no expert lies on two ranks"
        for name, p in packed.items():
            for expert, part in parts(name, p):
                theta = of_the_paper(name, expert, part.numel())
                gap = (part - theta).abs().max() / theta.abs().max()
                assert gap <= 1e-6, (name, expert, gap)
