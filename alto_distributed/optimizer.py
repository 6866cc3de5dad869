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

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version

from . import states, trust_ratio
from .collecting import Collecting
from .diagnostics import Reading
from .grad_scaler import ScaledStep
from .hyperparameters import HYPERPARAMETER_NAMES, Hyperparameters
from .import_hooks import register_loaded
from .kernels import Kernel, kernel_for, kernel_with_skip
from .kernels.capture import is_capturing, refuse_cold
from .options import OPTIONS, check_torch_options, refusing_unknown
from .sharding.collective import accelerator_type
from .sharding.plan import StepPlan
from .step_inputs import check_capture, count_unadapted, refuse_capture

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ALTO(Collecting):
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
        capturable: steps may be captured in a CUDA graph: they are counted on the device, and ``lr`` may be a tensor
            there. The other numbers of the groups are the graph's own. It changes nothing on the CPU.
        differentiable: refused unless False.

    Options may also be keys of the parameter groups, the same in all of them.

    States are float32 (float64 for float64 parameters), whatever the parameters' precision, and so is all
    arithmetic; a state in bfloat16 is rounded once a step, as it is stored. The optimizer does not clip: the
    gradient it gets is the gradient it uses.
    """

    #: Read by torch.amp.GradScaler, see grad_scaler.py.
    _step_supports_amp_scaling = True

    _captured: tuple[Any, ...] = ()
    """What graphs go on reading and writing: it stays as long as the optimizer."""

    _unadapted: Mapping[torch.Tensor, torch.Tensor] | None = None
    """While E steps this: the gradients that it has adapted, as they were."""

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

    def _plan(self) -> tuple[StepPlan, bool]:
        """The plan for the tensors that are in the groups now, and whether a CUDA graph records this step."""
        if self._layouts_lost:
            raise ValueError(
                "this ALTO is a copy of a sharded one, and layouts belong to the original's tensors and process "
                "groups: call set_layouts on the copy before step()"
            )
        plan = self._plans.known(self.param_groups)
        accelerator = accelerator_type()
        capturing = is_capturing(accelerator) and any(
            tensor.device.type == accelerator for group in self.param_groups for tensor in group["params"]
        )
        if capturing and not self._capturable:
            refuse_capture()
        if plan is None:
            if capturing:
                refuse_cold("no step was taken with these parameters yet")
            plan = self._plans.new(
                self.param_groups,
                self.state,
                lambda: {**self.description(), **self.description_of_groups()},
                self._state_dtypes if self._kernel == "auto" else None,
            )
        return plan, capturing

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

        plan, capturing = self._plan()
        hypers = [self._checked(group) for group in self.param_groups]
        self._skipped.resolve_pending()
        self._skipped.raise_if_scalers_disagree()
        plan.witness.raise_fault()
        ready = self._ready(plan)
        if capturing:
            check_capture(plan, ready, self.param_groups)
        elif self._capturable:
            plan.stepped = frozenset(one.planned.place for one in ready)
        scaled = ScaledStep.of(self)
        real = (part for one in ready for part in one.planned.real_elements(one.grad))
        skip = self._skipped.flags(real, scaled, plan.norms.groups)
        if skip is not None and self._skipped.is_readable(skip):
            skipped = self._skipped.count(skip)
            self._skipped.raise_if_scalers_disagree()
            if skipped:
                return loss
            skip = None
        inputs = self._collect(plan, ready, hypers, scaled, skip)
        if skip is not None and self._capturable and not inputs.counters:
            self._skipped.count_on_device(skip, capturing)
        elif skip is not None:
            self._skipped.count_later(skip, inputs.counters)
        measured = self._diagnostics.due(inputs.k or self._step_of_groups())
        if measured:
            inputs.ask_for_all_sums(plan)
            self._diagnostics.before(inputs.shards, plan.norms)

        partial = plan.witness.new_tables(inputs.shards, plan.norms, plan.missing([one.planned.place for one in ready]))
        prepared: dict[torch.device, Any] = {}
        for device, shards in inputs.shards.items():
            prepared[device] = self._kernel_on(device, skip).phase_one(shards, partial[device])
        if self._unadapted:
            count_unadapted(ready, self._unadapted, partial)

        if measured:
            self._diagnostics.between(partial)
        ratio_of_slot, step_sizes = trust_ratio.complete(plan, self.param_groups, hypers, partial)
        if measured:
            self._diagnostics.after(plan.norms, plan.labels, ratio_of_slot)

        # Before anything is launched: copies to the host would wait for that.
        on_device = {device: step_sizes.to(device) for device in inputs.shards}
        for device, shards in inputs.shards.items():
            self._kernel_on(device, skip).phase_two(shards, on_device[device], prepared[device])
        for target, flat in inputs.staged:
            target.copy_(flat.view(target.shape))
        # Kernels that write through addresses do so behind autograd's back.
        increment_version([one.param for one in ready])
        if not capturing:
            plan.witness.look_back()
        else:
            plan.witness.forget()
            rates = [group["lr"] for group in self.param_groups]
            self._captured = (*self._captured, (plan, inputs, prepared, plan.replaceable(), rates))
        return loss

    def _kernel_on(self, device: torch.device, skip: torch.Tensor | None) -> Kernel:
        kernel = kernel_for(self._kernel, device, self._plans.proved)
        return kernel if skip is None else kernel_with_skip(kernel, skip[:1].to(device))

    def _step_of_groups(self) -> int:
        """The number of this step on a rank that only joins, where the engine counts in the groups; else 0."""
        done = [int(group[states.STEP]) for group in self.param_groups if states.STEP in group]
        return max(done) + 1 if done and self._plans.joined else 0

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
