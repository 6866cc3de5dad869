"""A handful of cells with whatever release of megatron-core is there: parity in each layout, and a resume."""

import contextlib

import pytest
import torch

from tests.helpers.cases import each, worlds
from tests.helpers.releases import without_managed_memory

without_managed_memory()  # before Megatron's import

from tests.helpers import megatron_saves as saves  # noqa: E402
from tests.helpers.megatron_gpt import LR, Job, Layout, check_parity  # noqa: E402

from megatron.core.optimizer.optimizer import param_group_identifier_keys  # noqa: E402  # isort: skip

#: dp_reshardable and fully_reshardable are Megatron's two formats for training; the others are older.
RUNS = {
    "float32": saves.Run(("dp", "fully")),
    "bf16": saves.Run(("dp",), job=saves.BF16),
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
    with saves.engine_for(run) as engine:
        engine.assert_straddles()
        saves.advance(engine, 0, 3)
        for kind in run.formats:
            saves.save(engine, directory / label / kind, kind)
        at_save = saves.picture(engine, run)
        saves.advance(engine, 3, 6)
        at_end = saves.picture(engine, run)
    assert not torch.equal(at_save["steps"], at_end["steps"])
    for kind in run.formats:
        with saves.engine_for(run) as engine:
            with torch.no_grad():
                for _, p in engine.named_parameters():
                    p.add_(0.5)  # for those that are loaded to show
            saves.load(engine, directory / label / kind, kind)
            saves.assert_same(f"{label}, {kind}, loaded", saves.picture(engine, run), at_save)
            saves.advance(engine, 3, 6)
            saves.assert_same(f"{label}, {kind}, resumed", saves.picture(engine, run), at_end)


@worlds(2)
def case_resumed_and_adopted_with_another_rate(directory):
    """Adam's rate is no rate for ALTO; a resumed run may have another too, if Megatron takes it."""
    run = saves.Run(("dp",), job=Job(layers=1, tied=False, scheduled=True))
    ours, adams = directory / "another rate", directory / "another rate, Adam"
    with saves.engine_for(run) as engine:
        saves.advance(engine, 0, 3)
        saves.save(engine, ours, "dp")
    with saves.engine_for(run, optimizer=saves.adam(run.job)) as engine:
        saves.advance(engine, 0, 3)
        saves.save(engine, adams, "fully")  # 0.15 cannot save torch's Adam in the other format

    def rates(engine):
        return {group["max_lr"] for group in engine.optimizer.param_groups}

    with saves.engine_for(run, lr=0.5, alto_adopt=True) as engine:
        assert rates(engine) == {0.5}
        saves.load(engine, adams, "fully")
        assert rates(engine) == {0.5}
    with saves.engine_for(run, lr=0.5) as engine:
        paired_by_rate = "max_lr" in param_group_identifier_keys
        said = contextlib.nullcontext() if paired_by_rate else pytest.warns(UserWarning, match="max_lr=0.003, not this")
        with said:
            saves.load(engine, ours, "dp")
        assert rates(engine) == {LR}  # the scheduler's override comes after
        assert not any(isinstance(group["is_decoupled_lr"], str) for group in engine.optimizer.param_groups)
