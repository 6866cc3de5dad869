"""Steps whose gradients are not finite are skipped: by all ranks or by none, and nothing changes.

Before a step touches anything, one number says whether any gradient of any rank has an infinity or a NaN: the
largest magnitudes of the local gradients (padding is not looked at), reduced to one flag by one all-reduce of four
bytes over all ranks that train the model together.

Where the ranks exchange numbers on the CPU (gloo), the flag is read, and a bad step ends there. Where they do so on an
accelerator (NCCL), the host does not wait for it: the step is launched, and each of its writes depends on the flag on
the device (:mod:`.kernels.skip`). The host counts the step at once. When the next step begins, or the counts are asked
for, the flag is there, and a step that was skipped is taken back from the counters.

All ranks of a process group take the same one of these two ways, whatever tensors they hold: a rank that read the flag
and returned would leave the others waiting for it in the collective of the norms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from .grad_scaler import ScaledStep, refuse_disagreement
from .kernels.capture import refuse_cold
from .sharding.collective import HostCopy, everyone, home_of, reduce_on_group_device

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

CPU = torch.device("cpu")


class SkippedSteps:
    """Finds steps to skip, and counts them.

    Args:
        on: whether anything is looked at. Off, a step costs what it did.
    """

    def __init__(self, on: bool) -> None:
        if not isinstance(on, bool):
            raise ValueError(f"skip_nonfinite={on!r} must be True or False")
        self.on = on
        self.group: ProcessGroup | None = None
        """Of the ranks that must agree; None for all ranks of the job."""
        self._total = self._in_a_row = 0
        self._pending: tuple[HostCopy, Sequence[torch.Tensor]] | None = None
        self._scalers_disagree = False
        self._on_device: torch.Tensor | None = None
        """Of steps that are counted on the device: skipped in all, skipped in a row, and where scalers disagreed."""

    def fresh(self) -> SkippedSteps:
        """The same choice, for a copy of the optimizer."""
        return SkippedSteps(self.on)

    def flags(
        self, gradients: Iterable[torch.Tensor], scaled: ScaledStep | None, groups: Iterable[ProcessGroup]
    ) -> torch.Tensor | None:
        """[whether to skip, whether scalers disagree], each 0.0 or 1.0; None if nothing is looked at.

        Args:
            gradients: of this rank; looked at if this is on, for all ranks of the job.
            scaled: what a GradScaler found, if one is stepping.
            groups: the ranks that must agree on that.
        """
        told = scaled.flags(groups) if scaled is not None else None
        if self.on:
            found = flag_over(everyone(self.group), gradients, squared=True)
            found = torch.cat([found, torch.zeros_like(found)])
            told = found if told is None else torch.maximum(*_together(found, told))
        return told

    @staticmethod
    def is_readable(flag: torch.Tensor) -> bool:
        """Whether the host can read it without waiting for a device."""
        return flag.device.type == "cpu"

    def count(self, flag: torch.Tensor) -> bool:
        """Count the step that a flag stands for; whether it is skipped."""
        skipped, disagree = map(bool, flag.tolist())
        self._scalers_disagree |= disagree
        self._total += skipped
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        return skipped

    def count_later(self, flag: torch.Tensor, counters: Sequence[torch.Tensor]) -> None:
        """The same, without waiting: :meth:`resolve_pending` reads it. ``counters`` have counted the step already."""
        self._pending = HostCopy(flag), counters

    def count_on_device(self, flag: torch.Tensor, capturing: bool) -> None:
        """The same where the host does not count, so that a graph may replay it."""
        if self._on_device is None:
            if capturing:
                refuse_cold("no step was skipped or counted on the device yet")
            self._on_device = torch.zeros(3, dtype=torch.float32, device=flag.device)
        total, in_a_row, disagree = self._on_device.unbind()
        total.add_(flag[0])
        in_a_row.add_(1).mul_(flag[0])
        disagree.add_(flag[1])

    def settle(self) -> None:
        """Wait for all steps so far, and raise if the scalers of a captured one disagreed."""
        self.resolve_pending()
        if self._on_device is not None and self._on_device[2].item():
            refuse_disagreement()

    def resolve_pending(self) -> None:
        """Take the last step back from the counters if it was skipped. Waits for that step, not for later work."""
        if self._pending is None:
            return
        flag, counters = self._pending
        self._pending = None
        if self.count(flag.read()):
            for counter in counters:
                counter -= 1

    def raise_if_scalers_disagree(self) -> None:
        """Raise, on all ranks that agree on steps, once the flag of such a step was read."""
        if self._scalers_disagree:
            refuse_disagreement()

    @property
    def total(self) -> int:
        self.resolve_pending()
        return self._total + self._counted(0)

    @property
    def in_a_row(self) -> int:
        self.resolve_pending()
        return self._in_a_row + self._counted(1)

    def _counted(self, which: int) -> int:
        return 0 if self._on_device is None else int(self._on_device[which].item())


def _together(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both on one device, an accelerator if one of them is there."""
    return (one, other.to(one.device)) if one.device.type != "cpu" else (one.to(other.device), other)


def flag_over(group: ProcessGroup | None, gradients: Iterable[torch.Tensor], squared: bool = False) -> torch.Tensor:
    """:func:`flag_of` the gradients of all ranks of ``group``, on the device where they exchange numbers."""
    if group is None:
        return flag_of(gradients, squared=squared)
    return reduce_on_group_device(flag_of(gradients, home_of(group), squared), group, "MAX")


def flag_of(gradients: Iterable[torch.Tensor], home: torch.device = CPU, squared: bool = False) -> torch.Tensor:
    """[1.0] if any element is not finite, else [0.0], on an accelerator if one of the tensors is there.

    The largest magnitude is NaN or infinite if and only if an element is; unlike a sum it cannot overflow, and
    it needs no memory of the tensor's size.

    Args:
        gradients: what to look at.
        home: where the flag is made if there is no element at all.
        squared: whether the square must be finite too, in the precision of the states. For gradients that are used as
            they are: the adapted gradient is at most twice the largest.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    flags = []
    for (_, dtype), some in alike.items():
        largest = torch.stack(torch._foreach_norm(some, math.inf))
        flags.append((largest < (_largest_to_square(dtype) if squared else math.inf)).all().logical_not().float())
    flags.sort(key=lambda flag: flag.device.type == "cpu")
    if not flags:
        return torch.zeros(1, dtype=torch.float32, device=home)
    whole = flags[0].view(1)
    for flag in flags[1:]:
        whole = torch.maximum(whole, flag.to(whole.device))
    return whole


def _largest_to_square(dtype: torch.dtype) -> float:
    """Half the root of the largest number of a state: 9e18 for float32."""
    return math.sqrt(torch.finfo(torch.promote_types(dtype, torch.float32)).max) / 2
