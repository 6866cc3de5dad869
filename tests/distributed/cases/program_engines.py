"""The two engines of the training program beside each other: models, masked documents, weights of checkpoints."""

import json
import re

import pytest
import torch
import torch.distributed as dist

from alto_distributed.pretrain.config.settings import parse
from alto_distributed.pretrain.data.prepare import prepare
from alto_distributed.pretrain.engines.base import read_weights
from alto_distributed.pretrain.memory.shapes import count, of_model
from alto_distributed.pretrain.model import initial_weights
from alto_distributed.sharding.rank_sync import run_on_rank0
from tests.helpers import devices
from tests.helpers.cases import REPO, each, worlds
from tests.helpers.pretrain_megatron import programs_groups

# The imports below need what megatron_gpt, imported by pretrain_megatron, puts in place of a GPU.
from alto_distributed.pretrain.engines.deepspeed import engine as on_deepspeed  # isort: skip
from alto_distributed.pretrain.engines.megatron import engine as on_megatron  # isort: skip

STEPS, BATCH, MICRO, SEQUENCE, END = 4, 8, 2, 12, 256
CELLS = {
    "llama, tensor parallel": {"kind": "llama", "kv_heads": 2, "tensor_parallel": 2, "stage": 3},
    "gpt2, documents": {"kind": "gpt2", "document_mask": True},
}
MORE = {
    "llama": {"kind": "llama", "kv_heads": 2},
    "llama, documents": {"kind": "llama", "kv_heads": 4, "document_mask": True},
    "gpt2, tensor parallel": {"kind": "gpt2", "tensor_parallel": 2, "stage": 1},
    "llama, wide": {"kind": "llama", "feed_forward": 20, "rope_theta": 500, "stage": 1},
    "llama, bf16": {"kind": "llama", "kv_heads": 1, "precision": "bf16", "stage": 3},
    "llama, pipeline": {"kind": "llama", "pipeline_parallel": 2},
    "llama, recomputed": {"kind": "llama", "kv_heads": 2, "recompute": True, "stage": 3},
}


def run_of(engine, directory, *, document_mask=False, tensor_parallel=1, pipeline_parallel=1, stage=2, precision="fp32",
           recompute=False, **model):  # fmt: skip
    shape = {"layers": 2, "hidden": 16, "heads": 4, "sequence": SEQUENCE, "vocabulary": 384, "dropout": 0.0}
    training = {"global_batch": BATCH, "micro_batch": MICRO, "precision": precision, "seed": 5, "recompute": recompute}
    options = {"alpha": -5, "betas": [0.99, 0.9, 0.99]}
    cut = {"tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel}
    return parse(
        {
            "engine": engine,
            "model": {**shape, **model},
            "data": {"directory": str(directory / "program bytes"), "document_mask": document_mask},
            "training": training,
            "optimizer": {"name": "alto", "lr": 1.0, "weight_decay": 0.1, "options": options},
            "logs": {"diagnostics_every": STEPS},
            "deepspeed": {"config": str(REPO / f"configs/deepspeed/pretrain-stage{stage}.json")},
            "megatron": {**cut, "sequence_parallel": tensor_parallel > 1, "overlap": False},
        }
    )


def tokens_of(step):
    """A global batch, in which one token of five ends a document."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 250, (BATCH, SEQUENCE + 1), generator=generator)
    return torch.where(torch.rand(tokens.shape, generator=generator) < 0.2, END, tokens)


def trained(build, run, folder):
    """Losses of steps, that of an evaluation, readings of all ranks, and the weights that a checkpoint has."""
    engine = build(run)
    mine = [tokens_of(step).chunk(engine.data_parallel_size)[engine.data_parallel_rank] for step in range(STEPS + 1)]
    losses = [engine.train(mine[step].split(MICRO), 0.02 * (1 + step)).loss for step in range(STEPS)]
    losses.append(engine.evaluate(mine[STEPS].split(MICRO)))
    readings = [None] * dist.get_world_size()
    dist.all_gather_object(readings, dict(engine.diagnostics()))
    run_on_rank0(lambda: folder.mkdir(parents=True))
    engine.save(folder)
    dist.barrier()
    engine.close()
    return losses, {name: reading for rank in readings for name, reading in rank.items()}, read_weights(run, folder)


def megatron(run):
    engine = on_megatron.MegatronTraining(run, devices.here())
    cut = run.megatron.tensor_parallel, run.megatron.pipeline_parallel
    if dist.get_rank() == 0:  # the fullest, as the memory estimate counts it
        assert sum(p.numel() for p in engine._model.parameters()) == count(of_model(run.model, *cut))
    return engine


def prepared(directory):
    text = directory / "program.jsonl"
    text.write_text("".join(json.dumps({"text": f"{n} " * 30}) + "\n" for n in range(8)))
    prepare(directory / "program bytes", [text], kind="bytes", split=("0.5", "0.5", "0"), workers=1)


@worlds(2)
@each(CELLS, exhaustive=MORE)
def case_the_engines_train_the_same_model(directory, label, setting):
    if setting.get("document_mask"):
        run_on_rank0(lambda: prepared(directory))
    place = directory / f"engines, {label}"
    ours = trained(on_deepspeed.build, run_of("deepspeed", directory, **setting), place / "deepspeed")
    with programs_groups(setting.get("tensor_parallel", 1), setting.get("pipeline_parallel", 1)):
        theirs = trained(megatron, run_of("megatron", directory, **setting), place / "megatron")
    is_bf16 = setting.get("precision") == "bf16"
    assert ours[0] == pytest.approx(theirs[0], rel=5e-3 if is_bf16 else 1e-5)
    assert abs(ours[0][-1] - ours[0][0]) > 1e-3  # it has learned something
    start = initial_weights(run_of("deepspeed", directory, **setting))
    # Diagnostics have the names of the model, the same in both engines.
    assert ours[1].keys() == theirs[1].keys() == start.keys()
    for name, reading in ours[1].items():
        assert tuple(reading) == pytest.approx(tuple(theirs[1][name]), rel=0.1 if is_bf16 else 1e-3, abs=1e-6)
    # Whole weights, from files of two ranks, in one process.
    for name, before in start.items():
        one, other = ours[2][name].float(), theirs[2][name].float()
        assert one.shape == other.shape == before.shape
        went = (one - before).norm()
        assert went > 0
        if not re.search(r"c_attn\.bias", name):  # of the keys' biases the gradient is rounding alone
            assert (one - other).norm() < (0.2 if is_bf16 else 1e-3) * went, name


@worlds(2)
def case_masks_matter_to_both_engines(directory):
    """The negative control: the same batches without them."""
    run_on_rank0(lambda: prepared(directory))
    found = []
    for mask in (True, False):
        engine = on_deepspeed.build(run_of("deepspeed", directory, kind="llama", document_mask=mask))
        batch = tokens_of(0).chunk(engine.data_parallel_size)[engine.data_parallel_rank].split(MICRO)
        found.append(engine.evaluate(batch))
        engine.close()
    assert abs(found[0] - found[1]) > 1e-5
