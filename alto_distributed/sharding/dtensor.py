"""DTensor parameters: FSDP2 (``fully_shard``), HSDP, tensor parallelism, on meshes of any dimension.

A DTensor knows its own layout, so nothing has to be told: its shards lie over the mesh dimensions on
which it is sharded, and are replicas over the others. Local tensors are unpadded, and may be empty.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from ..spans import PLAIN
from .layout import LogicalParameter, Segment, ShardLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(tensor: torch.Tensor) -> TypeIs[DTensor]:
    """Without importing torch.distributed.tensor: if nobody has, there is no DTensor."""
    if type(tensor) in PLAIN:  # nearly all are, and a step asks many times for every parameter
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard; a plain tensor is its own."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def like_parameter(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The gradient, cut over the ranks as the parameter is.

    A gradient that is still a partial sum, or sharded otherwise (as sequence parallelism leaves it on
    norm layers), is redistributed first.
    """
    if is_dtensor(param) != is_dtensor(grad):
        raise ValueError(
            f"the parameter is a {type(param).__name__} and its gradient a {type(grad).__name__}: "
            "assign a gradient of the parameter's own kind"
        )
    if is_dtensor(param) and is_dtensor(grad) and grad.placements != param.placements:
        return grad.redistribute(param.device_mesh, param.placements)
    return grad


def replica_groups(tensor: torch.Tensor) -> list[ProcessGroup]:
    """The process groups over which a tensor is the same on all ranks, if it is a DTensor."""
    if not is_dtensor(tensor):
        return []
    mesh = tensor.device_mesh
    dims = (dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate())
    return [group for dim in dims if (group := mesh.get_group(dim)).size() > 1]


def layout_of(param: DTensor, name: str) -> ShardLayout:
    """The layout of a DTensor's local tensor."""
    groups = []
    for mesh_dim, placement in enumerate(param.placements):
        if placement.is_partial():
            raise ValueError(f"parameter {name!r} is a partial sum on mesh dimension {mesh_dim}: redistribute it first")
        if not placement.is_replicate():
            groups.append(param.device_mesh.get_group(mesh_dim))
    logical = LogicalParameter(name, tuple(param.shape), tuple(groups))
    numel = local(param).numel()
    return ShardLayout(numel, [Segment(logical, 0, numel, _offset(param))])


def _offset(param: DTensor) -> int:
    """The place of this rank's first element in the whole, where its elements are consecutive there; else 0."""
    from torch.distributed.tensor import Shard

    begin, stop = 0, param.shape[0] if param.ndim else 1
    for mesh_dim, placement in enumerate(param.placements):
        if placement.is_replicate():
            continue
        if type(placement) is not Shard or placement.dim != 0:
            return 0
        each = -(-(stop - begin) // param.device_mesh.size(mesh_dim))
        begin = min(begin + each * param.device_mesh.get_local_rank(mesh_dim), stop)
        stop = min(begin + each, stop)
    return begin * param.shape[1:].numel()
