"""Ranks that give DeepSpeed different configs or models are told when the engine is built."""

import deepspeed
import pytest
import torch.distributed as dist

from tests.helpers.cases import each, worlds
from tests.helpers.zero import PARAMS, Net, config, network


class Renamed(Net):
    """The same shapes in the same order, under another name."""

    def __init__(self):
        super().__init__()
        self.different = self.unused
        del self.unused


@worlds(2)
@each(stage=(0, 2))
def case_ranks_that_disagree_are_told_when_the_engine_is_built(stage):
    last, zero = dist.get_rank() == 1, {"stage": stage} if stage else None
    with pytest.raises(ValueError, match=r"lr by default is 0.05 on rank 0 and 0.06 on rank 1"):
        deepspeed.initialize(model=network(), config=config(zero, params={**PARAMS, "lr": 0.06} if last else PARAMS))
    with pytest.raises(ValueError, match=r"'unused' of shape \(3, 3\) on rank 0 and 'different' of shape \(3, 3\)"):
        deepspeed.initialize(model=network(Renamed if last else Net), config=config(zero))
