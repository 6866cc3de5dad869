"""Checkpoints of the Megatron engine meet damaged files, crafted files and a full disk."""

import pickle
from multiprocessing.process import BaseProcess

import pytest
import torch
import torch.distributed as dist

from tests.helpers import megatron_gpt  # noqa: F401  (puts its stand-ins for a GPU in place)

# The imports below need them.
from megatron.core import dist_checkpointing  # isort: skip
from megatron.core.dist_checkpointing.strategies import filesystem_async  # isort: skip
from alto_distributed.pretrain.engines.megatron import engine as pretrain  # isort: skip
from alto_distributed.pretrain.checkpoint import manifest
from alto_distributed.pretrain.checkpoint.manager import Checkpoints
from alto_distributed.pretrain.config.settings import parse
from tests.helpers import damage, skips
from tests.helpers.cases import worlds

SHARD, OTHER = "__1_0.distcp", "__0_0.distcp"


def run_of():
    model = {"layers": 1, "hidden": 32, "heads": 2, "sequence": 8, "vocabulary": skips.VOCABULARY, "dropout": 0.0}
    training = {"global_batch": 8, "micro_batch": 4, "precision": "fp32"}
    layout = {"tensor_parallel": 2, "overlap": True}  # with two copies of the model rank 0 would write all of it
    return parse({"engine": "megatron", "model": model, "training": training, "megatron": layout})


_engine = []


def engine_of(run):
    """One for all cases: Megatron's groups are made once in a process."""
    if not _engine:
        _engine.append(pretrain.build(run))
    return _engine[0]


def advance(engine, step):
    generator = torch.Generator().manual_seed(step)
    engine.train([torch.randint(0, 256, (4, 9), generator=generator) for _ in range(2)], 0.01)


@worlds(2)
def case_megatron_damaged_shards_are_named_and_refused(directory):
    run = run_of()
    engine, checkpoints = engine_of(run), Checkpoints(directory / "megatron-damaged", run)
    for step in (1, 2):
        advance(engine, step)
        path = checkpoints.save(engine, step)
    whole = manifest.read(path)
    assert {name: whole.files[name].rank for name in (SHARD, OTHER, "common.pt")} == {
        SHARD: 1,
        OTHER: 0,
        "common.pt": 0,
    }
    states = {name for entry in whole.files.values() for name in entry.states}
    assert "megatron-core" in whole.versions
    for state in ("exp_avg", "exp_avg_sq", "grad_ema"):
        assert any(state in name for name in states), states
    damage.damaged_are_refused(engine, checkpoints, SHARD, OTHER)


@worlds(2)
def case_megatron_crafted_files_are_refused_and_do_not_run(directory):
    run = run_of()
    engine, checkpoints = engine_of(run), Checkpoints(directory / "megatron crafted", run)
    advance(engine, 3)
    path = checkpoints.save(engine, 1)
    damage.code_is_not_run(engine, checkpoints, "common.pt", damage.poison_torch)
    damage.code_is_not_run(engine, checkpoints, ".metadata", damage.poison_pickle)
    # The payload is one: plain pickle, which torch reads this file with, runs it.
    trace = directory / "megatron ran"
    damage.once(lambda: damage.poison_pickle(path / ".metadata", damage.Payload(trace)))
    damage.once(lambda: pickle.loads((path / ".metadata").read_bytes()))
    assert trace.exists()


@worlds(2)
def case_megatron_a_quota_on_one_rank_stops_all(directory):
    run = run_of()
    engine = engine_of(run)
    advance(engine, 4)
    damage.a_quota_on_one_rank_stops_all(engine, run, directory / "megatron quota")


@worlds(2)
def case_megatron_a_save_starts_no_process_that_could_be_killed(directory):
    """megatron-core 0.16.1 forks writers, and its rank waits for ever for one that the kernel has killed."""
    run = run_of()
    engine, started = engine_of(run), []
    checkpoints, begin = Checkpoints(directory / "megatron writers", run), BaseProcess.start

    def noted(process):
        started.append(process.name)
        begin(process)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseProcess, "start", noted)
        checkpoints.save(engine, 1)
        assert started == []
        # It is noted where there are some: Megatron's own way, which others still have after our save.
        path = directory / "megatron's own way"
        damage.once(path.mkdir)
        dist_checkpointing.save(engine._described(engine._metadata(), is_loading=False), str(path))
        assert started


@worlds(2)
def case_megatron_an_error_of_a_writer_reaches_all_ranks(directory):
    """Whatever its kind: one of Megatron's functions fails on rank 1 alone, in the thread that writes."""
    run = run_of()
    engine, checkpoints = engine_of(run), Checkpoints(directory / "megatron writer's error", run)

    def failing(*_, **__):
        raise MemoryError("no memory for a buffer")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(filesystem_async, "_write_item", failing)
        said = damage.refused(OSError, lambda: checkpoints.save(engine, 1))
    assert "step-00000001 could not be written: " in said, said
    assert "rank 1: Worker failure: no memory for a buffer" in said, said
    checkpoints.save(engine, 1)
    checkpoints.load(engine, checkpoints.newest())


@worlds(2)
def case_megatron_the_loop_skips_and_stops(directory):
    into = directory / "megatron skips"
    skips.skips_and_stops(run_of(), engine_of, lambda engine: list(engine._model.parameters())[-1], into)
