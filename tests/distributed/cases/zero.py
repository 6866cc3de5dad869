"""DeepSpeed, the real one, over gloo: every stage, precision and option equals the unsharded run.

float32 cells: each rank sees its share of the batch, and weights are held to the single-process run within
1e-6. bf16 and fp16 cells: all ranks see the same batch, so that averaging is exact whatever the order of
summation, and the master weights must be *bitwise* those of a reference that rounds at the same points.
"""

import dataclasses
import re

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from alto_distributed import ALTO
from alto_distributed.deepspeed.layout import LayoutBuilder
from alto_distributed.kernels.hugepages import collapse
from alto_distributed.sharding import ShardLayout
from tests.helpers import devices
from tests.helpers.cases import each, some, worlds
from tests.helpers.zero import (
    BF16,
    PARAMS,
    assert_straddles,
    batches,
    config,
    largest_gap,
    loss_of,
    network,
    reference,
    running,
    same_bits,
    shifted,
    train,
    weights,
)
from tests.helpers.zero_parity import FLOAT32_CELLS, LOW_CELLS, float32_gap, low_precision_gap

# -- float32 -------------------------------------------------------------------------------------------


@worlds(1, 2, exhaustive=(4,))
@some(FLOAT32_CELLS)
def case_float32(setting):
    gap = float32_gap(*setting)
    assert gap < 1e-6, gap


@worlds(4)
def case_hierarchical_partitioning():
    assert float32_gap({"stage": 3, "zero_hpz_partition_size": 2}, {}) < 1e-6


def huge_bytes(tensor):
    """How much of a tensor's memory lies in huge pages."""
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
    found, inside = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                low, high = (int(address, 16) for address in line.split()[0].split("-"))
                inside = low < end and high > begin
            elif inside and line.startswith("AnonHugePages:"):
                found += int(line.split()[1]) * 1024
    return found


@worlds(1)
@each(stage=(2, 3))
def case_offloaded_weights_and_gradients_lie_in_huge_pages(stage):
    if not collapse(torch.zeros(1 << 22)):
        pytest.skip("this system does not collapse memory into huge pages")
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    with running(nn.Linear(2048, 2048, bias=False), config(zero, **BF16)) as engine:
        (flat,) = (p for p in engine.basic_optimizer.state if p.numel() >= 2048**2)
        assert huge_bytes(flat) > flat.nbytes // 2
        assert huge_bytes(flat.grad) > flat.nbytes // 2


@worlds(2)
def case_partial_offload():
    """Twin-Flow: half of the sub-groups stay on the accelerator, which is another name of the CPU here."""
    zero = {"stage": 3, "sub_group_size": 40, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    stayed = "cpu:0" if devices.NAME == "cpu" else get_accelerator()._name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(get_accelerator(), "_name", stayed)
        with running(network(), config(zero)) as engine:
            places = list(engine.optimizer.subgroup_to_device.values())
            assert places.count(stayed) == len(places) // 2 > 0, places
            train(engine)
            gap = largest_gap(weights(engine), reference())
            assert gap < 1e-6, gap


@worlds(2, exhaustive=(4,))
@each(stage=(1, 2, 3))
def case_with_the_layouts_withheld_the_comparison_fails(stage):
    """The negative control: what DeepSpeed does with an optimizer that takes a shard for a parameter."""
    with running(network(), config({"stage": stage})) as engine:
        engine.basic_optimizer.set_layouts({})
        train(engine)
        gap = largest_gap(weights(engine), reference())
        assert not gap < 1e-3, gap  # NaN if padding was taken for weights


def with_parameters(layouts, change):
    """The same segments of other parameters."""
    return {
        flat: ShardLayout(
            flat.numel(), [dataclasses.replace(s, parameter=change(s.parameter)) for s in layout.segments]
        )
        for flat, layout in layouts.items()
    }


def swapped(layouts):
    """Two parameters of one size in each other's place."""
    every = {s.parameter.name: s.parameter for layout in layouts.values() for s in layout.segments}
    up, down = every["up.weight"], every["down.weight"]
    assert torch.Size(up.shape).numel() == torch.Size(down.shape).numel()
    return with_parameters(layouts, lambda p: {up: down, down: up}.get(p, p))


def ungrouped(layouts):
    """Every parameter as if this rank held all of it."""
    return with_parameters(layouts, lambda p: dataclasses.replace(p, groups=()))


@worlds(2)
@some(engine=("stage 1", "stage 3", "bf16, BF16_Optimizer", "bf16, stage 0"))
def case_a_layout_that_was_read_wrongly_is_found(engine):
    """If need be on one rank only, and both raise. All sizes fit, and training would have gone on."""
    read = LayoutBuilder._read
    version = re.escape(deepspeed.__version__)
    said = rf"rank [01]: .*laid out.* differ from the model's. Read from DeepSpeed {version}"
    zero, precision, *_ = LOW_CELLS.get(engine) or FLOAT32_CELLS[engine]
    for change in (shifted, swapped) if zero else (swapped,):
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1 or change is swapped:  # one of them need not hold any of the two
                patch.setattr(LayoutBuilder, "_read", lambda self, change=change: change(read(self)))
            with pytest.raises(ValueError, match=said):
                deepspeed.initialize(model=network(), config=config(zero, **precision))


@worlds(2)
@each(stage=(1, 3))
def case_a_process_group_that_was_not_read_is_found(stage):
    """The shards do not add up to whole parameters."""
    read = LayoutBuilder._read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayoutBuilder, "_read", lambda self: ungrouped(read(self)))
        refused = pytest.raises(ValueError, match="A shard is missing")
        with running(network(), config({"stage": stage})) as engine, refused:
            train(engine, steps=1)


