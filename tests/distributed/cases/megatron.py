"""Megatron, the real one, over gloo: data and tensor parallelism, with and without the distributed optimizer.

Weights and losses of ten steps are held to training by one rank with whole parameters, within 1e-6.
"""

import contextlib
import dataclasses
import functools
import io
import re
import statistics

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from alto_distributed import ALTO
from tests.helpers import devices, megatron_gpt
from tests.helpers.cases import each, some, worlds
from tests.helpers.megatron_gpt import (
    ALTO_OPTIONS,
    LR,
    Job,
    Layout,
    Megatron,
    OptimizerConfig,
    alto_config,
    check_norms,
    check_parity,
    is_decayed,
    largest_gap,
    learning_rate,
    parallel,
    reference,
    weight_decay,
    whole_model,
)
from tests.helpers.oracle import PaperALTO

# isort: split
import megatron.core

from alto_distributed.megatron import diagnostics, monitor
from alto_distributed.megatron.layout import LayoutBuilder
from alto_distributed.sharding import ShardLayout

SMALL_BUCKETS = {"overlap": True, "bucket_size": 3000}
SCHEDULED = Job(scheduled=True, decoupled_lr=0.008)
SOME_FROZEN = Job(trained="linear_fc1|final_layernorm|linear_qkv")

# -- the reference -------------------------------------------------------------------------------------


@worlds(2)
@some({"constant": Job(), "scheduled": SCHEDULED})
def case_the_reference_is_the_papers_algorithm(setting):
    """The chain of comparisons ends in float64: the paper's formula, given the gradients the reference had."""
    result = reference(setting)
    for name, start in whole_model(setting).items():
        paper = PaperALTO(
            start,
            lr=0.0,
            weight_decay=0.0,
            ratio=is_decayed(name, start),
            betas=ALTO_OPTIONS["betas"],
            alpha=ALTO_OPTIONS["alpha"],
            eps=(ALTO_OPTIONS["eps"], 1e-6, 1e-10),
        )
        for step, gradients in enumerate(result.gradients):
            paper.lr = learning_rate(setting, name, step)
            paper.wd = weight_decay(setting, step) if is_decayed(name, start) else 0.0
            paper.step(gradients[name])
        moved = (paper.theta - start).abs().max()
        assert moved > 1e-3, (name, moved)  # there is something to compare
        gap = (result.weights[name] - paper.theta).abs().max() / paper.theta.abs().max()
        assert gap <= 1e-6, (name, gap)


# -- parity --------------------------------------------------------------------------------------------

DATA_PARALLEL = {
    "distributed optimizer": (Job(), {}),
    "replicated": (Job(), {"distributed": False}),
    "no clipping": (Job(clip=0.0), {}),
    "hard clipping": (Job(clip=0.01), {}),
    "hard clipping, replicated": (Job(clip=0.01), {"distributed": False}),
    "overlap, small buckets": (Job(), SMALL_BUCKETS),
    "overlap, small buckets, replicated": (Job(), {**SMALL_BUCKETS, "distributed": False}),
    "scheduled lr and decay, decoupled lr": (SCHEDULED, {}),
    "scheduled lr and decay, decoupled lr, replicated": (SCHEDULED, {"distributed": False}),
    "ratio for all": (Job(layerwise="all"), {}),
    "frozen parameters": (SOME_FROZEN, {}),
    "untied, small buckets": (Job(tied=False), SMALL_BUCKETS),
}


@worlds(2)
@some(DATA_PARALLEL)
def case_data_parallel(label, setting):
    job, options = setting
    check_parity(label, job, **options)


APART = Job(vector_lr=0.3, embeddings="adam", scheduled=True)


@worlds(2)
@some({"distributed optimizer": Layout(), "TP": Layout(tensor=2), "PP, both copies": Layout(pipeline=2)})
def case_vectors_at_a_rate_of_their_own_and_embeddings_without_ratio(label, setting):
    check_parity(label, APART, setting, then=differs_from_one_rate)


def differs_from_one_rate(engine):
    """The negative control: what was compared does depend on both."""
    for other in (dataclasses.replace(APART, vector_lr=1.0), dataclasses.replace(APART, embeddings="ratio")):
        gap = torch.tensor(largest_gap(engine, reference(other)), device=devices.here())
        dist.all_reduce(gap, dist.ReduceOp.MAX)
        assert gap > 1e-3, gap


