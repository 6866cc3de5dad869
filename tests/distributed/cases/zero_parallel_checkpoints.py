"""Checkpoints of DeepSpeed's pipelines, tensor parallelism and experts resume bitwise.

Universal ones go from two pipeline stages or two tensor-parallel ranks to two data-parallel ranks, and back.
"""

import contextlib

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from alto_distributed import ALTO
from alto_distributed.deepspeed.universal import convert
from tests.helpers.cases import after, each, worlds
from tests.helpers.zero import BF16, FP16, batches, config, loss_of, running, trainable
from tests.helpers.zero_checkpoints import AFTER, BEFORE, assert_same, on_rank_0, place
from tests.helpers.zero_parallel import (
    ACCUMULATION,
    TENSOR_PARALLEL,
    expert_network,
    glued,
    pipeline,
    step_on_four_ranks,
    tensor_parallel_network,
    whole_weights,
)


def shift(model):
    """Other weights, for those that are loaded to show."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5)
    return model


def picture(engine):
    """What this rank has: weights, and the optimizer's tensors and states."""
    out = {}
    for name, p in trainable(engine.module).items():
        with deepspeed.zero.GatheredParameters([p]):
            out[f"{name} model"] = p.detach().clone()
    for g, group in enumerate(engine.basic_optimizer.param_groups):
        tensors = group["params"] or engine.optimizer.fp32_partitioned_groups_flat
        for i, flat in enumerate(tensors):
            state = engine.basic_optimizer.state[flat]
            assert set(ALTO.state_keys) <= set(state)
            out.update({f"{g} {i} {key}": value.detach().clone() for key, value in state.items()})
    return out


def resumes(build, advance, folder, changed=shift):
    """Save, go on; load into another model, go on; both ends are bitwise the same.

    Args:
        build: model -> an engine, in a context.
        advance: (engine, first step, last step), trains.
        folder: where to save.
        changed: what the weights become before loading.
    """
    with build(lambda model: model) as engine:
        advance(engine, 0, BEFORE)
        engine.save_checkpoint(folder, tag="saved")
        at_save = picture(engine)
        advance(engine, BEFORE, BEFORE + AFTER)
        at_end = picture(engine)
    with build(changed) as engine:
        engine.load_checkpoint(folder)
        assert_same("loaded", picture(engine), at_save)
        advance(engine, BEFORE, BEFORE + AFTER)
        assert_same("continued", picture(engine), at_end)


# -- pipelines -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def pipelined(stages, change=lambda model: model, precision=(), **more):
    deepspeed.init_distributed("gloo")
    ds_config = config({"stage": 1}, accumulation=ACCUMULATION, **dict(precision), **more)
    ds_config["train_micro_batch_size_per_gpu"] = 8 // (dist.get_world_size() // stages)
    with running(change(pipeline(stages)), ds_config) as engine:
        yield engine


def advance_pipeline(engine, start, stop):
    replicas, rank = engine.grid.data_parallel_size, engine.grid.get_data_parallel_rank()
    for step in list(batches(stop, ACCUMULATION))[start:]:
        engine.train_batch(iter([(x.chunk(replicas)[rank], y.chunk(replicas)[rank]) for x, y in step]))


PRECISIONS = {"fp32": {}, "bf16": BF16, "fp16": FP16}


@worlds(2, exhaustive=(4,))
@each(PRECISIONS)
def case_a_pipeline_resumes_bitwise(directory, label, setting):
    folder = place(directory, f"pipeline, {label}")
    resumes(lambda change: pipelined(2, change, setting), advance_pipeline, folder)


def whole(engine):
    """Whole master weights and states of the parameters that this rank's stage has."""
    out = {}
    for name, p in trainable(engine.module).items():
        out[f"{name} master"] = safe_get_full_fp32_param(p).clone()
        out.update({f"{name} {key}": safe_get_full_optimizer_state(p, key).clone() for key in ALTO.state_keys})
    return out


