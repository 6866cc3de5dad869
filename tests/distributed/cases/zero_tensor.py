"""DeepSpeed's tensor parallelism (AutoTP): the ratio of a matrix cut over TP ranks and over ZeRO shards."""

import deepspeed
import torch.distributed as dist

import alto_distributed.deepspeed  # noqa: F401
from alto_distributed.deepspeed import layout
from tests.helpers.cases import each, worlds
from tests.helpers.zero import batches, config, largest_gap, loss_of, reference, running, trainable
from tests.helpers.zero_parallel import TENSOR_PARALLEL, TensorParallelNet, tensor_parallel_network, whole_weights


def train(engine):
    """Ranks of one TP group see the same rows."""
    share = dist.get_world_size() // 2
    rank = dist.get_rank() // 2
    for step in batches():
        for x, y in step:
            engine.backward(loss_of(engine(x.chunk(share)[rank]), y.chunk(share)[rank]))
            engine.step()


def gap_of(stage):
    ds_config = config({"stage": stage} if stage else None, tensor_parallel=TENSOR_PARALLEL)
    ds_config["train_micro_batch_size_per_gpu"] = 8 // (dist.get_world_size() // 2)
    with running(tensor_parallel_network(), ds_config) as engine:
        cut = [n for n, p in trainable(engine.module).items() if deepspeed.runtime.utils.is_model_parallel_parameter(p)]
        assert {"up.weight", "down.weight"} <= set(cut), cut
        train(engine)
        return largest_gap(whole_weights(engine), reference(make=TensorParallelNet))


@worlds(2)
@each({"stage 0": 0}, exhaustive={"stage 1": 1, "stage 2": 2, "stage 3": 3})
def case_tensor_parallel(setting):
    gap = gap_of(setting)
    assert gap < 1e-6, gap


@worlds(4)
@each(stage=(0, 1, 2, 3))
def case_tensor_and_data_parallel(stage):
    """What tensor parallelism has cut, ZeRO cuts once more."""
    gap = gap_of(stage)
    assert gap < 1e-6, gap


@worlds(2, 4)
def case_without_the_tensor_parallel_sum_the_comparison_fails():
    known = layout._tensor_parallel_group
    layout._tensor_parallel_group = lambda mpu: None
    try:
        gap = gap_of(2)
    finally:
        layout._tensor_parallel_group = known
    assert gap > 1e-4, gap