OF_FOUR = {
    "two optimizer instances": (Layout(instances=2), {}),
}
MORE_OF_FOUR = {
    "distributed optimizer": (Layout(), {}),
    "two optimizer instances, small buckets": (Layout(instances=2), SMALL_BUCKETS),
}


@worlds(4)
@each(OF_FOUR, exhaustive=MORE_OF_FOUR)
def case_data_parallel_of_four(label, setting):
    layout, options = setting
    check_parity(label, Job(), layout, **options)


@worlds(2, exhaustive=[4])
def case_small_buckets_are_several():
    with parallel(Layout()):
        for buffer in Megatron(Job(), Layout(), **SMALL_BUCKETS).chunks[0].buffers:
            assert len(buffer.buckets) > 3


TENSOR_PARALLEL = {
    "TP": (Job(), Layout(tensor=2), {}),
    "TP and SP": (SCHEDULED, Layout(tensor=2, sequence_parallel=True), SMALL_BUCKETS),
    "TP, replicated": (Job(), Layout(tensor=2), {"distributed": False}),
}


@worlds(2, 4)
@some(TENSOR_PARALLEL)
def case_tensor_parallel(label, setting):
    """On four ranks each piece is cut once more, by data parallelism."""
    job, layout, options = setting
    check_parity(label, job, layout, **options)


@worlds(2)
@some({"frozen": SOME_FROZEN, "ratio for all": Job(layerwise="all")})
def case_tensor_parallel_variants(label, setting):
    check_parity(label, setting, Layout(tensor=2))


@worlds(exhaustive=[4])
def case_tensor_parallel_of_four():
    check_parity("TP4", Job(), Layout(tensor=4))


@worlds(2, 4)
def case_a_rank_that_holds_nothing():
    """One vector is trained, too short for the buffer to be cut within it; the others still join in its norm."""
    job = Job(trained="final_layernorm.weight", layerwise="all")

    def one_rank_has_it(engine):
        held = sum(master.numel() for _, _, master in engine.shards(engine.wrappers[0]))
        held = torch.tensor(held, device=devices.here())
        everywhere = [torch.empty_like(held) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, held)
        assert sorted(everywhere) == [0] * (dist.get_world_size() - 1) + [32]
        assert collectives(engine, job.steps) == 1

    check_parity("empty shard", job, straddles=False, then=one_rank_has_it)


@worlds(4)
@each({"tensor parallel": Layout(tensor=2), "two instances": Layout(instances=2)})
def case_no_replica_is_summed(setting):
    """Neither what tensor parallelism leaves whole, nor other instances of the optimizer."""
    check_norms(Job(layerwise="all"), setting)


@worlds(2, exhaustive=(4,))
@some({"data parallel": Layout(), "tensor parallel": Layout(tensor=2)})
def case_without_the_reduction_of_norms_the_comparison_fails(setting):
    """The negative control: each rank takes its shard for the parameter."""
    with parallel(setting):
        engine = Megatron(Job(), setting)
        for wrapper in engine.wrappers:
            wrapper.optimizer.set_layouts({})
        gap = torch.tensor(largest_gap(engine.train(), reference(Job())), device=devices.here())
        dist.all_reduce(gap, op=dist.ReduceOp.MAX)
        assert gap > 1e-4, gap


def shifted(read, builder, wrapper):
    """By one element, on one rank; both raise."""
    layouts, joined = read(builder, wrapper)
    moved = {
        shard: ShardLayout(layout.numel, [dataclasses.replace(s, offset=s.offset + 1) for s in layout.segments])
        for shard, layout in layouts.items()
    }
    return moved if dist.get_rank() else layouts, joined


def swapped(read, builder, wrapper):
    """Two parameters of one shape in each other's place."""
    names = builder.names
    one, other = (param for param, name in names.items() if name.endswith("mlp.linear_fc1.weight"))
    names[one], names[other] = names[other], names[one]
    result = read(builder, wrapper)
    names[one], names[other] = names[other], names[one]
    return result


@worlds(2)
@some({"shifted": shifted, "swapped": swapped}, precision=("float32", "bfloat16"))
def case_a_layout_that_was_read_wrongly_is_found(setting, precision):
    version = re.escape(megatron.core.__version__)
    said = rf"rank \d: .*laid out.*weight.* differ from the model's. Read from megatron-core {version}, \w+Optim"
    with parallel(Layout()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayoutBuilder, "_read", functools.partialmethod(_changed, setting, LayoutBuilder._read))
        with pytest.raises(ValueError, match=said):
            Megatron(Job(precision=getattr(torch, precision)), Layout())


