"""Universal checkpoints at other world sizes: 2 -> 1, 2 -> 4, 4 -> 2, and on as if nothing had happened."""

import torch
import torch.distributed as dist

from tests.helpers.cases import after, each, worlds

from .zero import assert_straddles, weights
from .zero_checkpoints import (
    AFTER,
    BEFORE,
    ESGD,
    FEW_CELLS,
    UNIVERSAL_CELLS,
    advance,
    assert_same,
    engine_for,
    groups_of_esgd,
    hyperparameters,
    other_network,
    picture,
    place,
    states_of_esgd,
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
    # Averages of gradients differ in their last places, and a small state may then be rounded the other way.
    assert gap < (1e-3 if "small" in label else 1e-6), gap.item()  # not if it is NaN


@worlds(1)
@each({"stage 1": 1, "stage 3": 3}, exhaustive={"stage 2": 2})
@after("zero_checkpoints.case_esgd_is_converted_and_adopts", world=2)
def case_esgd_of_two_ranks_goes_on_alone(directory, label, setting):
    """States are bitwise those that were saved; after further steps, averages differ in their last places."""
    folder, universal = place(directory, f"ESGD, {label}", world=2), {"checkpoint": {"load_universal": True}}
    at_save, at_end = torch.load(folder / "pictures.pt")
    with engine_for(({"stage": setting}, {}), groups_of_esgd, other_network(), **ESGD, **universal) as engine:
        engine.load_checkpoint(folder, tag="universal")
        assert_same("loaded", states_of_esgd(engine), at_save)
        advance(engine, BEFORE, BEFORE + AFTER)
        for name, value in weights(engine).items():
            torch.testing.assert_close(value, at_end[name], rtol=1e-5, atol=1e-6)
