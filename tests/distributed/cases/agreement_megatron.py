"""Ranks that give Megatron different configs are told when the optimizer is built."""

import dataclasses

import pytest
import torch.distributed as dist

from tests.helpers.cases import worlds
from tests.helpers.megatron_gpt import Job, Layout, Megatron, alto_config, parallel


@worlds(2)
def case_ranks_that_disagree_are_told_when_the_optimizer_is_built():
    last = dist.get_rank() == 1
    for layout in (Layout(), Layout(tensor=2), Layout(pipeline=2)):
        job = Job(steps=1)
        with parallel(layout):
            config = dataclasses.replace(alto_config(job), alto_alpha=-4.0 if last else -5.0)
            with pytest.raises(ValueError, match=r"alpha in the config is -5.0 on rank 0 and -4.0 on rank 1"):
                Megatron(job, layout, optimizer=config)