def _changed(self, change, read, wrapper):
    return change(read, self, wrapper)


# -- collectives ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def counted_all_reduces(inner):
    """The all-reduces within ``inner.step()``, by their number of elements."""
    counted, step, all_reduce = [], inner.step, dist.all_reduce

    def counting(tensor, *args, **kwargs):
        counted.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    def watched(*args, **kwargs):
        dist.all_reduce = counting
        try:
            return step(*args, **kwargs)
        finally:
            dist.all_reduce = all_reduce

    inner.step = watched
    try:
        yield counted
    finally:
        del inner.step


def collectives(engine, step):
    (wrapper,) = engine.wrappers
    with counted_all_reduces(wrapper.optimizer) as counted:
        engine.step(step)
    parameters = len(list(engine.named_parameters()))
    assert all(n <= 3 * (parameters + 1) for n in counted), counted  # three numbers a parameter, and the witness
    return len(counted)


@worlds(2)
def case_built_as_megatron_bridge_builds_it():
    """Bridge changes fields of the config, calls finalize(), and then provide() with these four keywords."""

    def provide(config, chunks, use_gloo_process_groups):
        config.finalize()
        asked = {"config_overrides": None, "use_gloo_process_groups": use_gloo_process_groups, "pg_collection": None}
        return config.provide(model_chunks=chunks, **asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron_gpt, "get_megatron_optimizer", provide)
        check_parity("by provide()", Job(), Layout())
    config = alto_config(Job())
    config.alto_alpha = -100.0
    with pytest.raises(ValueError, match="alpha=-100"):
        config.finalize()


#: Layout, options, and the number of all-reduces in a step.
ON_TWO_RANKS = {
    "DP": (Layout(), {}, 1),
    "DP, small buckets": (Layout(), SMALL_BUCKETS, 1),
    "DP, replicated": (Layout(), {"distributed": False}, 0),
    "TP": (Layout(tensor=2), {}, 1),
    "TP, replicated": (Layout(tensor=2), {"distributed": False}, 1),
}
ON_FOUR_RANKS = {
    "DP": (Layout(), {}, 1),
    "two instances": (Layout(instances=2), {}, 1),
    "TP": (Layout(tensor=2), {}, 2),
}


@worlds(2)
@some(ON_TWO_RANKS)
def case_one_small_collective_a_step(setting):
    layout, options, expected = setting
    with parallel(layout):
        assert collectives(Megatron(Job(), layout, **options).train(1), 1) == expected


@worlds(4)
@each(ON_FOUR_RANKS)
def case_one_small_collective_a_group(setting):
    layout, options, expected = setting
    with parallel(layout):
        assert collectives(Megatron(Job(), layout, **options).train(1), 1) == expected


# -- what Megatron does else ---------------------------------------------------------------------------


@worlds(2)
@some({"DistributedOptimizer": True, "FP32Optimizer": False})
def case_megatron_gives_its_usual_wrappers(label, setting):
    with parallel(Layout()):
        engine = Megatron(Job(), Layout(), distributed=setting)
        (wrapper,) = engine.wrappers
        assert label in [c.__name__ for c in type(wrapper).__mro__]
        assert type(wrapper.optimizer) is ALTO
        decays = {(g["wd_mult"], g["weight_decay"], g["decayed"]) for g in wrapper.optimizer.param_groups}
        assert decays == {(1.0, 0.05, True), (0.0, 0.0, False)}


ADAM = {"optimizer": "adam", "adam_eps": 1e-5, "adam_beta1": 0.9, "adam_beta2": 0.99}
TORCHS_ADAM = (ADAM, torch.optim.AdamW, {"eps": 1e-5, "betas": (0.9, 0.99)})
TORCHS_SGD = ({"optimizer": "sgd", "sgd_momentum": 0.5}, torch.optim.SGD, {"momentum": 0.5})
OTHERS = {"adam": (*TORCHS_ADAM, True), "adam, replicated": (*TORCHS_ADAM, False), "sgd": (*TORCHS_SGD, False)}


