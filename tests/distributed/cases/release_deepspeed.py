"""Cells with whatever release of DeepSpeed is there: parity in each stage and precision, checkpoints, and its faults.

Everyday runs take a few of them, scripts/matrix.py takes all.
"""

import deepspeed
import pytest
import torch
import torch.distributed as dist

from tests.helpers.cases import each, worlds
from tests.helpers.releases import DEEPSPEED
from tests.helpers.zero import config, masters, network, running, train, trainable
from tests.helpers.zero_checkpoints import UNIVERSAL_CELLS, check_conversion, engine_for, goes_on, place, train_and_save
from tests.helpers.zero_parity import FLOAT32_CELLS, LOW_CELLS, float32_gap, low_config, low_precision_gap

#: What everyday runs take. The oldest release gets contiguous_gradients wrong.
SOME = {
    "stage 1": FLOAT32_CELLS["stage 1"],
    "stage 2, round_robin": FLOAT32_CELLS["stage 2, round_robin"],
    "stage 3, small sub-groups": FLOAT32_CELLS["stage 3, small sub-groups"],
    "stage 1, contiguous_gradients off": FLOAT32_CELLS["stage 1, contiguous_gradients off"],
    "stage 2, contiguous_gradients off": FLOAT32_CELLS["stage 2, contiguous_gradients off"],
}
SOME_LOW = {
    "bf16, stage 3": LOW_CELLS["bf16, stage 3"],
    "fp16, stage 2, offload": LOW_CELLS["fp16, stage 2, offload"],
}

#: Cells with accumulated gradients at stage 2.
ACCUMULATED = {
    label
    for label, (*_, cell) in {**FLOAT32_CELLS, **LOW_CELLS}.items()
    if "stage 2" in label and "accumulation" in cell
}
#: Which cells a release gets wrong with any optimizer, so that ALTO refuses them: docs/versions.md.
FAULTY = {
    "contiguous": ({"stage 1, contiguous_gradients off", "stage 2, contiguous_gradients off"}, (), (0, 19, 8)),
    "accumulation": (ACCUMULATED, (0, 17), (0, 18, 3)),
    "bf16 at stage 0": ({"bf16, stage 0", "bf16, stage 0, accumulation"}, (0, 17), (0, 18, 9)),
    "BF16_Optimizer": ({"bf16, BF16_Optimizer", "bf16, BF16_Optimizer, accumulation"}, (0, 17), (0, 19)),
}
#: Older releases round the sums of accumulated gradients at other points: no fault, but not bitwise this reference.
ROUNDED_OTHERWISE = {"bf16, stage 2, float32 sums", "bf16, stage 3, float32 sums", "fp16, stage 2, float32 sums"}
if DEEPSPEED < (0, 17):
    ROUNDED_OTHERWISE.add("bf16, stage 0, accumulation")


def refused():
    """The cells that this release gets wrong."""
    return set().union(*(labels for labels, first, good in FAULTY.values() if first <= DEEPSPEED < good))


def assert_refused(ds_config):
    with pytest.raises(ValueError, match=r"gives wrong gradients in DeepSpeed .*, with any optimizer; .*0\.19\.8"):
        deepspeed.initialize(model=network(), config=ds_config)


@worlds(2)
@each(SOME, exhaustive=FLOAT32_CELLS)
def case_sharded_is_unsharded_or_refused(label, setting):
    """What the release gets wrong with any optimizer is refused."""
    zero, cell = setting
    if label in refused():
        assert_refused(config(zero, **cell))
    else:
        gap = float32_gap(zero, cell)
        assert gap < 1e-6, gap


@worlds(2)
@each(SOME_LOW, exhaustive=LOW_CELLS)
def case_low_precision_is_bitwise_right_or_refused(label, setting):
    if label in refused():
        assert_refused(low_config(*setting))
    elif label in ROUNDED_OTHERWISE and DEEPSPEED < (0, 19, 8):
        pytest.skip("this release rounds at other points")
    else:
        assert low_precision_gap(*setting) == 0


@worlds(2)
@each({"stage 1": 1, "stage 3": 3}, exhaustive={"stage 0": 0, "stage 2": 2})
def case_a_resumed_run_is_bitwise_the_same(directory, setting):
    stage = setting
    folder, zero = directory / f"stage {stage}", {"stage": stage} if stage else None
    with running(network(), config(zero)) as engine:
        train(engine, steps=3)
        engine.save_checkpoint(folder, tag="saved")
        dist.barrier()
        train(engine, steps=2)
        expected = {name: value.clone() for name, value in (masters if stage else whole)(engine).items()}
    with running(network(), config(zero)) as engine:
        engine.load_checkpoint(folder, tag="saved")
        train(engine, steps=2)
        got = (masters if stage else whole)(engine)
    assert all(torch.equal(got[name], value) for name, value in expected.items()), stage


def whole(engine):
    """Weights at stage 0, where there are no masters."""
    return {name: p.detach() for name, p in trainable(engine.module).items()}


#: With three parameter groups, of which each has several sub-groups at stage 3.
CONVERTED = {
    "stage 1": UNIVERSAL_CELLS["stage 1"],
    "stage 2": UNIVERSAL_CELLS["stage 2"],
    "stage 3": UNIVERSAL_CELLS["stage 3"],
    "stage 3, bf16": UNIVERSAL_CELLS["stage 3, bf16"],
    "BF16_Optimizer": UNIVERSAL_CELLS["BF16_Optimizer"],
}


@worlds(exhaustive=[2])
@each(CONVERTED)
def case_a_universal_checkpoint_has_every_state(directory, label):
    """Converted, with each state compared; then loaded, and on from there. What cannot be right is refused."""
    if {"BF16_Optimizer": "bf16, BF16_Optimizer"}.get(label) in refused():
        pytest.skip("this release gets it wrong, with any optimizer")
    train_and_save(directory, label)
    folder = place(directory, label)
    if "stage 3" in label and DEEPSPEED < (0, 18):
        with pytest.raises(ValueError, match=r"first parameter group of ZeRO stage 3 alone.*use 0\.18\.0"):
            check_conversion(folder)
        universal = {"checkpoint": {"load_universal": True}}
        with engine_for(CONVERTED[label], **universal) as engine, pytest.raises(ValueError, match=r"use 0\.18\.0"):
            engine.load_checkpoint(folder, tag="saved")
    else:
        check_conversion(folder)
        goes_on(directory, label, dist.get_world_size())
