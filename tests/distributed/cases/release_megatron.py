"""A handful of cells with whatever release of megatron-core is there: parity in each layout, and a resume."""

import contextlib

import pytest
import torch

from tests.helpers.cases import each, worlds
from tests.helpers.releases import without_managed_memory

without_managed_memory()  # before Megatron's import

from tests.helpers.megatron_gpt import Job, Layout, check_parity  # noqa: E402

from . import megatron_checkpoints as checkpoints  # noqa: E402

from megatron.core.optimizer.optimizer import param_group_identifier_keys  # noqa: E402  # isort: skip

#: dp_reshardable and fully_reshardable are Megatron's two formats for training; the others are older.
RUNS = {
    "float32": checkpoints.Run(("dp", "fully")),
    "bf16": checkpoints.Run(("dp",), job=checkpoints.BF16),
}


CELLS = {
    "distributed optimizer": (Layout(), {}),
    "buckets": (Layout(), {"overlap": True, "bucket_size": 3000}),
    "replicated": (Layout(), {"distributed": False}),
    "tensor parallel": (Layout(tensor=2), {}),
    "pipeline parallel": (Layout(pipeline=2), {}),
}


@worlds(2)
@each(CELLS)
def case_sharded_is_unsharded(label, setting):
    layout, options = setting
    check_parity(label, Job(), layout, **options)


@worlds(2)
@each(RUNS)
def case_a_resumed_run_is_bitwise_the_same(directory, label, setting):
    run = setting
    with checkpoints.engine_for(run) as engine:
        engine.assert_straddles()
        checkpoints.advance(engine, 0, 3)
        for kind in run.formats:
            checkpoints.save(engine, directory / label / kind, kind)
        at_save = checkpoints.picture(engine, run)
        checkpoints.advance(engine, 3, 6)
        at_end = checkpoints.picture(engine, run)
    assert not torch.equal(at_save["steps"], at_end["steps"])
    for kind in run.formats:
        with checkpoints.engine_for(run) as engine:
            with torch.no_grad():
                for _, p in engine.named_parameters():
                    p.add_(0.5)  # for those that are loaded to show
            checkpoints.load(engine, directory / label / kind, kind)
            checkpoints.assert_same(f"{label}, {kind}, loaded", checkpoints.picture(engine, run), at_save)
            checkpoints.advance(engine, 3, 6)
            checkpoints.assert_same(f"{label}, {kind}, resumed", checkpoints.picture(engine, run), at_end)


@worlds(2)
def case_resumed_and_adopted_with_another_rate(directory):
    """Adam's rate is no rate for ALTO; a resumed run may have another too, if Megatron takes it."""
    run = checkpoints.Run(("dp",), job=Job(layers=1, tied=False, scheduled=True))
    ours, adams = directory / "another rate", directory / "another rate, Adam"
    with checkpoints.engine_for(run) as engine:
        checkpoints.advance(engine, 0, 3)
        checkpoints.save(engine, ours, "dp")
    with checkpoints.engine_for(run, optimizer=checkpoints.adam(run.job)) as engine:
        checkpoints.advance(engine, 0, 3)
        checkpoints.save(engine, adams, "fully")  # 0.15 cannot save torch's Adam in the other format

    def rates(engine):
        return {group["max_lr"] for group in engine.optimizer.param_groups}

    with checkpoints.engine_for(run, lr=0.5, alto_adopt=True) as engine:
        assert rates(engine) == {0.5}
        checkpoints.load(engine, adams, "fully")
        assert rates(engine) == {0.5}
    with checkpoints.engine_for(run, lr=0.5) as engine:
        paired_by_rate = "max_lr" in param_group_identifier_keys
        said = contextlib.nullcontext() if paired_by_rate else pytest.warns(UserWarning, match="max_lr=0.003, not this")
        with said:
            checkpoints.load(engine, ours, "dp")
        assert rates(engine) == {checkpoints.LR}  # the scheduler's override comes after
        assert not any(isinstance(group["is_decoupled_lr"], str) for group in engine.optimizer.param_groups)