@worlds(2, 4)
def case_padding_may_hold_anything():
    """Stage 3 pads shards with uninitialised memory; with NaN there, nothing may change."""
    with running(network(), config({"stage": 3})) as engine:
        padded = 0
        for params, flat in zip(
            engine.optimizer.fp16_groups, engine.optimizer.fp32_partitioned_groups_flat, strict=True
        ):
            end = 0
            for p in params:
                start, end = end, end + p.ds_tensor.ds_numel
                beyond = (dist.get_rank() + 1) * p.ds_tensor.ds_numel - p.ds_numel
                if beyond > 0:
                    with torch.no_grad():
                        flat[max(start, end - beyond) : end] = torch.nan
                    padded += 1
        assert padded or dist.get_rank() + 1 < dist.get_world_size()
        train(engine)
        gap = largest_gap(weights(engine), reference())
        assert gap < 1e-6, gap


@worlds(2, exhaustive=(4,))
@each(stage=(1, 2, 3))
def case_one_collective_a_group_and_step(stage):
    """Stages 1 and 2 step group by group, stage 3 sub-group by sub-group: one small all-reduce in each."""
    from alto_distributed.sharding import norms

    with running(network(), config({"stage": stage})) as engine:
        train(engine, steps=1)
        counted, original = [], norms.start_all_reduce
        norms.start_all_reduce = lambda *a: counted.append(1) or original(*a)
        try:
            train(engine, steps=1)
        finally:
            norms.start_all_reduce = original
        assert len(counted) == 2, counted


# -- low precision -------------------------------------------------------------------------------------


@worlds(1, 2, exhaustive=(4,))
@some(LOW_CELLS)
def case_low_precision_is_bitwise_right(setting):
    assert low_precision_gap(*setting) == 0


@worlds(2)
@each(stage=(1, 2, 3))
def case_skipped_steps_change_nothing(stage):
    """A dynamic loss scale that starts too high: steps are skipped, and then not even k has moved."""
    fp16 = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 1000}
    with running(network(), config({"stage": stage}, fp16=fp16)) as engine:
        optimizer = engine.basic_optimizer
        skipped = taken = 0
        for x, y in (pair for step in batches() for pair in step):
            before = [t.clone() for s in optimizer.state.values() for t in s.values()]
            shards = [t.detach().clone() for t in optimizer.state]
            skips = engine.skipped_steps
            engine.backward(loss_of(engine(x), y))
            engine.step()
            after = [t for s in optimizer.state.values() for t in s.values()]
            if engine.skipped_steps > skips:
                skipped += 1
                assert all(map(same_bits, before, after))
                assert all(map(same_bits, shards, optimizer.state))
            else:
                taken += 1
        assert skipped, "the scale never was too high"
        assert taken, "no step was taken"
        assert {int(s["step"]) for s in optimizer.state.values()} == {taken}


# -- the bugs that DeepSpeed's own Muon had -----------------------------------------------------------------


@worlds(2, 4)
@each(stage=(1, 2))
def case_muon_7807_parameters_that_cross_partitions(stage):
    """Muon orthogonalised the piece of a matrix that lay on a rank. The ratio must be of the whole matrix."""
    with running(network(), config({"stage": stage})) as engine:
        assert_straddles(engine)
        train(engine)
        assert largest_gap(weights(engine), reference()) < 1e-6


@worlds(2)
@some(stage=(0, 1, 2, 3))
def case_muon_8443_state_advances_once_a_step_not_once_a_micro_batch(stage):
    with running(network(), config({"stage": stage} if stage else None, accumulation=4)) as engine:
        train(engine, steps=3, accumulation=4)
        assert {int(s["step"]) for s in engine.basic_optimizer.state.values()} == {3}
        assert largest_gap(weights(engine), reference(steps=3, accumulation=4)) < 1e-6


@worlds(2)
def case_muon_8438_shapes_hidden_by_zero_init():
    """Under zero.Init a matrix reports the shape (0,); what is a matrix must still be known."""
    with deepspeed.zero.Init(config_dict_or_path=config({"stage": 3})):
        model = network()
    assert model.up.weight.ndim == 1
    matrices = {"params": {**PARAMS, "layerwise": "matrices"}}
    with running(model, config({"stage": 3}, **matrices)) as engine:
        shapes = [s.parameter.shape for lay in LayoutBuilder(engine).build().values() for s in lay.segments]
        assert (13, 6) in shapes
        assert (13,) in shapes
        decays = [(g["weight_decay"], g["name"]) for g in engine.basic_optimizer.param_groups]
        assert decays == [(0.01, "decayed"), (0.0, "undecayed")]


@worlds(2)
@each({"fp32": {}, "bf16": BF16})
def case_muon_8442_stage_0_runs_the_chosen_optimizer(setting):
    """Muon at stage 0 silently ran plain SGD."""
    with running(network(), config(**setting)) as engine:
        train(engine, steps=2)
        assert type(engine.basic_optimizer) is ALTO
        assert {int(s["step"]) for s in engine.basic_optimizer.state.values()} == {2}
        assert all(s["grad_ema"].any() for p, s in engine.basic_optimizer.state.items() if p.shape != (3, 3))
