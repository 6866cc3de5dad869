"""What the tensors of each Megatron wrapper are made of.

    wrapper                             the optimizer's tensor is                 its whole parameter lies over
    FP32Optimizer                       the parameter itself                      TP
    Float16OptimizerWithFloat16Params   a float32 clone, or the parameter         TP
    DistributedOptimizer                a flat float32 piece (a clone or a view)  the wrapper's data-parallel group, TP

Experts that share a parameter (:mod:`.experts`) have a segment each.

TP only for parameters that say ``tensor_model_parallel``, and for experts of which :mod:`.experts` knows it. Experts
have a tensor-parallel group of their own. The wrapper's data-parallel group covers context parallelism, is confined to
one optimizer instance, and for experts is theirs: all as the buffers were cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import __version__ as megatron_version
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from ..sharding import LogicalParameter, Segment, ShardLayout
from ..sharding.collective import everyone
from ..sharding.proof import ModelWeight, require_proved
from .experts import cut_experts, packed_experts
from .versions import missing

_FIELDS = (
    "buffers, param_index_map, model_fp32_groups, shard_fp32_groups, model_float16_groups, "
    "shard_fp32_from_float16_groups, fp32_from_fp32_groups, float16_groups, fp32_from_float16_groups, "
    "_get_model_param_range_map()"
)


class LayoutBuilder:
    """Builds the layouts of every wrapper of one model.

    Args:
        model_chunks: the model's chunks on this rank; names of parameters come from them, and are the same
            on all ranks of a data-parallel or tensor-parallel group, which share a pipeline stage.
        process_groups: the ``ProcessGroupCollection`` that was given to Megatron, if any.
        without_ratio: parameters that go without the layer-wise ratio whatever their groups say.
        quantized: weights of parameters in fp8, from before they were quantized.
    """

    def __init__(
        self,
        model_chunks: Sequence[torch.nn.Module],
        process_groups: Any = None,
        without_ratio: Iterable[torch.Tensor] = (),
        quantized: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self._quantized = quantized or {}
        self._without_ratio = {id(param) for param in without_ratio}
        self.names: dict[torch.Tensor, str] = {
            param: f"{i}.{name}" for i, chunk in enumerate(model_chunks) for name, param in chunk.named_parameters()
        }
        self._experts, self._cut_experts = packed_experts(model_chunks), cut_experts(model_chunks)
        # A collection may be of some ranks of the job only, and nobody says which.
        self._checked_with = everyone() if process_groups is None else None
        self.tensor_parallel = _group(process_groups, "tp", parallel_state.get_tensor_model_parallel_group)
        self.expert_tensor_parallel = _group(process_groups, "expt_tp", parallel_state.get_expert_tensor_parallel_group)
        self.replicas = None if process_groups is not None else [_pipeline_stage()]
        """Of all ranks that have the same parameters, or pieces of them; None if they are not known."""

    def build(self, wrapper: Any) -> tuple[dict[torch.Tensor, ShardLayout], list[LogicalParameter]]:
        """Layouts of a wrapper's tensors, verified, and the parameters it joins in without holding a piece.

        Raises:
            UnsupportedVersion: a field is not there.
            ValueError: a layout is not that of the model's weights, on any rank of the job.
        """
        try:
            layouts, joined = self._read(wrapper)
        except AttributeError as error:
            raise missing(str(error)) from error
        weights = {
            logical.name: ModelWeight(piece)
            for param, _ in main_parameters(wrapper)
            for logical, piece in zip(self._logicals(param), self._pieces(param), strict=True)
        }
        read_from = f"megatron-core {megatron_version}, {type(wrapper).__name__}: {_FIELDS}"
        require_proved(layouts, weights, read_from, self._checked_with)
        return layouts, joined

    def _read(self, wrapper: Any) -> tuple[dict[torch.Tensor, ShardLayout], list[LogicalParameter]]:
        if not isinstance(wrapper, DistributedOptimizer):
            whole = {tensor: self._logicals(param) for param, tensor in main_parameters(wrapper)}
            return {tensor: _layout(logicals, 0, tensor.numel()) for tensor, logicals in whole.items()}, []

        # Every rank sums every parameter of the buffers, in pieces that may be empty.
        every = {
            param: self._logicals(param, wrapper.data_parallel_group)
            for buffer in wrapper.buffers
            for param in buffer.param_index_map
        }
        layouts = {}
        for param, shard in main_parameters(wrapper):
            held = wrapper._get_model_param_range_map(param)["param"]
            if shard.numel() != held.end - held.start:
                raise ValueError(
                    f"{self.names[param]}: Megatron says that this rank holds elements {held.start} to {held.end}, and "
                    f"its optimizer has {shard.numel()} of them; the distributed optimizer is not as we know it"
                )
            layouts[shard] = _layout(every[param], held.start, param.numel(), shard.numel())
        return layouts, [logical for logicals in every.values() for logical in logicals]

    def _pieces(self, param: torch.Tensor) -> Sequence[torch.Tensor]:
        """The elements of each logical parameter in one of the model."""
        packed = self._experts.get(param)
        weights = self._quantized.get(param, param)
        return [weights] if packed is None else list(weights.detach().reshape(packed.count, -1))

    def _logicals(self, param: torch.Tensor, *shard_groups: Any) -> list[LogicalParameter]:
        """What one parameter of the model holds, end to end: itself, or several experts."""
        is_expert = not getattr(param, "allreduce", True)
        tensor_parallel = self.expert_tensor_parallel if is_expert else self.tensor_parallel
        packed = self._experts.get(param)
        shape, groups = list(param.shape if packed is None else packed.shape(param.shape)), list(shard_groups)
        cut = getattr(param, "tensor_model_parallel", False) or param in self._cut_experts
        if cut and tensor_parallel is not None:
            groups.append(tensor_parallel)
            if shape:
                dim = max(getattr(param, "partition_dim", 0), 0)
                shape[min(dim, len(shape) - 1)] *= tensor_parallel.size()  # packed experts have a dimension less
        name, about = self.names[param], (tuple(shape), tuple(groups), id(param) not in self._without_ratio)
        if packed is None:
            return [LogicalParameter(name, *about)]
        first = packed.count * parallel_state.get_expert_model_parallel_rank()
        return [LogicalParameter(f"{name}, expert {first + i}", *about) for i in range(packed.count)]


def _layout(logicals: Sequence[LogicalParameter], start: int, whole: int, numel: int | None = None) -> ShardLayout:
    """The layout of elements [start, start + numel) of a parameter that holds equal parts of some logical ones.

    Args:
        logicals: what it holds, end to end.
        start: the first element of the local tensor.
        whole: elements of the parameter.
        numel: elements of the local tensor; None for all.
    """
    end, each = start + (whole if numel is None else numel), whole // len(logicals)
    segments = []
    for i, logical in enumerate(logicals):
        low, high = max(start, i * each), min(end, (i + 1) * each)
        if low < high:
            segments.append(Segment(logical, low - start, high - low, low - i * each))
    return ShardLayout(end - start, segments)


def main_parameters(wrapper: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(the model's parameter, the tensor that the optimizer steps in its place)."""
    pairs: tuple[tuple[Any, Any], ...]
    if isinstance(wrapper, DistributedOptimizer):
        pairs = (
            (wrapper.model_fp32_groups, wrapper.shard_fp32_groups),
            (wrapper.model_float16_groups, wrapper.shard_fp32_from_float16_groups),
        )
    elif isinstance(wrapper, Float16OptimizerWithFloat16Params):
        pairs = (
            (wrapper.fp32_from_fp32_groups, wrapper.fp32_from_fp32_groups),
            (wrapper.float16_groups, wrapper.fp32_from_float16_groups),
        )
    else:
        own = [group["params"] for group in wrapper.optimizer.param_groups]
        pairs = ((own, own),)
    for of_model, of_optimizer in pairs:
        for model_params, tensors in zip(of_model, of_optimizer, strict=True):
            yield from zip(model_params, tensors, strict=True)


def _pipeline_stage() -> Any:
    return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)


def _group(process_groups: Any, name: str, usual: Any) -> Any:
    if process_groups is not None and hasattr(process_groups, name):
        return getattr(process_groups, name)
    return usual(check_initialized=False)