@worlds(2)
@some(OTHERS)
def case_other_optimizers_are_left_alone(setting):
    """Adam and SGD, with ALTO registered, do what torch's do. Megatron alone decays biases, unless scheduled."""
    settings, kind, options, distributed = setting
    job = Job(weight_decay=0.0)
    expected = reference(job, lambda groups: kind(groups, lr=LR, **options))
    config = OptimizerConfig(**settings, lr=LR, weight_decay=0.0, clip_grad=1.0)
    with parallel(Layout()):
        engine = Megatron(job, Layout(), distributed=distributed, optimizer=config).train()
        assert type(engine.wrappers[0].optimizer) is kind
        assert type(engine.wrappers[0]).__module__.startswith("megatron.core.optimizer")
        assert largest_gap(engine, expected) <= 1e-6


@worlds(2)
def case_what_megatron_says_of_other_optimizers():
    job = Job(weight_decay=0.0)
    with parallel(Layout()):
        with pytest.raises(AssertionError, match="Only Adam.* HybridDeviceOptimizer"):
            Megatron(job, Layout(), optimizer=OptimizerConfig(optimizer="sgd", lr=LR))
        with pytest.raises(Exception, match="lars.*(is not supported|is required)|required for optimizer=.lars."):
            Megatron(job, Layout(), optimizer=OptimizerConfig(optimizer="lars", lr=LR))


@worlds(2)
@some({"distributed optimizer": True, "replicated": False})
def case_lamb_by_its_name(setting):
    """optimizer="lamb" is ALTO with alpha 0, and has no third state."""
    job = Job()
    options = {**ALTO_OPTIONS, "alpha": 0.0}
    expected = reference(job, lambda groups: ALTO(groups, layerwise=job.layerwise, **options))
    config = dataclasses.replace(alto_config(job), optimizer="lamb")
    with parallel(Layout()):
        engine = Megatron(job, Layout(), distributed=setting, optimizer=config).train()
        assert largest_gap(engine, expected) <= 1e-6
        alto = engine.wrappers[0].optimizer
        assert {group["alpha"] for group in alto.param_groups} == {0.0}
        assert all("grad_ema" not in state for state in alto.state.values())
        with pytest.raises(ValueError, match=r"alto_alpha=-2.0 has no effect on LAMB; set optimizer=.alto."):
            dataclasses.replace(config, alto_alpha=-2.0)


class Recorder:
    """In the place of W&B, which is not installed."""

    def __init__(self):
        self.logged = []

    def log(self, scalars, step):
        self.logged.append((step, scalars))


@worlds(2)
def case_diagnostics_in_the_log_tensorboard_and_wandb(directory):
    """Written by the last rank, once for each step that was measured."""
    folder, words, wandb = directory / "tensorboard", io.StringIO(), Recorder()
    with parallel(Layout()), contextlib.redirect_stdout(words):
        engine = Megatron(Job(), Layout(), optimizer=alto_config(Job(), alto_diagnostics_every=2))
        for step in range(4):
            engine.step(step)
            with SummaryWriter(folder) if dist.get_rank() else contextlib.nullcontext() as tensorboard:
                monitor.show(step + 1, [tensorboard, wandb, None])
        readings = diagnostics(engine.optimizer).values()
    if dist.get_rank() == 0:
        assert (words.getvalue(), wandb.logged) == ("", [])
        return
    assert [step for step, _ in wandb.logged] == [2, 4]
    assert len(wandb.logged[-1][1]) == 12
    for tag, pick in (("min", min), ("median", statistics.median), ("max", max)):
        assert wandb.logged[-1][1][f"alto/trust_ratio_{tag}"] == pick(r.trust_ratio for r in readings)
    assert re.findall(r"iteration +(\d) \| trust_ratio min: ", words.getvalue()) == ["2", "4"]
    written = EventAccumulator(str(folder)).Reload().Scalars("alto/acceleration_max")
    assert [event.step for event in written] == [2, 4]


@worlds(2)
def case_the_same_config_serves_twice():
    """Registration leaves the config as it was, so that it can be printed, compared and used again."""
    with parallel(Layout()):
        config = alto_config(Job(), use_distributed_optimizer=True)
        for _ in range(2):
            Megatron(Job(), Layout(), optimizer=config)
            assert config == alto_config(Job(), use_distributed_optimizer=True)
            assert config.optimizer == "alto"