def together(mine):
    """What all stages have, which are the same where several have it."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return {key: value for part in parts for key, value in part.items()}


#: Pipeline stages that save and that load; each with two ranks.
STAGES = {"from 2 stages to 1": (2, 1), "from 1 stage to 2": (1, 2)}


@worlds(2)
@each(STAGES)
def case_pipelines_of_another_length(directory, label, setting):
    saving, loading = setting
    folder = place(directory, label)
    with pipelined(saving) as engine:
        advance_pipeline(engine, 0, BEFORE)
        engine.save_checkpoint(folder, tag="saved")
        at_save = together(whole(engine))
        advance_pipeline(engine, BEFORE, BEFORE + AFTER)
        at_end = together(whole(engine))
    on_rank_0(convert, folder / "saved", folder / "universal")
    with pipelined(loading, shift, checkpoint={"load_universal": True}) as engine:
        engine.load_checkpoint(folder)
        assert_same("loaded", together(whole(engine)), at_save)
        advance_pipeline(engine, BEFORE, BEFORE + AFTER)
        got = together(whole(engine))
    assert_close(got, at_end)


def assert_close(got, expected, tolerance=1e-6):
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        if key.endswith("master"):
            gap = ((got[key] - value).norm() / value.norm()).item()
            assert gap < tolerance, (key, gap)


# -- tensor parallelism --------------------------------------------------------------------------------


@contextlib.contextmanager
def tensor_parallel(stage, change=lambda model: model, parallel=2, **more):
    cut = {"tensor_parallel": TENSOR_PARALLEL} if parallel > 1 else {}
    ds_config = config({"stage": stage} if stage else None, **cut, **more)
    ds_config["train_micro_batch_size_per_gpu"] = 8 // (dist.get_world_size() // parallel)
    with running(change(tensor_parallel_network()), ds_config) as engine:
        yield engine


def advance_tensor_parallel(engine, start, stop, parallel=2):
    share, rank = dist.get_world_size() // parallel, dist.get_rank() // parallel
    for step in list(batches(stop))[start:]:
        for x, y in step:
            engine.backward(loss_of(engine(x.chunk(share)[rank]), y.chunk(share)[rank]))
            engine.step()


@worlds(2, exhaustive=(4,))
@each({"stage 0": 0, "stage 1": 1}, exhaustive={"stage 2": 2, "stage 3": 3})
def case_tensor_parallel_resumes_bitwise(directory, label, setting):
    folder = place(directory, f"tensor parallel, {label}")
    resumes(lambda change: tensor_parallel(setting, change), advance_tensor_parallel, folder)


@worlds(2)
@each({"stage 1": 1}, exhaustive={"stage 2": 2})
def case_tensor_parallel_is_converted(directory, label, setting):
    folder = place(directory, f"tensor to data parallel, {label}")
    with tensor_parallel(setting) as engine:
        advance_tensor_parallel(engine, 0, BEFORE)
        engine.save_checkpoint(folder, tag="saved")
        at_save = glued(whole(engine), lambda name: name.rpartition(" ")[0])
        advance_tensor_parallel(engine, BEFORE, BEFORE + AFTER)
        at_end = whole_weights(engine)
    on_rank_0(convert, folder / "saved", folder / "universal")
    if dist.get_rank() == 0:
        torch.save((at_save, at_end), folder / "pictures.pt")
    dist.barrier()


@worlds(2)
@each({"stage 1": 1}, exhaustive={"stage 2": 2})
@after("case_tensor_parallel_is_converted")
def case_from_tensor_to_data_parallel(directory, label, setting):
    """A case of its own: DeepSpeed's tensor parallelism stays on in a process until all is put back."""
    folder = place(directory, f"tensor to data parallel, {label}")
    at_save, at_end = torch.load(folder / "pictures.pt")
    with tensor_parallel(setting, shift, 1, checkpoint={"load_universal": True}) as engine:
        engine.load_checkpoint(folder)
        assert_same("loaded", whole(engine), at_save)
        advance_tensor_parallel(engine, BEFORE, BEFORE + AFTER, 1)
        got = whole(engine)
    assert_close({f"{n} master": got[f"{n} master"] for n in at_end}, {f"{n} master": p for n, p in at_end.items()})


# -- experts -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def experts(stage, change=lambda model: model):
    with running(change(expert_network()), config({"stage": stage} if stage else None)) as engine:
        yield engine


def advance_experts(engine, start, stop):
    for step in list(batches(stop))[start:]:
        step_on_four_ranks(engine, step)


@worlds(4)
@each({"stage 1": 1}, exhaustive={"stage 0": 0, "stage 2": 2})
def case_experts_resume_bitwise(directory, label, setting):
    folder = place(directory, f"experts, {label}")
    resumes(lambda change: experts(setting, change), advance_experts, folder)


@worlds(4)
@after("case_experts_resume_bitwise", "stage 1")
def case_experts_are_not_converted(directory):
    """DeepSpeed's converter fails, for Adam too, and left a folder that refused the next try."""
    saved = place(directory, "experts, stage 1") / "saved"
    with pytest.raises(ValueError, match="has a mixture of experts, which DeepSpeed's universal format does not carry"):
        on_rank_0(convert, saved, directory / "experts converted")
    assert not (directory / "experts converted").exists()
