"""Checkpoints of the Megatron engine meet damaged files, crafted files and a full disk."""

import pickle

import torch

from .. import megatron_gpt  # noqa: F401  (puts its stand-ins for a GPU in place)

# The imports below need them.
from alto_distributed.megatron import pretrain  # isort: skip
from alto_distributed.pretrain import manifest
from alto_distributed.pretrain.checkpoints import Checkpoints
from alto_distributed.pretrain.config import parse

from ..launcher import worlds
from . import damage, skips

SHARD, OTHER = "__1_0.distcp", "__0_0.distcp"


def run_of():
    model = {"layers": 1, "hidden": 32, "heads": 2, "sequence": 8, "vocabulary": skips.VOCABULARY, "dropout": 0.0}
    training = {"global_batch": 8, "micro_batch": 4, "precision": "fp32"}
    layout = {"tensor_parallel": 2, "overlap": False}  # with two copies of the model rank 0 would write all of it
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
def case_megatron_the_loop_skips_and_stops(directory):
    into = directory / "megatron skips"
    skips.skips_and_stops(run_of(), engine_of, lambda engine: list(engine._model.parameters())[-1], into)
