"""Universal checkpoints at other world sizes: 2 -> 1, 2 -> 4, 4 -> 2, and on as if nothing had happened."""

import torch

from tests.helpers.cases import after, each, worlds
from tests.helpers.zero import weights
from tests.helpers.zero_checkpoints import (
    AFTER,
    BEFORE,
    ESGD,
    FEW_CELLS,
    UNIVERSAL_CELLS,
    advance,
    assert_same,
    engine_for,
    goes_on,
    groups_of_esgd,
    other_network,
    place,
    states_of_esgd,
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
