"""A handful of cells with whatever release of DeepSpeed is there: parity in each stage and precision, and a resume."""

import torch
import torch.distributed as dist

from ..launcher import worlds
from .zero import FLOAT32_CELLS, LOW_CELLS, config, float32_gap, masters, network, rounded_reference, running, train
from .zero import trainable as trainable_of

CELLS = ("stage 0", "stage 1", "stage 2", "stage 3", "stage 2, round_robin", "stage 3, small sub-groups")
LOW = ("bf16, stage 1", "bf16, stage 3", "fp16, stage 2, offload")


@worlds(2)
def case_sharded_is_unsharded():
    gaps = {label: float32_gap(*FLOAT32_CELLS[label]) for label in CELLS}
    assert all(gap < 1e-6 for gap in gaps.values()), gaps


@worlds(2)
def case_low_precision_is_bitwise_right():
    for label in LOW:
        zero, precision, cell = LOW_CELLS[label]
        ds_config = config(zero, clip=0.0, **precision)
        ds_config["train_micro_batch_size_per_gpu"] = 8
        with running(network(), ds_config) as engine:
            train(engine, sliced=False)
            got = masters(engine)
        half = (torch.float16, 128.0) if "fp16" in precision else (torch.bfloat16, 1.0)
        expected, _ = rounded_reference(half[0], scale=half[1], **cell)
        for name, p in trainable_of(expected).items():
            assert torch.equal(got[name], p.detach()), (label, name)


@worlds(2)
def case_a_resumed_run_is_bitwise_the_same(directory):
    for stage in (1, 3):
        folder = directory / f"stage {stage}"
        with running(network(), config({"stage": stage})) as engine:
            train(engine, steps=3)
            engine.save_checkpoint(folder, tag="saved")
            dist.barrier()
            train(engine, steps=2)
            expected = masters(engine)
        with running(network(), config({"stage": stage})) as engine:
            engine.load_checkpoint(folder, tag="saved")
            train(engine, steps=2)
            got = masters(engine)
        assert all(torch.equal(got[name], value) for name, value in expected.items()), stage
