"""The same update in torch's foreach operations, for accelerators: few launches, whatever the number of tensors.

Spans are taken in groups, as many elements as one launch of a foreach operation covers. The extra memory is bounded: a
group's temporaries (:data:`GROUP` elements each), and the directions r, which phase two needs again, of as many groups
as fit into :data:`KEPT_BYTES`. Those of further groups are computed twice. Together that is less than 2 GiB, and less
than 3 GiB where a flag on the device may undo the step; it is 4 bytes a parameter and four groups for small models.

The operations on states are those of :mod:`.chunked`, so the states of the two agree to the bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .chunked import SMALLEST_DIVISOR
from .rounding import EXP_AVG_BITS, GRAD_EMA_BITS, Rounding
from .shards import NONZERO, R_SQUARED, THETA_SQUARED, Batch, Coefficients, Dtypes, FlatShard, batch_of, flattened

#: Elements that a block of a foreach operation on CUDA takes, and blocks in a launch.
BLOCK, BLOCKS = 65536, 320
GROUP = BLOCK * BLOCKS
#: Of directions that phase one leaves to phase two.
KEPT_BYTES = 3 << 29

Tensors = list[torch.Tensor]


class Part(NamedTuple):
    """Neighboring elements of one span."""

    shard: FlatShard
    start: int
    stop: int
    slot: int

    def of(self, tensor: torch.Tensor | None) -> torch.Tensor:
        if tensor is None:
            raise ValueError("a state that is not there has no part")
        whole = self.start == 0 and self.stop == tensor.numel()
        return tensor if whole else tensor[self.start : self.stop]


#: Row of the table of sums, whose part, the tensor or number that was found, and its factor.
Found = tuple[int, Part, torch.Tensor, float]


@dataclass
class Group:
    """Parts alike in their numbers and dtypes."""

    coefficients: Coefficients
    ratio: bool
    parts: list[Part] = field(default_factory=list)
    direction: Tensors | None = None
    """r over a factor, if phase one has kept it."""

    def of(self, name: str) -> Tensors:
        return [part.of(getattr(part.shard, name)) for part in self.parts]

    @property
    def sizes(self) -> list[int]:
        return [part.stop - part.start for part in self.parts]

    @property
    def factor(self) -> float:
        """What is left out of the tensors of :func:`_direction`, as in :mod:`.chunked`."""
        c = self.coefficients
        if c.weight_decay == 0:
            return c.scale_and_eps()[0] if self.parts[0].shard.counter is None else 1.0
        return c.weight_decay if c.weight_decay >= SMALLEST_DIVISOR else 1.0

    def spread(self, numbers: torch.Tensor) -> Tensors:
        """One number of each part, for all of its elements."""
        sizes = self.sizes
        return list(torch.split(torch.cat([x.expand(n) for x, n in zip(numbers.unbind(), sizes, strict=True)]), sizes))

    def scale_and_eps(self, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
        """Those of the coefficients, from numbers of steps that are on the device."""
        beta2, beta3 = self.coefficients.corrected
        k = torch.stack([part.shard.counter for part in self.parts if part.shard.counter is not None]).double()
        root = (1 - torch.pow(beta3, k)).sqrt()
        scale, eps = root / (1 - torch.pow(beta2, k)), root * self.coefficients.eps1
        return self.spread(scale.to(dtype)), self.spread(eps.to(dtype))


class ForeachKernel:
    """A kernel in the sense of :mod:`.protocol`.

    Args:
        skip: on the device of the shards: every write is undone if it is not 0.
    """

    def __init__(self, skip: torch.Tensor | None = None) -> None:
        self._skip = None if skip is None else skip.reshape(()) != 0

    def unless(self, skip: torch.Tensor) -> ForeachKernel:
        """This kernel, but nothing changes if ``skip`` is not 0."""
        return ForeachKernel(skip)

    def phase_one(self, shards: Sequence[FlatShard], sums: torch.Tensor) -> list[Group]:
        batch = flattened(batch_of(shards))
        groups = list(_groups(batch))
        squares: list[Found] = []
        kept = 0
        for some in _alike(groups, "grad"):
            largest = torch._foreach_norm([g for group in some for g in group.of("grad")], torch.inf, sums.dtype)
            parts = (part for group in some for part in group.parts)
            squares += [(NONZERO, part, norm, 1.0) for part, norm in zip(parts, largest, strict=True)]
        measured: list[Found] = []
        rounded = _with_rounding(groups, batch.kept)
        for group in groups:
            targets = [group.of(name) for name in ("exp_avg", "exp_avg_sq")]
            if group.parts[0].shard.grad_ema is not None:
                targets.append(group.of("grad_ema"))
            with self._undone(targets):
                self._moments(group, *rounded[id(group)])
            if not group.ratio:
                continue
            r, factor = _direction(group)
            squares_of = [(R_SQUARED, part, x, factor * factor) for part, x in zip(group.parts, r, strict=True)]
            kept += 4 * sum(group.sizes)
            if kept <= KEPT_BYTES:
                group.direction = r
                measured += squares_of
            else:
                squares += _squared(squares_of, sums.dtype)
        for group in (group for group in groups if group.ratio):
            measured += [(THETA_SQUARED, p, t, 1.0) for p, t in zip(group.parts, group.of("param"), strict=True)]
        _add(sums, [*squares, *_squared(measured, sums.dtype)])
        return groups

    def phase_two(
        self, shards: Sequence[FlatShard], step_sizes: torch.Tensor, prepared: list[Group] | None = None
    ) -> None:
        groups = list(_groups(flattened(batch_of(shards)))) if prepared is None else prepared
        narrow: dict[torch.dtype, torch.Tensor] = {}
        for group in groups:
            dtype = group.parts[0].shard.exp_avg_sq.dtype
            if dtype not in narrow:
                narrow[dtype] = step_sizes.to(dtype)
            r, factor = (group.direction, group.factor) if group.direction else _direction(group)
            group.direction = None
            sizes = group.sizes
            steps = torch.cat([narrow[dtype][p.slot].expand(n) for p, n in zip(group.parts, sizes, strict=True)])
            params = group.of("param")
            with self._undone([params]):
                theta, _ = _in_full(params, dtype)
                torch._foreach_addcmul_(theta, r, list(torch.split(steps, sizes)), value=-factor)
                if theta is not params:
                    torch._foreach_copy_(params, theta)

    def _moments(self, group: Group, rounding: Rounding, number: int) -> None:
        c, dtype = group.coefficients, group.parts[0].shard.exp_avg_sq.dtype
        d, _ = _in_full(group.of("grad"), dtype)
        first = group.parts[0].shard
        if first.inverse_scale is not None or c.sign != 1:
            d = list(torch._foreach_mul(d, first.gradient_factor))
        if group.parts[0].shard.grad_ema is not None:
            averages = group.of("grad_ema")
            u, flat = _in_full(averages, dtype)
            g, d = d, list(torch._foreach_lerp(d, u, -c.alpha * (1 - c.beta1)))
            torch._foreach_lerp_(u, g, 1 - c.beta1)
            if flat is not None:
                rounding.store(number, averages, flat, GRAD_EMA_BITS)
        firsts = group.of("exp_avg")
        m, flat = _in_full(firsts, dtype)
        torch._foreach_lerp_(m, d, 1 - c.beta2)
        v = group.of("exp_avg_sq")
        torch._foreach_mul_(v, c.beta3)
        torch._foreach_addcmul_(v, d, d, 1 - c.beta3)
        if flat is not None:
            rounding.store(number, firsts, flat, EXP_AVG_BITS)

    @contextlib.contextmanager
    def _undone(self, lists: Sequence[Tensors]) -> Iterator[None]:
        """What is written to the tensors is undone on the device if the flag is set."""
        if self._skip is None:
            yield
            return
        before = [torch.cat(tensors) for tensors in lists]
        yield
        for tensors, old in zip(lists, before, strict=True):
            torch.where(self._skip, old, torch.cat(tensors), out=old)
            torch._foreach_copy_(tensors, list(torch.split(old, [len(t) for t in tensors])))


kernel = ForeachKernel()


def _groups(shards: Batch) -> Iterator[Group]:
    """The spans of all shards, in groups of at most as many blocks as a launch has."""
    open_groups: dict[Any, tuple[Group, int]] = {}
    for shard in shards:
        alike = id(shard.coefficients), Dtypes.of(shard), shard.exp_avg_sq.dtype
        for start, stop, slot, ratio in shard.spans:
            key = (*alike, ratio)
            while start < stop:
                group, blocks = open_groups.pop(key, (Group(shard.coefficients, ratio), 0))
                end = min(stop, start + (BLOCKS - blocks) * BLOCK, (start // 2**32 + 1) * 2**32)
                group.parts.append(Part(shard, start, end, slot))
                blocks += -(-(end - start) // BLOCK)
                start = end
                if blocks < BLOCKS:
                    open_groups[key] = group, blocks
                else:
                    yield group
    for group, _ in open_groups.values():
        yield group


def _with_rounding(groups: Sequence[Group], kept: dict[Any, Any]) -> dict[int, tuple[Rounding, int]]:
    """By id of a group: what rounds its states, shared by those at the same step, and its number there."""
    found: dict[int, tuple[Rounding, int]] = {}
    by_numbers: dict[int, list[Group]] = {}
    for group in groups:
        by_numbers.setdefault(id(group.coefficients), []).append(group)
    for some in by_numbers.values():
        rounding = Rounding([[(p.shard, p.start, p.stop) for p in group.parts] for group in some], kept)
        found.update({id(group): (rounding, number) for number, group in enumerate(some)})
    return found


def _alike(groups: Sequence[Group], name: str) -> list[list[Group]]:
    """Those whose tensors of a name are of one dtype, as a foreach operation wants them."""
    found: dict[torch.dtype, list[Group]] = {}
    for group in groups:
        found.setdefault(getattr(group.parts[0].shard, name).dtype, []).append(group)
    return list(found.values())


def _in_full(tensors: Tensors, dtype: torch.dtype) -> tuple[Tensors, torch.Tensor | None]:
    """The tensors themselves, or in the precision of the arithmetic, with the one tensor that they are parts of."""
    if tensors[0].dtype == dtype:
        return tensors, None
    sizes = [len(t) for t in tensors]
    flat = torch.empty(sum(sizes), dtype=dtype, device=tensors[0].device)
    full = list(torch.split(flat, sizes))
    torch._foreach_copy_(full, tensors)
    return full, flat


def _direction(group: Group) -> tuple[Tensors, float]:
    """(x, f) with f x = r = lambda theta + m^ / (sqrt(v^) + eps1)."""
    c, factor = group.coefficients, group.factor
    v = group.of("exp_avg_sq")
    m, _ = _in_full(group.of("exp_avg"), v[0].dtype)
    denominator = list(torch._foreach_sqrt(v))
    if group.parts[0].shard.counter is None:
        scale, eps = c.scale_and_eps()
        if eps:
            torch._foreach_add_(denominator, eps)
    else:
        scale = 1.0
        scales, epsilons = group.scale_and_eps(v[0].dtype)
        if c.eps1:
            torch._foreach_add_(denominator, epsilons)
        torch._foreach_div_(denominator, scales)
    if not c.eps1:  # 0/0 where there has been no gradient yet
        torch._foreach_clamp_min_(denominator, torch.finfo(v[0].dtype).tiny)
    if c.weight_decay == 0:
        return list(torch._foreach_div(m, denominator)), factor
    theta, _ = _in_full(group.of("param"), v[0].dtype)
    if c.weight_decay < SMALLEST_DIVISOR:
        theta = list(torch._foreach_mul(theta, c.weight_decay))
    return list(torch._foreach_addcdiv(theta, m, denominator, value=scale / factor)), factor


def _squared(found: Sequence[Found], dtype: torch.dtype) -> list[Found]:
    """The squared norms of tensors in their place."""
    by_dtype: dict[torch.dtype, list[Found]] = {}
    for entry in found:
        by_dtype.setdefault(entry[2].dtype, []).append(entry)
    result: list[Found] = []
    for some in by_dtype.values():
        norms = list(torch._foreach_norm([tensor for _, _, tensor, _ in some], 2, dtype))
        torch._foreach_mul_(norms, norms)
        result += [(row, part, norm, factor) for (row, part, _, factor), norm in zip(some, norms, strict=True)]
    return result


def _add(sums: torch.Tensor, found: Sequence[Found]) -> None:
    """Add numbers to their slots. A slot that has several takes them in turns: each launch writes to it once."""
    turns: dict[tuple[float, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    seen: dict[tuple[int, int], int] = {}
    rows = [row.unbind() for row in sums.unbind()]
    for row, part, number, factor in found:
        turn = seen[row, part.slot] = seen.get((row, part.slot), 0) + 1
        turns.setdefault((factor, turn), []).append((rows[row][part.slot], number))
    for (factor, _), some in sorted(turns.items(), key=lambda item: item[0][1]):
        torch._foreach_add_([slot for slot, _ in some], [number for _, number in some], alpha=factor)
