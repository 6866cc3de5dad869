"""What the tensors of each DeepSpeed wrapper are made of.

A wrapper replaces the optimizer's parameters by tensors of its own; each has its own way back to the
model's parameters, in fields that are private to DeepSpeed. So what is read is verified.

    wrapper                          the optimizer's tensor is                    made of
    none (fp32, stage 0)             the parameter itself
    FP16_UnfusedOptimizer (stage 0)  a float32 clone of each parameter            fp16_groups
    BF16_Optimizer                   a slice of each flat group                   bf16_groups, end to end
    DeepSpeedZeroOptimizer (1, 2)    a slice of each flat group                   round_robin_bit16_groups, _offsets
    DeepSpeedZeroOptimizer_Stage3    this rank's shards of a sub-group's params   fp16_groups, partition_numel()
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ..param_groups import whole_shape
from ..sharding import LogicalParameter, Segment, ShardLayout
from ..sharding.collective import everyone
from ..sharding.proof import ModelWeight, require_proved
from .nvme import bringing_in
from .versions import missing, starts_in_buffers, sub_group_process_groups

#: Wrapper -> the private fields that its layouts are read from.
_FIELDS: dict[type, str] = {
    FP16_UnfusedOptimizer: "fp16_groups, fp32_groups",
    BF16_Optimizer: "bf16_groups, fp32_groups_flat_partition, real_dp_process_group",
    DeepSpeedZeroOptimizer: (
        "round_robin_bit16_groups, round_robin_bit16_offsets, single_partition_of_fp32_groups, real_dp_process_group"
    ),
    DeepSpeedZeroOptimizer_Stage3: (
        "fp16_groups, fp32_partitioned_groups_flat, sub_group_process_groups, ds_tensor, partition_numel()"
    ),
}


class LayoutBuilder:
    """Builds the layouts of one engine, once its wrapper exists."""

    def __init__(self, engine: Any) -> None:
        self.wrapper = engine.optimizer
        self.basic = engine.basic_optimizer
        self.names: dict[torch.Tensor, str] = engine.param_names
        self.tensor_parallel_group = _tensor_parallel_group(engine.mpu)
        self.weights: dict[str, ModelWeight] = {}
        """The model's own weights by the names that the layouts have, once they are built."""

    def build(self) -> dict[torch.Tensor, ShardLayout]:
        """The layouts, verified.

        Raises:
            UnsupportedVersion: a field is not there.
            ValueError: a layout is not that of the model's weights, on any rank.
        """
        try:
            layouts = self._read()
        except AttributeError as error:
            raise missing(str(error)) from error
        fields = _FIELDS.get(type(self.wrapper), "param_groups")
        read_from = f"DeepSpeed {deepspeed.__version__}, {type(self.wrapper).__name__}: {fields}"
        require_proved(layouts, self.weights, read_from, everyone(), bringing_in(self.wrapper))
        return layouts

    def _read(self) -> dict[torch.Tensor, ShardLayout]:
        builders = {
            type(self.basic): self._unwrapped,
            FP16_UnfusedOptimizer: self._clones,
            BF16_Optimizer: self._bf16_partitions,
            DeepSpeedZeroOptimizer: self._zero_partitions,
            DeepSpeedZeroOptimizer_Stage3: self._zero3_partitions,
        }
        build = builders.get(type(self.wrapper))
        if build is None:
            raise ValueError(
                f"ALTO does not know how DeepSpeed's {type(self.wrapper).__name__} shards parameters. It works with "
                "ZeRO stages 0 to 3 and BF16_Optimizer: turn off the feature that brings this wrapper in"
            )
        return dict(build())

    def _logical(self, param: torch.Tensor, *shard_groups: Any, weight: ModelWeight | None = None) -> LogicalParameter:
        """The whole parameter: its shards lie over ``shard_groups`` and, if it is model-parallel, over TP."""
        groups = list(shard_groups)
        if self.tensor_parallel_group is not None and is_model_parallel_parameter(param):
            groups.append(self.tensor_parallel_group)
        name = self.names.get(param, f"unnamed {id(param)}")
        self.weights[name] = weight or ModelWeight(param)
        return LogicalParameter(name, whole_shape(param), tuple(groups))

    def _unwrapped(self) -> Iterator[tuple[torch.Tensor, ShardLayout]]:
        for group in self.basic.param_groups:
            for p in group["params"]:
                yield p, ShardLayout.whole(self._logical(p), p.numel())

    def _clones(self) -> Iterator[tuple[torch.Tensor, ShardLayout]]:
        for params, clones in zip(self.wrapper.fp16_groups, self.wrapper.fp32_groups, strict=True):
            for p, clone in zip(params, clones, strict=True):
                yield clone, ShardLayout.whole(self._logical(p), clone.numel())

    def _bf16_partitions(self) -> Iterator[tuple[torch.Tensor, ShardLayout]]:
        w = self.wrapper
        for params, flat, group in zip(
            w.bf16_groups, w.fp32_groups_flat_partition, w.real_dp_process_group, strict=True
        ):
            whole = [self._logical(p, group) for p in params]
            yield flat, ShardLayout.of_flat_shard(whole, dist.get_rank(group=group) * flat.numel(), flat.numel())

    def _zero_partitions(self) -> Iterator[tuple[torch.Tensor, ShardLayout]]:
        w = self.wrapper
        for params, starts, flat, group in zip(
            w.round_robin_bit16_groups,
            starts_in_buffers(w),
            w.single_partition_of_fp32_groups,
            w.real_dp_process_group,
            strict=True,
        ):
            whole = [self._logical(p, group) for p in params]
            offset = dist.get_rank(group=group) * flat.numel()
            yield flat, ShardLayout.of_flat_shard(whole, offset, flat.numel(), starts)

    def _zero3_partitions(self) -> Iterator[tuple[torch.Tensor, ShardLayout]]:
        w = self.wrapper
        for params, flat, group in zip(
            w.fp16_groups, w.fp32_partitioned_groups_flat, sub_group_process_groups(w), strict=True
        ):
            segments, start = [], 0
            for p in params:
                size = p.partition_numel()
                offset = dist.get_rank(group=group) * size
                # The last ranks' shards are padded, with memory that nobody has initialized.
                real = max(0, min(size, p.ds_numel - offset))
                logical = self._logical(p, group, weight=ModelWeight(p.ds_tensor, offset))
                segments.append(Segment(logical, start, real, offset))
                start += size
            yield flat, ShardLayout(start, segments)  # on NVMe, the tensor itself is empty


def _tensor_parallel_group(mpu: Any) -> Any:
    """The group over which model-parallel parameters are cut; never one that spans pipeline stages."""
    for getter in ("get_tensor_model_parallel_group", "get_slice_parallel_group", "get_model_parallel_group"):
        if mpu is not None and hasattr(mpu, getter):
            group = getattr(mpu, getter)()
            return group if group is not None and dist.get_world_size(group=group) > 1 else None
    return None
