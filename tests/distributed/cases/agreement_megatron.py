"""Ranks that give Megatron different configs are told when the optimizer is built."""

import dataclasses

import pytest
import torch.distributed as dist

from tests.helpers.cases import each, worlds
from tests.helpers.megatron_gpt import Job, Layout, Megatron, alto_config, parallel

LAYOUTS = {"data parallel": Layout(), "tensor parallel": Layout(tensor=2), "pipeline": Layout(pipeline=2)}


@worlds(2)
@each(LAYOUTS)
def case_ranks_that_disagree_are_told_when_the_optimizer_is_built(setting):
    job = Job(steps=1)
    with parallel(setting):
        config = dataclasses.replace(alto_config(job), alto_alpha=-4.0 if dist.get_rank() == 1 else -5.0)
        with pytest.raises(ValueError, match=r"alpha in the config is -5.0 on rank 0 and -4.0 on rank 1"):
            Megatron(job, setting, optimizer=config)
