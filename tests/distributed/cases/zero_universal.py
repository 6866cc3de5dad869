"""Universal checkpoints at other world sizes: 2 -> 1, 2 -> 4, 4 -> 2, and on as if nothing had happened.

test_deepspeed_checkpoints.py starts zero_checkpoints.py at worlds 2 and 4 first.
"""

import torch
import torch.distributed as dist

from tests.helpers.launcher import some, worlds

from .zero import assert_straddles
from .zero_checkpoints import (
    AFTER,
    BEFORE,
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

SAVED_BY = {1: 2, 4: 2, 2: 4}


@worlds(1, 2, 4)
def case_another_world_size_goes_on(directory):
    world = dist.get_world_size()
    gaps = {}
    for label, cell in some(UNIVERSAL_CELLS, max(world, SAVED_BY[world])).items():
        folder = place(directory, label, SAVED_BY[world])
        at_save, at_end, saved_hyper = torch.load(folder / "pictures.pt")
        with engine_for(
            cell, lambda m: three_groups(m, lr=0.7, eps=1e-3), other_network(), checkpoint={"load_universal": True}
        ) as engine:
            if world > 1:
                assert_straddles(engine)
            engine.load_checkpoint(folder, tag="universal")
            assert_same(f"{label}, loaded", picture(engine), at_save)
            assert hyperparameters(engine) == saved_hyper, label
            advance(engine, BEFORE, BEFORE + AFTER)
            got = picture(engine)
        assert torch.equal(got["steps"], at_end["steps"]), (label, got["steps"])
        masters = [key for key in at_end if key.endswith("master")]
        gap = torch.stack([(got[key] - at_end[key]).norm() / at_end[key].norm() for key in masters]).max()
        gaps[label] = gap.item()  # NaN if there is one, where Python's max might lose it
    if dist.get_rank() == 0:
        (directory / f"gaps at {world}").write_text("".join(f"{gap:.1e}  {label}\n" for label, gap in gaps.items()))
    # Where rounding is by chance, the chances follow from how a parameter lies in its shard.
    assert all(gap < (1e-3 if "small" in label else 1e-6) for label, gap in gaps.items()), gaps
