"""What ALTO does before the arithmetic of a step: it collects and checks what there is to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import states, trust_ratio
from .base import ALTOBase
from .grad_scaler import ScaledStep
from .hyperparameters import Hyperparameters
from .kernels import Coefficients, FlatShard, kernel_for
from .kernels.memory import Known, Memory, memory_of
from .sharding.plan import PlannedTensor, StepPlan
from .step_inputs import (
    Ready,
    StepInputs,
    check_memory,
    check_states,
    checked_gradient,
    count_one_more,
    in_one_order,
    refuse_fsdp1,
)


class Collecting(ALTOBase):
    """ALTO with the collecting of a step's tensors."""

    def _ready(self, plan: StepPlan) -> list[Ready]:
        """What has a gradient. All of it is checked here."""
        ready: list[Ready] = []
        known, found = plan.known, self.state
        first, second, third = self.state_keys
        is_host = not self._capturable
        nothing: dict[str, Any] = {}
        for group, planned_tensors in zip(self.param_groups, plan.groups, strict=True):
            # Whether a parameter without grad_ema may stay so, and one with it need not be noted in the group.
            needs_ema, has_noted = group["alpha"] != 0, states.GRAD_EMA_BETA1 in group
            for planned, param in zip(planned_tensors, group["params"], strict=True):
                grad = param.grad
                if grad is None:
                    continue
                state = found.get(param, nothing)
                before: Known | None = known.get(planned.place)
                memory = None
                if before is not None:
                    u, count = state.get(third), state.get(states.STEP)
                    if (
                        (not needs_ema if u is None else has_noted)
                        and count is not None
                        and (count.is_cpu if is_host else count.device == before.memory.device)
                    ):
                        memory = before.again(param, grad, state.get(first), state.get(second), u)
                if memory is None:
                    grad, memory = self._examined(planned, param, grad, state, group, known)
                ready.append(Ready(planned, param, grad, state, memory))
        return ready

    def _examined(
        self,
        planned: PlannedTensor,
        param: torch.Tensor,
        grad: torch.Tensor,
        state: Mapping[str, Any],
        group: Mapping[str, Any],
        known: dict[int, Known],
    ) -> tuple[torch.Tensor, Memory | None]:
        """This rank's gradient, and the memory of all tensors if :class:`Ready` has it; or an error."""
        first, second, third = self.state_keys
        memory = None
        if self._is_complete(param, state, group):
            memory = memory_of(param, grad, state[first], state[second], state.get(third))
        if memory is None or memory.dtypes[1].is_complex:  # asks again, to say what is wrong
            grad = checked_gradient(param, grad)
        check_states(param, state, self.state_keys, self._state_dtypes)
        refuse_fsdp1(param)
        check_memory(param)
        if self._rounds:
            self._refuse_small_states(param)
        kernel_for(self._kernel, grad.device, self._plans.proved)  # refuses a device that the kernel cannot serve
        if memory is not None:
            known[planned.place] = Known(memory, param, state[first], state[second], state.get(third))
        return grad, memory

    def _collect(
        self,
        plan: StepPlan,
        ready: Sequence[Ready],
        hypers: Sequence[Hyperparameters],
        scaled: ScaledStep | None,
        skip: torch.Tensor | None,
    ) -> StepInputs:
        """The flat shards to work on, counted as one more step."""
        inputs = StepInputs(plan.kept_by_kernels)
        coefficients: dict[tuple[int, float], Coefficients] = {}
        ratios = [trust_ratio.ratio_for(group, hyper) for group, hyper in zip(self.param_groups, hypers, strict=True)]
        found = [
            self._state_of(one.param, self.param_groups[one.planned.group], hypers[one.planned.group])
            if one.memory is None
            else one.state
            for one in ready
        ]
        first, second, third = self.state_keys
        is_host = not self._capturable
        counts = [state[states.STEP] for state in found]
        inputs.counters = count_one_more(counts, skip, self._capturable)
        steps = iter(torch.stack(inputs.counters).tolist() if inputs.counters else ())
        for one, state, count in zip(ready, found, counts, strict=True):
            planned, param, grad, memory = one.planned, one.param, one.grad, one.memory
            g, on_host = planned.group, is_host or count.is_cpu
            k = next(steps) if on_host else 0.0
            numbers = coefficients.get((g, k))
            if numbers is None:
                numbers = coefficients[g, k] = Coefficients.at_step(hypers[g], int(k))
                inputs.k = max(inputs.k, int(k))
            m, v, u = state[first], state[second], state.get(third)
            if memory is None:
                param, grad, m, v, u, copied_from = in_one_order(param, grad, m, v, u)
                if copied_from is not None:
                    inputs.staged.append((copied_from, param))
            device = param.device if memory is None else memory.device
            shard = FlatShard(
                param,
                grad,
                m,
                v,
                u,
                planned.spans(ratios[g]),
                numbers,
                planned.place,
                None if scaled is None else scaled.inverse_scale(device),
                None if on_host else count,
                self._rounds_weights and param.dtype == torch.bfloat16,
                memory,
            )
            inputs.batch_on(device).append(shard)
        inputs.put_host_last()
        return inputs

    @property
    def _rounds(self) -> bool:
        """Whether something is rounded stochastically."""
        return self._rounds_weights or any(self._state_dtypes.values())
