"""ALTO: one ``step()`` for every engine.

A step has four parts, told in :meth:`ALTO.step`: collect the tensors (refusing what cannot be handled, and
skipping what is not to be done, before anything changes), phase one over all of them, the norms of the whole
logical parameters with one collective per process group, phase two over all of them.

Provenance: "Exploring Landscapes for Better Minima along Valleys" (NeurIPS 2025), Algorithm "ALTO";
official code ``e-optimizer-adaptor`` 0.1.0, against which the tests compare. Differences by intent: one
extra state instead of two (see kernels/reference.py), no gradient clipping inside, eps2 and eps3 as in
the paper, norms over whole parameters when they are sharded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version

from . import states, trust_ratio
from .base import ALTOBase
from .diagnostics import Reading
from .grad_scaler import ScaledStep
from .hyperparameters import HYPERPARAMETER_NAMES, Hyperparameters
from .import_hooks import register_loaded
from .kernels import Coefficients, Dtypes, FlatShard, Kernel, find_fault, kernel_for, kernel_with_skip
from .kernels.choice import ACCELERATED, warn_of_fallback
from .kernels.rounding import seed_of
from .options import OPTIONS, check_torch_options, refusing_unknown
from .sharding.collective import anyone_objects
from .sharding.plan import PlannedTensor, StepPlan
from .spans import PLAIN
from .step_inputs import StepInputs, check_fit, checked_gradient, refuse_capture

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_ROUNDED = (states.EXP_AVG, states.GRAD_EMA)


class ALTO(ALTOBase):
    """LAMB with an exploration term made of the gradient's own acceleration.

    Args:
        params: parameters or parameter groups; ``param_groups(model)`` makes the usual two. A group may
            override any hyperparameter. It may also say ``"decayed": True`` or ``False`` to be treated
            as such under ``layerwise="decayed"`` whatever its ``weight_decay`` happens to be today.
        lr: learning rate.
        betas: decays of the acceleration, the first and the second moment. Two are Adam's, of the last two.
        alpha: weight of the acceleration, ``|alpha| < 1/(1 - beta1)``. 0 is LAMB, and needs no third state.
        eps: eps1, or the paper's (eps1, eps2, eps3).
        weight_decay: decay inside the update, scaled by the layer-wise ratio.
        layerwise: which parameters get the ratio: "decayed" (those of groups with weight decay),
            "matrices" (two or more dimensions), "all" (the paper's formula to the letter) or "none"
            (EAdamW). Except under "all", a norm of 0 gives ratio 1.
        bias_correction: False is the paper's "ALTO Vanilla".
        trust_clip: (low, high), limits of the layer-wise ratio; None for no limits.
        vector_lr: factor on lr for parameters without the ratio. They take Adam steps, and lr is the relative step
            of a matrix, ten times what Adam would use.
        kernel: what computes the update. "auto" is "native" on the CPU (C, compiled on first use; "torch" if there
            is no compiler), "triton" on a GPU where it proves right at first use, and "torch" elsewhere; "reference"
            is the definition. All give the same result.
        diagnostics_every: measure every parameter's ratio and norms each so many steps, for
            :meth:`diagnostics`; 0 for never.
        skip_nonfinite: skip a step if a gradient on any rank has an infinity or a NaN: all ranks together, with
            weights, states and step count bitwise what they were. Costs a pass over the gradients and one all-reduce
            of four bytes over all ranks of the job, which must all call ``step()``; see :attr:`skipped_steps`.
        grad_ema_dtype: "bfloat16" keeps this state in 2 bytes a parameter instead of 4, with stochastic rounding.
        exp_avg_dtype: the same for the first moment.
        maximize: climb instead of descend.
        foreach: accepted, since frameworks set it; ``kernel`` says what computes a step.
        fused: the same.
        capturable: refused unless False.
        differentiable: the same.

    Options may also be keys of the parameter groups, the same in all of them.

    States are float32 (float64 for float64 parameters), whatever the parameters' precision, and so is all
    arithmetic; a state in bfloat16 is rounded once a step, as it is stored. The optimizer does not clip: the
    gradient it gets is the gradient it uses.
    """

    #: Read by torch.amp.GradScaler, see grad_scaler.py.
    _step_supports_amp_scaling = True

    @refusing_unknown
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-2,
        betas: Sequence[float] = (0.99, 0.9, 0.99),
        alpha: float = -5.0,
        eps: float | Sequence[float] = 1e-6,
        weight_decay: float = 1e-4,
        *,
        layerwise: str = "decayed",
        bias_correction: bool = True,
        trust_clip: Sequence[float] | None = None,
        vector_lr: float = 1.0,
        kernel: str = "auto",
        diagnostics_every: int = 0,
        skip_nonfinite: bool = False,
        grad_ema_dtype: str | torch.dtype = "float32",
        exp_avg_dtype: str | torch.dtype = "float32",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        given = dict(locals())
        check_torch_options(given)
        hyper = Hyperparameters(**{name: given[name] for name in HYPERPARAMETER_NAMES})
        super().__init__(params, hyper, {name: given[name] for name in OPTIONS})
        trust_ratio.warn_if_nobody_gets_one(self.param_groups)
        register_loaded()

    # -- the step -----------------------------------------------------------------------------------

    def _plan(self) -> StepPlan:
        """The plan for the tensors that are in the groups now."""
        if self._layouts_lost:
            raise ValueError(
                "this ALTO is a copy of a sharded one, and layouts belong to the original's tensors and process "
                "groups: call set_layouts on the copy before step()"
            )
        key = tuple(tuple((id(p), p.shape) for p in group["params"]) for group in self.param_groups)
        if key not in self._plans:
            plan = StepPlan(self.param_groups, self._layouts, self._joined)
            names = tuple(plan.norms.slots)
            # Once for the same parameters: a rank that makes a plan anew, alone, must not wait for the others.
            agree = names not in self._agreed and any(group["layerwise"] != "none" for group in self.param_groups)
            if agree:
                plan.require_agreement({**self.description(), **self.description_of_groups()})
                self._agreed.add(names)
            if self._kernel == "auto":
                self._prove_kernel(plan.norms.groups if agree else ())
            self._drop_outdated_plans()
            self._plans[key] = plan
        return self._plans[key]

    def _prove_kernel(self, groups: Iterable[ProcessGroup]) -> None:
        """Whether "auto" may use its kernel for GPUs: all ranks that sum norms together do, or none of them."""
        in_use: dict[torch.device, set[Dtypes]] = {}
        for group in self.param_groups:
            for param in group["params"]:
                if param.device.type in ACCELERATED:
                    m, u = (states.state_dtype(param, self._state_dtypes.get(key)) for key in _ROUNDED)
                    grad = param.dtype if param.grad is None else param.grad.dtype
                    dtypes = Dtypes(param.dtype, grad, m, u if group["alpha"] != 0 else None)
                    in_use.setdefault(param.device, set()).add(dtypes)
        faults = [fault for device, dtypes in in_use.items() if (fault := find_fault(device, dtypes))]
        if anyone_objects(bool(faults), groups, ACCELERATED) and self._proved:
            self._proved = False
            warn_of_fallback(faults[0] if faults else "it failed on another rank, whose warning says why")

    def _drop_outdated_plans(self) -> None:
        """A plan keeps its tensors alive, so it goes when nothing else of this optimizer does.

        It cannot watch them by weak references: with one on it, torch refuses to swap a parameter, as ``module.to()``
        does with DTensors.
        """
        in_groups = (param for group in self.param_groups for param in group["params"])
        known = {id(tensor) for tensor in itertools.chain(in_groups, self._layouts, self.state)}
        for key, plan in list(self._plans.items()):
            if any(id(tensor) not in known for tensor in plan.tensors):
                del self._plans[key]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have a gradient.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            What the closure returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        plan = self._plan()
        hypers = [self._checked(group) for group in self.param_groups]
        self._skipped.resolve_pending()
        self._skipped.raise_if_scalers_disagree()
        ready = self._ready(plan)
        scaled = ScaledStep.of(self)
        real = (part for planned, *_, grad in ready for part in planned.real_elements(grad))
        skip = self._skipped.flags(real, scaled, plan.norms.groups)
        if skip is not None and self._skipped.is_readable(skip):
            skipped = self._skipped.count(skip)
            self._skipped.raise_if_scalers_disagree()
            if skipped:
                return loss
            skip = None
        if scaled is not None:
            grads = scaled.unscaled([grad for *_, grad in ready])
            ready = [(planned, g, i, grad) for (planned, g, i, _), grad in zip(ready, grads, strict=True)]
        if any(hyper.maximize for hyper in hypers):
            ready = [(planned, g, i, -grad if hypers[g].maximize else grad) for planned, g, i, grad in ready]
        inputs = self._collect(plan, ready, hypers)
        if skip is not None:
            self._skipped.count_later(skip, inputs.counters)
        measured = inputs.over_every_parameter() if self._diagnostics.due(inputs.k or self._step_of_groups()) else None
        if measured is not None:
            self._diagnostics.before(measured, plan.norms)

        partial: dict[torch.device, torch.Tensor] = {}
        prepared: dict[torch.device, Any] = {}
        missing = plan.missing(ready)
        for device, shards in inputs.shards.items():
            partial[device] = plan.norms.zeros(device) if partial else plan.witness.table(device, plan.norms, missing)
            prepared[device] = self._kernel_on(device, skip).phase_one(shards, partial[device])

        ratio_of_slot, step_sizes = trust_ratio.complete(plan, self.param_groups, hypers, partial)
        if measured is not None:
            self._diagnostics.after(measured, plan.norms, plan.labels, ratio_of_slot)

        for device, shards in inputs.shards.items():
            self._kernel_on(device, skip).phase_two(shards, step_sizes.to(device), prepared[device])
        for target, flat in inputs.staged:
            target.copy_(flat.view(target.shape))
        # Kernels that write through addresses do so behind autograd's back.
        increment_version([self.param_groups[g]["params"][i] for _, g, i, _ in ready])
        return loss

    def _kernel_on(self, device: torch.device, skip: torch.Tensor | None) -> Kernel:
        kernel = kernel_for(self._kernel, device, self._proved)
        return kernel if skip is None else kernel_with_skip(kernel, skip[:1].to(device))

    def _step_of_groups(self) -> int:
        """The number of this step on a rank that only joins, where the engine counts in the groups; else 0."""
        done = [int(group[states.STEP]) for group in self.param_groups if states.STEP in group]
        return max(done) + 1 if done and self._joined else 0

    def _ready(self, plan: StepPlan) -> list[tuple[PlannedTensor, int, int, torch.Tensor]]:
        """What has a gradient: planned, place in the groups, and this rank's gradient. All of it is checked here."""
        ready: list[tuple[PlannedTensor, int, int, torch.Tensor]] = []
        rounds = self._rounds
        for g, planned_tensors in enumerate(plan.groups):
            for i, (planned, param) in enumerate(zip(planned_tensors, self.param_groups[g]["params"], strict=True)):
                if param.grad is not None:
                    ready.append((planned, g, i, checked_gradient(param, param.grad)))
                    check_fit(param, self.state.get(param, {}), self.state_keys)
                    if rounds:
                        self._refuse_small_states(param)
        for device in {grad.device for *_, grad in ready}:
            kernel_for(self._kernel, device, self._proved)  # refuses a device that the kernel cannot serve
            refuse_capture(device)
        return ready

    def _collect(
        self,
        plan: StepPlan,
        ready: Sequence[tuple[PlannedTensor, int, int, torch.Tensor]],
        hypers: Sequence[Hyperparameters],
    ) -> StepInputs:
        """The flat shards to work on, counted as one more step."""
        inputs = StepInputs(plan.kept_by_kernels)
        coefficients: dict[tuple[int, int], Coefficients] = {}
        ratios = [trust_ratio.ratio_for(group, hyper) for group, hyper in zip(self.param_groups, hypers, strict=True)]
        found = [
            self._state_of(self.param_groups[g]["params"][i], self.param_groups[g], hypers[g]) for _, g, i, _ in ready
        ]
        inputs.counters = [state[states.STEP] for state in found]
        if inputs.counters:
            torch._foreach_add_(inputs.counters, 1)
        first, second, third = self.state_keys
        rounds = self._rounds
        for (planned, g, i, grad), state in zip(ready, found, strict=True):
            param = self.param_groups[g]["params"][i]
            k = int(state[states.STEP].item())
            if (g, k) not in coefficients:
                coefficients[g, k] = Coefficients.at_step(hypers[g], k)
            m, v, u = state[first], state[second], state.get(third)
            if type(param) in PLAIN and param.is_contiguous():
                flat = param
                if param.ndim != 1:
                    flat, grad, m, v = param.view(-1), grad.reshape(-1), m.view(-1), v.view(-1)
                    u = None if u is None else u.view(-1)
            else:
                theta = states.in_memory_order(param, param)
                flat = theta.reshape(-1)
                if not theta.is_contiguous():
                    inputs.staged.append((theta, flat))
                grad = states.in_memory_order(grad, param).reshape(-1)
                m, v = states.flat_view(m, param), states.flat_view(v, param)
                u = None if u is None else states.flat_view(u, param)
            shard = FlatShard(
                param=flat,
                grad=grad,
                exp_avg=m,
                exp_avg_sq=v,
                grad_ema=u,
                spans=planned.spans(ratios[g]),
                coefficients=coefficients[g, k],
                seed=self._seed(param, planned, g, i) if rounds else 0,
                place=planned.place,
            )
            inputs.add(shard, planned, k)
        return inputs

    @property
    def _rounds(self) -> bool:
        """Whether a state is kept in low precision."""
        return any(self._state_dtypes.values())

    def _seed(self, param: torch.Tensor, planned: PlannedTensor, g: int, i: int) -> int:
        """Of stochastic rounding; follows from the tensor's place, so replicas and resumed runs have the same."""
        described = param in self._layouts and planned.layout.segments
        return seed_of(g, i, planned.layout.segments[0].parameter.name if described else "")

    # -- skipped steps ------------------------------------------------------------------------------

    @property
    def skip_nonfinite(self) -> bool:
        """Whether this optimizer looks at gradients itself."""
        return self._skipped.on

    def agree_over(self, group: ProcessGroup) -> None:
        """The ranks that must skip a step together, if they are not all ranks of the job. Each must call ``step()``."""
        self._skipped.group = group

    def leave_nonfinite_to_engine(self) -> None:
        """Engines that look at gradients themselves, or step groups one by one, turn ``skip_nonfinite`` off here."""
        self._skipped.on = False

    @property
    def skipped_steps(self) -> int:
        """Steps skipped under ``skip_nonfinite`` or a GradScaler since this was built. Waits for the last step."""
        return self._skipped.total

    @property
    def skipped_in_a_row(self) -> int:
        """Those since the last step that was not. Waits for the last step."""
        return self._skipped.in_a_row

    # -- diagnostics --------------------------------------------------------------------------------

    def diagnostics(self) -> dict[str, Reading]:
        """The latest reading of each parameter, by name, if ``diagnostics_every`` is set. Waits for the device."""
        return self._diagnostics.read()

    def has_new_diagnostics(self) -> bool:
        """Whether a step was measured since the last call of :meth:`diagnostics`."""
        return self._diagnostics.unread
