"""The plans of an optimizer's steps, and what ranks settle among themselves when one is made."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from . import states
from .kernels import Dtypes, find_fault
from .kernels.capture import refuse_cold
from .kernels.choice import ACCELERATED, warn_of_fallback
from .sharding.collective import anyone_objects, replicas_object
from .sharding.layout import LogicalParameter, ShardLayout
from .sharding.plan import StepPlan


class Plans:
    """One plan for each set of tensors that an optimizer steps.

    Args:
        layouts: of sharded tensors.
        joined: parameters in whose norms this rank takes part without a segment of them.
    """

    def __init__(self, layouts: Mapping[torch.Tensor, ShardLayout], joined: Sequence[LogicalParameter]) -> None:
        self.layouts = dict(layouts)
        self.joined = tuple(joined)
        self.agreed: set[tuple[str, ...]] = set()
        """The parameters about which ranks have compared themselves."""
        self.proved = True
        """Whether "auto" may use its kernel for GPUs."""
        self.captured: list[Any] = []
        """What graphs go on using: it stays as long as the optimizer."""
        self._made: dict[tuple[tuple[int, ...], ...], StepPlan] = {}

    def __len__(self) -> int:
        return len(self._made)

    def __iter__(self) -> Iterator[StepPlan]:
        return iter(self._made.values())

    def clear(self) -> None:
        self._made.clear()

    def of(
        self,
        groups: Sequence[Mapping[str, Any]],
        others: Collection[torch.Tensor],
        description: Callable[[], Mapping[str, str]],
        state_dtypes: Mapping[str, torch.dtype | None] | None,
        capturing: bool = False,
    ) -> StepPlan:
        """The plan for the tensors that are in the groups now.

        Args:
            groups: of the optimizer.
            others: tensors that the optimizer knows besides.
            description: what must be the same on all ranks.
            state_dtypes: of states in low precision; None if the kernel is not to be proved.
            capturing: whether a graph is recorded, in which no plan can be made.
        """
        key = tuple([tuple(map(id, group["params"])) for group in groups])
        plan = self._made.get(key)
        if plan is None or not plan.fits():
            if capturing:
                refuse_cold("no step was taken with these parameters yet")
            plan = StepPlan(groups, self.layouts, self.joined)
            names = tuple(plan.norms.slots)
            # Once for the same parameters: a rank that makes a plan anew, alone, must not wait for the others.
            agree = names not in self.agreed and any(group["layerwise"] != "none" for group in groups)
            if agree:
                plan.require_agreement(description())
                self.agreed.add(names)
            if state_dtypes is not None:
                self._prove_kernel(dtypes_in_use(groups, state_dtypes), plan, agree)
            self._drop_outdated(itertools.chain.from_iterable([*(group["params"] for group in groups), others]))
            self._made[key] = plan
        return plan

    def _prove_kernel(self, in_use: Mapping[torch.device, Iterable[Dtypes]], plan: StepPlan, is_new: bool) -> None:
        """Whether "auto" may use its kernel for GPUs: all ranks that have pieces or replicas do, or none of them.

        Args:
            in_use: what the kernel would have to serve.
            plan: whose process groups connect the ranks.
            is_new: whether all ranks make this plan now.
        """
        faults = [fault for device, dtypes in in_use.items() if (fault := find_fault(device, dtypes))]
        objects = bool(faults)
        if is_new and plan.connected:
            objects = anyone_objects(objects, plan.connected, ACCELERATED)
        elif is_new and in_use:
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
