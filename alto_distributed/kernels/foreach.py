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
from .rounding import EXP_AVG_BITS, GRAD_EMA_BITS, WEIGHT_BITS, Rounding
from .shards import NONZERO, R_SQUARED, THETA_SQUARED, Batch, Coefficients, Dtypes, FlatShard, Span, batch_of, flattened

#: Elements that a block of a foreach operation on CUDA takes, and blocks in a launch.
BLOCK, BLOCKS = 65536, 320
GROUP = BLOCK * BLOCKS
#: Of directions that phase one leaves to phase two.
KEPT_BYTES = 1400 << 20
#: Devices on which addcdiv multiplies a quotient; others may divide a product, which overflows for gradients near 1e38.
#: Meta tensors are counted as CUDA's.
DIVIDES_FIRST = ("cuda", "meta")

Tensors = list[torch.Tensor]


class Part(NamedTuple):
    """Neighboring elements of one span."""

    shard: FlatShard
    span: Span

    def of(self, tensor: torch.Tensor | None) -> torch.Tensor:
        if tensor is None:
            raise ValueError("a state that is not there has no part")
        start, stop = self.span[:2]
        return tensor if start == 0 and stop == tensor.numel() else tensor[start:stop]


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
        return [part.span.stop - part.span.start for part in self.parts]

    @property
    def factor(self) -> float:
        """What is left out of the tensors of :func:`_direction`, as in :mod:`.chunked`."""
        c = self.coefficients
        if c.weight_decay == 0:
            return c.scale_and_eps()[0] if self.parts[0].shard.counter is None else 1.0
        return c.weight_decay if c.weight_decay >= SMALLEST_DIVISOR else 1.0

    def spread(self, numbers: Sequence[torch.Tensor]) -> Tensors:
        """One number of each part, for all of its elements."""
        sizes = self.sizes
        return list(torch.split(torch.cat([x.expand(n) for x, n in zip(numbers, sizes, strict=True)]), sizes))

    def scale_and_eps(self, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
        """Those of the coefficients, from numbers of steps that are on the device."""
        beta2, beta3 = self.coefficients.corrected
        k = torch.stack([part.shard.counter for part in self.parts if part.shard.counter is not None]).double()
        root = (1 - torch.pow(beta3, k)).sqrt()
        scale, eps = root / (1 - torch.pow(beta2, k)), root * self.coefficients.eps1
        return self.spread(scale.to(dtype).unbind()), self.spread(eps.to(dtype).unbind())


class ForeachKernel:
    """A :class:`.protocol.SkippingKernel`.

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
        groups = list(groups_of(batch))
        measured = [
            (NONZERO, part, grad, 1.0)
            for group in groups
            for part, grad in zip(group.parts, group.of("grad"), strict=True)
        ]
        found: list[Found] = []
        kept = 0
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
            squares_of = [(R_SQUARED, part, x, factor) for part, x in zip(group.parts, r, strict=True)]
            kept += 4 * sum(group.sizes)
            if kept <= KEPT_BYTES:
                group.direction = r
                measured += squares_of
            else:
                found += norms(squares_of, sums.dtype)
        for group in (group for group in groups if group.ratio):
            measured += [(THETA_SQUARED, p, t, 1.0) for p, t in zip(group.parts, group.of("param"), strict=True)]
        add(sums, [*found, *norms(measured, sums.dtype)])
        return groups

    def phase_two(
        self, shards: Sequence[FlatShard], step_sizes: torch.Tensor, prepared: list[Group] | None = None
    ) -> None:
        batch = batch_of(shards)
        groups = list(groups_of(flattened(batch))) if prepared is None else prepared
        rounded = _with_rounding([group for group in groups if group.parts[0].shard.rounds_weights], batch.kept)
        narrow: dict[torch.dtype, torch.Tensor] = {}
        for group in groups:
            dtype = group.parts[0].shard.exp_avg_sq.dtype
            if dtype not in narrow:
                narrow[dtype] = step_sizes.to(dtype)
            r, factor = (group.direction, group.factor) if group.direction else _direction(group)
            group.direction = None
            params = group.of("param")
            with self._undone([params]):
                theta, flat = in_full(params, dtype)
                numbers = [narrow[dtype][part.span.slot] for part in group.parts]
                if len(numbers) == 1:
                    theta[0].addcmul_(r[0], numbers[0], value=-factor)
                else:
                    torch._foreach_addcmul_(theta, r, group.spread(numbers), value=-factor)
                if flat is not None and id(group) in rounded:
                    rounding, number = rounded[id(group)]
                    rounding.store(number, params, flat, WEIGHT_BITS)
                elif flat is not None:
                    torch._foreach_copy_(params, theta)

    def _moments(self, group: Group, rounding: Rounding, number: int) -> None:
        c, dtype = group.coefficients, group.parts[0].shard.exp_avg_sq.dtype
        d = gradients(group)
        if group.parts[0].shard.grad_ema is not None:
            averages = group.of("grad_ema")
            u, flat = in_full(averages, dtype)
            g, d = d, list(torch._foreach_lerp(d, u, -c.alpha * (1 - c.beta1)))
            torch._foreach_lerp_(u, g, 1 - c.beta1)
            if flat is not None:
                rounding.store(number, averages, flat, GRAD_EMA_BITS)
        firsts = group.of("exp_avg")
        m, flat = in_full(firsts, dtype)
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


def groups_of(shards: Batch) -> Iterator[Group]:
    """The spans of all shards, in groups of at most as many blocks as a launch has."""
    open_groups: dict[Any, tuple[Group, int]] = {}
    for shard in shards:
        alike = id(shard.coefficients), Dtypes.of(shard), shard.exp_avg_sq.dtype, shard.rounds_weights
        for span in shard.spans:
            key, rest = (*alike, span.ratio), span
            while rest.start < rest.stop:
                group, blocks = open_groups.pop(key, (Group(shard.coefficients, span.ratio), 0))
                length = min((BLOCKS - blocks) * BLOCK, 2**32 - rest.offset % 2**32)
                end = min(rest.stop, rest.start + length)
                group.parts.append(Part(shard, rest.part(rest.start, end)))
                blocks += -(-(end - rest.start) // BLOCK)
                rest = rest.part(end, rest.stop)
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
        rounding = Rounding([group.parts for group in some], kept)
        found.update({id(group): (rounding, number) for number, group in enumerate(some)})
    return found


def gradients(group: Group) -> Tensors:
    """As the update takes them: in the precision of the arithmetic, unscaled, and negated to climb."""
    first = group.parts[0].shard
    g, _ = in_full(group.of("grad"), first.exp_avg_sq.dtype)
    if first.inverse_scale is None and group.coefficients.sign == 1:
        return g
    return list(torch._foreach_mul(g, first.gradient_factor))


def in_full(tensors: Tensors, dtype: torch.dtype) -> tuple[Tensors, torch.Tensor | None]:
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
    m, _ = in_full(group.of("exp_avg"), v[0].dtype)
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
    theta, _ = in_full(group.of("param"), v[0].dtype)
    if c.weight_decay < SMALLEST_DIVISOR:
        theta = list(torch._foreach_mul(theta, c.weight_decay))
    if theta[0].device.type in DIVIDES_FIRST:
        return list(torch._foreach_addcdiv(theta, m, denominator, value=scale / factor)), factor
    r = torch._foreach_div(m, denominator)
    return list(torch._foreach_add(theta, r, alpha=scale / factor)), factor


def norms(found: Sequence[Found], dtype: torch.dtype) -> list[Found]:
    """The norms of tensors in their place. They are taken in ``dtype``.

    Whether a tensor has an element that is not 0, which is asked for in row ``NONZERO``, any norm tells, unless squares
    of its elements could vanish. So all are one operation for most models.
    """
    alike: dict[tuple[torch.dtype, float], list[Found]] = {}
    for entry in found:
        tensor = entry[2]
        vanish = entry[0] == NONZERO and (tensor.dtype == dtype or dtype != torch.float64)
        alike.setdefault((tensor.dtype, torch.inf if vanish else 2), []).append(entry)
    result: list[Found] = []
    for (_, order), some in alike.items():
        taken = torch._foreach_norm([tensor for _, _, tensor, _ in some], order, dtype)
        result += [(row, part, norm, factor) for (row, part, _, factor), norm in zip(some, taken, strict=True)]
    return result


def add(sums: torch.Tensor, found: Sequence[Found]) -> None:
    """Add norms to their slots: squared, except in row ``NONZERO``.

    Norms take turns, so that each launch writes to a slot once. If the first turn has one for many of the slots, these
    are put into a table, which is added as a whole.
    """
    for factor in {factor for *_, factor in found} - {1.0}:
        torch._foreach_mul_([norm for *_, norm, other in found if other == factor], factor)
    turns: list[dict[tuple[int, int], torch.Tensor]] = []
    seen: dict[tuple[int, int], int] = {}
    for row, part, norm, _ in found:
        cell = row, part.span.slot
        nth = seen[cell] = seen.get(cell, -1) + 1
        if nth == len(turns):
            turns.append({})
        turns[nth][cell] = norm
    height, slots = 1 + max((row for row, _ in seen), default=-1), sums.shape[1]
    if turns and height * slots < 3 * len(turns[0]):
        first, nothing = turns.pop(0), torch.zeros((), dtype=sums.dtype, device=sums.device)
        cells = [first.get((row, slot), nothing) for row in range(height) for slot in range(slots)]
        table = torch.stack(cells).view(height, slots)
        table[:NONZERO].square_()
        sums[:height].add_(table)
    for turn in turns:
        further = [norm for (row, _), norm in turn.items() if row != NONZERO]
        if further:
            torch._foreach_mul_(further, further)
        torch._foreach_add_([sums[cell] for cell in turn], list(turn.values()))
