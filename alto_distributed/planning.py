"""The plans of an optimizer's steps, and what ranks settle among themselves when one is made."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import states
from .kernels import Dtypes, find_fault
from .kernels.choice import ACCELERATED, warn_of_fallback
from .sharding.collective import accelerator_type, anyone_objects, replicas_object
from .sharding.layout import LogicalParameter, ShardLayout
from .sharding.plan import StepPlan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Plans:
    """One plan for each set of tensors that an optimizer steps.

    Args:
        layouts: of sharded tensors.
        joined: parameters in whose norms this rank takes part without a segment of them.
        replicas: process groups of the ranks that have the same parameters; None if nobody knows all of them.
    """

    def __init__(
        self,
        layouts: Mapping[torch.Tensor, ShardLayout],
        joined: Sequence[LogicalParameter],
        replicas: Sequence[ProcessGroup] | None = None,
    ) -> None:
        self.layouts = dict(layouts)
        self.joined = tuple(joined)
        self.replicas = replicas
        self.agreed: set[tuple[str, ...]] = set()
        """The parameters about which ranks have compared themselves."""
        self.proved_for: set[tuple[str, ...]] = set()
        """The parameters about which ranks have told each other whether "auto" may use its kernel for GPUs."""
        self.proved = True
        """Whether "auto" may use its kernel for GPUs."""
        self._made: dict[tuple[tuple[int, ...], ...], StepPlan] = {}

    def __len__(self) -> int:
        return len(self._made)

    def __iter__(self) -> Iterator[StepPlan]:
        return iter(self._made.values())

    def clear(self) -> None:
        self._made.clear()

    def known(self, groups: Sequence[Mapping[str, Any]]) -> StepPlan | None:
        """The plan for the tensors that are in the groups now, if there is one."""
        plan = self._made.get(_key(groups))
        return plan if plan is not None and plan.fits() else None

    def new(
        self,
        groups: Sequence[Mapping[str, Any]],
        others: Collection[torch.Tensor],
        description: Callable[[], Mapping[str, str]],
        state_dtypes: Mapping[str, torch.dtype | None] | None,
    ) -> StepPlan:
        """A plan for the tensors that are in the groups now, on which ranks agree.

        Args:
            groups: of the optimizer.
            others: tensors that the optimizer knows besides.
            description: what must be the same on all ranks.
            state_dtypes: of states in low precision; None if the kernel is not to be proved.
        """
        plan = StepPlan(groups, self.layouts, self.joined)
        names = tuple(plan.norms.slots)
        # Once for the same parameters: a rank that makes a plan anew, alone, must not wait for the others.
        agree = names not in self.agreed and any(group["layerwise"] != "none" for group in groups)
        if agree:
            plan.require_agreement(description())
            self.agreed.add(names)
        if state_dtypes is not None:
            self._prove_kernel(dtypes_in_use(groups, state_dtypes), plan, agree)
            self.proved_for.add(names)
        self._drop_outdated(itertools.chain.from_iterable([*(group["params"] for group in groups), others]))
        self._made[_key(groups)] = plan
        return plan

    def _prove_kernel(self, in_use: Mapping[torch.device, Iterable[Dtypes]], plan: StepPlan, together: bool) -> None:
        """Whether "auto" may use its kernel for GPUs: all ranks that have shards or replicas do, or none of them.

        Where machines have a device of such a kernel, ranks ask each other once for the same parameters: over the
        process groups that are known, and through the job's store if there may be other replicas. That cannot hang.

        Args:
            in_use: what the kernel would have to serve.
            plan: whose process groups connect the ranks.
            together: whether all ranks of these groups are here now.
        """
        faults = [fault for device, dtypes in in_use.items() if (fault := find_fault(device, dtypes))]
        objects = bool(faults)
        if accelerator_type() in ACCELERATED and tuple(plan.norms.slots) not in self.proved_for:
            connected = plan.connected if together else []
            objects = anyone_objects(objects, [*connected, *(self.replicas or ())])
            unknown = self.replicas is None and not (together and plan.connects_all)
            if unknown and (in_use or not plan.tensors):
                objects = replicas_object(objects)
        if objects and self.proved:
            self.proved = False
            warn_of_fallback(faults[0] if faults else "it failed on another rank, whose warning says why")

    def _drop_outdated(self, tensors: Iterable[torch.Tensor]) -> None:
        """A plan keeps its tensors alive, so it goes when nothing else of the optimizer does.

        It cannot watch them by weak references: with one on it, torch refuses to swap a parameter, as ``module.to()``
        does with DTensors.
        """
        known = {id(tensor) for tensor in itertools.chain(tensors, self.layouts)}
        for key, plan in list(self._made.items()):
            if any(id(tensor) not in known for tensor in plan.tensors):
                del self._made[key]


def _key(groups: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, ...], ...]:
    return tuple([tuple(map(id, group["params"])) for group in groups])


def dtypes_in_use(
    groups: Sequence[Mapping[str, Any]], state_dtypes: Mapping[str, torch.dtype | None]
) -> dict[torch.device, set[Dtypes]]:
    """What the kernel for GPUs would have to serve, by device."""
    in_use: dict[torch.device, set[Dtypes]] = {}
    for group in groups:
        for param in group["params"]:
            if param.device.type in ACCELERATED:
                m, u = (states.state_dtype(param, state_dtypes.get(key)) for key in (states.EXP_AVG, states.GRAD_EMA))
                grad = param.dtype if param.grad is None else param.grad.dtype
                dtypes = Dtypes(param.dtype, grad, m, u if group["alpha"] != 0 else None)
                in_use.setdefault(param.device, set()).add(dtypes)
    return in_use
