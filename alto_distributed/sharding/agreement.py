"""Ranks that must agree are asked once, at the start: what differs, and on which rank, before a step goes wrong.

A rank describes itself in items of text: versions, hyperparameters, names and shapes of parameters. All send a
checksum of theirs, one small collective. Only if checksums differ do the descriptions follow, and then all
ranks raise the same error. Who does not come is reported by the process group's own time-out.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .collective import device_for, gathered_sum
from .layout import LogicalParameter
from .lost_rank import lost_rank

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_DIGEST = 16  # bytes of a checksum
_SHOWN = 5  # differences that a message names


def require_agreement(
    group: ProcessGroup, common: Mapping[str, str], own: Mapping[str, str] | None = None, position: int = 0
) -> None:
    """Raise on all ranks of ``group`` if they are not of one mind. One collective if they are.

    Args:
        group: called by all of its ranks, at the same point of the program.
        common: what must be the same on all of them.
        own: what must be the same on those with the same ``position``: replicas of one part of the model.
        position: which part of the model a rank has.

    Raises:
        ValueError: names what differs, and on which ranks of the job.
    """
    import torch.distributed as dist

    own = {} if own is None else own
    if group.size() == 1:
        return
    sent = torch.tensor([*_checksum(common), *_checksum(own)], dtype=torch.uint8, device="cpu")
    sent = torch.cat([sent, torch.tensor([position], dtype=torch.int64, device="cpu").view(torch.uint8)])
    sent = sent.to(device_for(sent.device, group))
    received = [torch.empty_like(sent) for _ in range(group.size())]
    try:
        dist.all_gather(received, sent, group=group)
    except RuntimeError as error:
        if lost_rank(error) is None:
            raise
        raise RuntimeError(
            f"rank {dist.get_rank()} compared its settings with ranks {dist.get_process_group_ranks(group)}, and not "
            "all of them came: one has failed, or never took this step. See the log of each rank"
        ) from error
    heads, owns, positions = zip(*(_parts(row) for row in torch.stack(received).cpu()), strict=True)
    if len(set(heads)) == 1 and len(set(zip(positions, owns, strict=True))) == len(set(positions)):
        return
    described: list[Any] = [None] * group.size()
    dist.all_gather_object(described, (dict(common), dict(own), position), group=group)
    ranks = dist.get_process_group_ranks(group)
    found = list(_differences({rank: d[0] for rank, d in zip(ranks, described, strict=True)}))
    for place in sorted(set(positions)):
        found += _differences({rank: d[1] for rank, d in zip(ranks, described, strict=True) if d[2] == place})
    more = f" (and {len(found) - _SHOWN} more)" if len(found) > _SHOWN else ""
    raise ValueError(f"the ranks of this job do not agree: {'; '.join(found[:_SHOWN])}{more}")


def raise_together(problem: str | None, group: ProcessGroup | None) -> None:
    """Raise on all ranks of ``group`` if any of them has a problem. One collective if none has.

    Args:
        problem: of this rank, in words.
        group: called by all of its ranks; None for this rank alone.

    Raises:
        ValueError: names the first rank with a problem.
    """
    if group is None:
        if problem is not None:
            raise ValueError(problem)
        return
    import torch.distributed as dist

    count = torch.tensor([problem is not None], dtype=torch.int64, device="cpu")
    if not gathered_sum(count, group).item():
        return
    problems: list[str | None] = [None] * group.size()
    dist.all_gather_object(problems, problem, group=group)
    ranks = dist.get_process_group_ranks(group)
    raise ValueError(next(f"rank {rank}: {said}" for rank, said in zip(ranks, problems, strict=True) if said))


def require_whole(held: torch.Tensor, parameters: Sequence[LogicalParameter]) -> None:
    """Raise if the shards of a parameter do not make up whole ones.

    Args:
        held: elements of each parameter that all ranks of its groups hold together.
        parameters: in the same order. (Some engines give a tensor-parallel parameter its local shape; then the shards
            are a multiple of it.)
    """
    for count, parameter in zip(held.tolist(), parameters, strict=True):
        size = torch.Size(parameter.shape).numel()
        if size and (count == 0 or count % size):
            raise ValueError(
                f"the layouts of the ranks do not fit together: of {parameter.name!r}, which has {size} elements, they "
                f"hold {int(count)} in all. A shard is missing, or lies on two ranks of a process group"
            )


def describe_parameters(parameters: Sequence[LogicalParameter]) -> dict[str, str]:
    """What ranks that sum norms together must have in common."""
    return {
        f"parameter {place}": f"{p.name!r} of shape {tuple(p.shape)} over {[g.size() for g in p.groups]} ranks"
        f"{'' if p.may_have_ratio else ', without the ratio'}"
        for place, p in enumerate(parameters)
    }


def _checksum(items: Mapping[str, str]) -> bytes:
    text = "\0".join(itertools.chain.from_iterable(items.items()))
    return hashlib.sha256(text.encode()).digest()[:_DIGEST]


def _parts(row: torch.Tensor) -> tuple[bytes, bytes, int]:
    data = bytes(row.tolist())
    return data[:_DIGEST], data[_DIGEST : 2 * _DIGEST], int.from_bytes(data[2 * _DIGEST :], "little", signed=True)


def _differences(by_rank: Mapping[int, Mapping[str, str]]) -> list[str]:
    """'lr is 0.1 on rank 0, 2, 3 and 0.2 on rank 1', for each item that differs."""
    found = []
    for name in dict.fromkeys(itertools.chain.from_iterable(by_rank.values())):
        ranks_of: dict[str, list[int]] = {}
        for rank, items in by_rank.items():
            ranks_of.setdefault(items.get(name, "missing"), []).append(rank)
        if len(ranks_of) > 1:
            said = (f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in ranks_of.items())
            found.append(f"{name} is {' and '.join(said)}")
    return found
