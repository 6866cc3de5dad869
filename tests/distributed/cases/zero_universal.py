"""Universal checkpoints at other world sizes: 2 -> 1, 2 -> 4, 4 -> 2, and on as if nothing had happened."""

import torch
import torch.distributed as dist

from tests.helpers.cases import after, each, worlds

from .zero import assert_straddles
from .zero_checkpoints import (
    AFTER,
    BEFORE,
    FEW_CELLS,
    UNIVERSAL_CELLS,
    advance,
    assert_same,
    engine_for,
    hyperparameters,
    other_network,
    picture,
    place,
    three_groups,
)


@worlds(1)
@each(UNIVERSAL_CELLS)
@after("zero_checkpoints.case_conversion_carries_every_state", world=2)
def case_what_two_ranks_saved_goes_on_alone(directory, label):
    goes_on(directory, label, 2)


@worlds(4)
@each(FEW_CELLS, exhaustive=UNIVERSAL_CELLS)
@after("zero_checkpoints.case_conversion_carries_every_state", world=2)
def case_what_two_ranks_saved_goes_on_on_four(directory, label):
    goes_on(directory, label, 2)


@worlds(2)
@each(FEW_CELLS, exhaustive=UNIVERSAL_CELLS)
@after("zero_checkpoints.case_conversion_on_four_ranks", world=4)
def case_what_four_ranks_saved_goes_on(directory, label):
    goes_on(directory, label, 4)


def goes_on(directory, label, saved_by):
    folder = place(directory, label, saved_by)
    at_save, at_end, saved_hyper = torch.load(folder / "pictures.pt")
    with engine_for(
        UNIVERSAL_CELLS[label],
        lambda m: three_groups(m, lr=0.7, eps=1e-3),
        other_network(),
        checkpoint={"load_universal": True},
    ) as engine:
        if dist.get_world_size() > 1:
            assert_straddles(engine)
        engine.load_checkpoint(folder, tag="universal")
        assert_same("loaded", picture(engine), at_save)
        assert hyperparameters(engine) == saved_hyper
        advance(engine, BEFORE, BEFORE + AFTER)
        got = picture(engine)
    assert torch.equal(got["steps"], at_end["steps"]), got["steps"]
    masters = [key for key in at_end if key.endswith("master")]
    gap = torch.stack([(got[key] - at_end[key]).norm() / at_end[key].norm() for key in masters]).max()
    # Where rounding is by chance, the chances follow from how a parameter lies in its shard.
    assert gap < (1e-3 if "small" in label else 1e-6), gap.item()  # not if it is NaN
