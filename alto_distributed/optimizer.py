"""ALTO: one ``step()`` for every engine.

A step has four parts, told in :meth:`ALTO.step`: collect the tensors (refusing what cannot be handled
before anything changes), phase one over all of them, the norms of the whole logical parameters with one
collective per process group, phase two over all of them.

Provenance: "Exploring Landscapes for Better Minima along Valleys" (NeurIPS 2025), Algorithm "ALTO";
official code ``e-optimizer-adaptor`` 0.1.0, against which the tests compare. Differences by intent: one
extra state instead of two (see update/reference.py), no gradient clipping inside, eps2 and eps3 as in
the paper, norms over whole parameters when they are sharded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch.optim import Optimizer

from . import state as states
from .checkpoint import check_saved_by_alto, load_exactly
from .config import HYPERPARAMETER_NAMES, Hyperparameters, check_betas, refuse_near_misses, refuse_unknown
from .diagnostics import Diagnostics, Reading
from .errors import UnsupportedTensor
from .registration import register_loaded
from .sharding.dtensor import is_dtensor
from .sharding.layout import LogicalParameter, ShardLayout
from .sharding.plan import Entry, StepPlan
from .update import Coefficients, Piece, check_kernel, kernel_for
from .update.reference import trust_ratio
from .update.rounding import seed_of
from .work import Work, checked_gradient

# Group key that remembers the beta1 with which grad_ema was gathered: the one-tensor identity holds
# only while it stays, also over a checkpoint.
GRAD_EMA_BETA1 = "grad_ema_beta1"

#: What the constructor takes besides hyperparameters: choices for all groups, which are not in checkpoints.
OPTIONS = ("kernel", "diagnostics_every", "grad_ema_dtype", "exp_avg_dtype")


class ALTO(Optimizer):
    """LAMB with an exploration term made of the gradient's own acceleration.

    Args:
        params: parameters or parameter groups; ``param_groups(model)`` makes the usual two. A group may
            override any hyperparameter. It may also say ``"decayed": True`` or ``False`` to be treated
            as such under ``layerwise="decayed"`` whatever its ``weight_decay`` happens to be today.
        lr: learning rate.
        betas: decays of the acceleration, the first and the second moment.
        alpha: weight of the acceleration, ``|alpha| < 1/(1 - beta1)``. 0 is LAMB, and needs no third state.
        eps: eps1, or the paper's (eps1, eps2, eps3).
        weight_decay: decay inside the update, scaled by the layer-wise ratio.
        layerwise: which parameters get the ratio: "decayed" (those of groups with weight decay),
            "matrices" (two or more dimensions), "all" (the paper's formula to the letter) or "none"
            (EAdamW). Except under "all", a norm of 0 gives ratio 1.
        bias_correction: False is the paper's "ALTO Vanilla".
        kernel: what computes the update. "auto" is "native" on the CPU (C, compiled on first use; "torch" if there
            is no compiler) and "torch" elsewhere; "triton" is for GPUs, and has not run on one yet; "reference" is
            the definition. All give the same result.
        diagnostics_every: measure every parameter's ratio and norms each so many steps, for
            :meth:`diagnostics`; 0 for never.
        grad_ema_dtype: "bfloat16" keeps this state in 2 bytes a parameter instead of 4, with stochastic rounding.
        exp_avg_dtype: the same for the first moment.

    States are float32 (float64 for float64 parameters), whatever the parameters' precision, and so is all
    arithmetic; a state in bfloat16 is rounded once a step, as it is stored. The optimizer does not clip: the
    gradient it gets is the gradient it uses.
    """

    state_keys: ClassVar[tuple[str, str, str]] = (states.EXP_AVG, states.EXP_AVG_SQ, states.GRAD_EMA)

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
        kernel: str = "auto",
        diagnostics_every: int = 0,
        grad_ema_dtype: str | torch.dtype = "float32",
        exp_avg_dtype: str | torch.dtype = "float32",
        **unknown: Any,
    ) -> None:
        refuse_unknown(unknown, (*HYPERPARAMETER_NAMES, *OPTIONS))
        hyper = Hyperparameters(lr, cast(Any, betas), alpha, cast(Any, eps), weight_decay, layerwise, bias_correction)
        self._kernel = check_kernel(kernel)
        self._diagnostics = Diagnostics(diagnostics_every)
        self._state_dtypes = {
            states.GRAD_EMA: states.check_dtype("grad_ema_dtype", grad_ema_dtype),
            states.EXP_AVG: states.check_dtype("exp_avg_dtype", exp_avg_dtype),
        }
        self._model_copies = states.ModelCopies({}, [])
        self._use_layouts({}, ())
        super().__init__(params, hyper.as_group())
        self._warn_if_no_ratio()
        register_loaded()

    # -- parameter groups and layouts ---------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):
            refuse_near_misses(param_group)
            merged = {**self.defaults, **param_group}
            param_group.update(Hyperparameters.from_group(merged).as_group())
        super().add_param_group(param_group)
        for param in param_group["params"]:
            if param.is_complex():
                self.param_groups.pop()
                raise UnsupportedTensor("ALTO does not support complex parameters; use torch.view_as_real")
            try:
                self._refuse_small_states(param)
            except ValueError:
                self.param_groups.pop()
                raise
        self._plans.clear()

    def _refuse_small_states(self, param: torch.Tensor) -> None:
        for chosen in self._state_dtypes.values():
            states.state_dtype(param, chosen)

    def set_layouts(self, layouts: Mapping[torch.Tensor, ShardLayout], joined: Sequence[LogicalParameter] = ()) -> None:
        """Tell what sharded tensors are made of. Engines call this once their shards exist.

        Args:
            layouts: for each sharded tensor among the parameters, its layout. Tensors that are not named
                are whole logical parameters (or DTensors, which know their own layout).
            joined: parameters in whose norms this rank takes part although none of its tensors has a
                segment of them, not even an empty one.
        """
        for tensor, layout in layouts.items():
            if is_dtensor(tensor):
                raise ValueError("a DTensor knows its own layout: leave it out of set_layouts")
            if tensor.numel() != layout.numel:
                raise ValueError(f"{layout!r} is of another length than its tensor of {tensor.numel()} elements")
            if not layout.is_whole and not tensor.is_contiguous():
                raise ValueError(f"the tensor of {layout!r} is not contiguous, so its elements have no one order")
        if joined and self._diagnostics.every and not all(states.STEP in group for group in self.param_groups):
            raise ValueError(
                "diagnostics_every needs a tensor on every rank, or an engine that counts steps in the groups: a rank "
                "that only joins cannot tell when a step is measured; set diagnostics_every to 0"
            )
        self._use_layouts(layouts, joined)

    def set_model_copies(self, copies: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Have each step also write parameters, rounded to bfloat16, to other tensors, in the same pass.

        Args:
            copies: for each parameter that has one (float32 master weights, say) its copy (the model's own weights):
                bfloat16, of the same shape, device and memory layout. Replaces what was set before; a deep or
                unpickled copy of the optimizer has none.
        """
        self._model_copies = states.ModelCopies(copies, [p for group in self.param_groups for p in group["params"]])

    def _use_layouts(self, layouts: Mapping[torch.Tensor, ShardLayout], joined: Sequence[LogicalParameter]) -> None:
        self._layouts = dict(layouts)
        self._joined = tuple(joined)
        self._plans: dict[tuple[tuple[int, ...], ...], StepPlan] = {}
        self._layouts_lost = False

    def _plan(self) -> StepPlan:
        """The plan for the tensors that are in the groups now; it keeps them, so ids stay unique."""
        if self._layouts_lost:
            raise ValueError(
                "this ALTO is a copy of a sharded one, and layouts belong to the original's tensors and process "
                "groups: call set_layouts on the copy before step()"
            )
        key = tuple(tuple(map(id, group["params"])) for group in self.param_groups)
        if key not in self._plans:
            self._plans[key] = StepPlan(self.param_groups, self._layouts, self._joined)
        return self._plans[key]

    def _ratio_for(self, group: Mapping[str, Any], hyper: Hyperparameters) -> str:
        """Which segments of a group get the layer-wise ratio: "every", "matrices" or "no" segment."""
        if hyper.layerwise == "decayed":
            return "every" if _is_decayed(group) else "no"
        return {"matrices": "matrices", "all": "every", "none": "no"}[hyper.layerwise]

    def _warn_if_no_ratio(self) -> None:
        groups = [group for group in self.param_groups if group["params"]]
        if groups and all(group["layerwise"] == "decayed" and not _is_decayed(group) for group in groups):
            warnings.warn(
                'ALTO: no parameter group has weight decay, so under layerwise="decayed" no parameter gets the '
                'layer-wise ratio. Set a weight_decay, or layerwise="matrices" or "all" to have the ratio without '
                'decay, or layerwise="none" if that is what you want.',
                stacklevel=3,
            )

    # -- the step -----------------------------------------------------------------------------------

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
        work = self._collect(plan, hypers)
        measured = work.over_every_parameter() if self._diagnostics.due(work.k or self._step_of_groups()) else None
        if measured is not None:
            self._diagnostics.before(measured, plan.norms)

        partial: dict[torch.device, torch.Tensor] = {}
        for device, pieces in work.pieces.items():
            partial[device] = plan.norms.zeros(device)
            kernel_for(self._kernel, device).phase_one(pieces, partial[device])

        ratios, step_sizes = self._ratios(plan, hypers, partial)
        if measured is not None:
            self._diagnostics.after(measured, plan.norms, plan.labels, ratios)

        for device, pieces in work.pieces.items():
            kernel_for(self._kernel, device).phase_two(pieces, step_sizes.to(device))
        for target, flat in work.staged:
            target.copy_(flat.view(target.shape))
        return loss

    def _step_of_groups(self) -> int:
        """The number of this step on a rank that only joins, where the engine counts in the groups; else 0."""
        done = [int(group[states.STEP]) for group in self.param_groups if states.STEP in group]
        return max(done) + 1 if done and self._joined else 0

    def _checked(self, group: dict[str, Any]) -> Hyperparameters:
        """A group's hyperparameters, checked again: schedulers and users change them between steps."""
        beta1 = check_betas(group["betas"])[0]
        gathered_with = group.get(GRAD_EMA_BETA1, beta1)
        if gathered_with != beta1:
            raise ValueError(
                f"beta1 was changed from {gathered_with} to {beta1} in mid-run: grad_ema was gathered with the old "
                "one. Keep betas[0] (a scheduler that cycles momentum must be told cycle_momentum=False), or start "
                "a new ALTO"
            )
        return Hyperparameters.from_group(group)

    def _collect(self, plan: StepPlan, hypers: Sequence[Hyperparameters]) -> Work:
        """The flat pieces to work on. Every gradient is checked before the first state is touched."""
        ready: list[tuple[Entry, int, int, torch.Tensor]] = []
        for g, entries in enumerate(plan.groups):
            for i, entry in enumerate(entries):
                if entry.tensor.grad is not None:
                    ready.append((entry, g, i, checked_gradient(entry.tensor, entry.tensor.grad)))
                    self._refuse_small_states(entry.tensor)
        for device in {grad.device for *_, grad in ready}:
            kernel_for(self._kernel, device)  # refuses a device that the kernel cannot serve

        work = Work()
        coefficients: dict[tuple[int, int], Coefficients] = {}
        for entry, g, i, grad in ready:
            param, group, hyper = entry.tensor, self.param_groups[g], hypers[g]
            state = self._state_of(param, group, hyper)
            state[states.STEP] += 1
            k = int(state[states.STEP])
            if (g, k) not in coefficients:
                coefficients[g, k] = Coefficients.at_step(hyper, k)

            theta = states.in_memory_order(param, param)
            flat = theta.reshape(-1)
            if not theta.is_contiguous():
                work.staged.append((theta, flat))
            m, v, u = (states.flat_view(state[key], param) if key in state else None for key in self.state_keys)
            piece = Piece(
                param=flat,
                grad=states.in_memory_order(grad, param).reshape(-1),
                exp_avg=cast(torch.Tensor, m),
                exp_avg_sq=cast(torch.Tensor, v),
                grad_ema=u,
                spans=entry.spans(self._ratio_for(group, hyper)),
                coefficients=coefficients[g, k],
                model_copy=self._model_copies.flat(param),
                seed=self._seed(entry, g, i),
            )
            work.add(piece, entry, k)
        return work

    def _seed(self, entry: Entry, g: int, i: int) -> int:
        """Of stochastic rounding; follows from the tensor's place, so replicas and resumed runs have the same."""
        if not any(self._state_dtypes.values()):
            return 0
        described = entry.tensor in self._layouts and entry.layout.segments
        return seed_of(g, i, entry.layout.segments[0].parameter.name if described else "")

    def _ratios(
        self, plan: StepPlan, hypers: Sequence[Hyperparameters], partial: Mapping[torch.device, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer-wise ratio of each slot, and lr times that. A slot that nobody summed has ratio 1."""
        if all(hyper.layerwise == "none" for hyper in hypers):
            ones = torch.ones(len(plan.norms.slots))
            return ones, ones
        sums = plan.norms.complete(partial)
        theta_norm, r_norm = sums.sqrt()
        ratios, step_sizes = torch.ones_like(theta_norm), torch.empty_like(theta_norm)
        for hyper, slots in zip(hypers, plan.group_slots, strict=True):
            index = slots.on(sums.device)
            ratio = trust_ratio(theta_norm[index], r_norm[index], *hyper.eps[1:], one_at_zero=hyper.layerwise != "all")
            ratios[index] = ratio
            step_sizes[index] = ratio * hyper.lr
        return ratios, step_sizes

    # -- diagnostics --------------------------------------------------------------------------------

    def diagnostics(self) -> dict[str, Reading]:
        """The latest reading of each parameter, by name, if ``diagnostics_every`` is set. Waits for the device."""
        return self._diagnostics.read()

    def has_new_diagnostics(self) -> bool:
        """Whether a step was measured since the last call of :meth:`diagnostics`."""
        return self._diagnostics.unread

    # -- state --------------------------------------------------------------------------------------

    @torch.no_grad()
    def initialize_state(self) -> None:
        """Allocate the states of all parameters now. Engines that save or link state early need it."""
        for group in self.param_groups:
            hyper = self._checked(group)
            for param in group["params"]:
                self._state_of(param, group, hyper)

    def _state_of(self, param: torch.Tensor, group: dict[str, Any], hyper: Hyperparameters) -> dict[str, Any]:
        """A parameter's states, allocated on first use.

        grad_ema comes with the first alpha that is not 0 (from zero, as at step 1) and then stays up to
        date, so that alpha may change at any time.
        """
        state: dict[str, Any] = self.state[param]
        if states.STEP not in state:
            state[states.STEP] = states.new_step()
        for key in self.state_keys:
            chosen = self._state_dtypes.get(key)
            if key not in state:
                if key != states.GRAD_EMA or hyper.alpha != 0:
                    state[key] = self.new_state(param, key)
            elif chosen is not None and state[key].dtype != chosen:  # an engine that loaded states in its own way
                state[key] = states.match_layout(state[key], param, chosen)
        if states.GRAD_EMA in state:
            group.setdefault(GRAD_EMA_BETA1, hyper.betas[0])
        return state

    def new_state(self, param: torch.Tensor, key: str) -> torch.Tensor:
        """Zeros for one of the ``state_keys`` of a parameter, in the precision chosen for it."""
        return states.new_state(param, self._state_dtypes.get(key))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, all of it or nothing.

        A checkpoint that lacks a state, or whose tensors do not fit, is refused before anything changes.
        Hyperparameters come from the checkpoint, as in ``torch.optim``; the precision of states does not: one
        that was saved in another is converted, to float32 exactly, to bfloat16 by rounding to nearest.
        """
        load_exactly(self, super().load_state_dict, state_dict, self._check_saved, self.state_keys, self._state_dtypes)

    def _check_saved(self, state_dict: Mapping[str, Any]) -> None:
        check_saved_by_alto(state_dict, self.param_groups)

    def __getstate__(self) -> dict[str, Any]:
        lost = self._layouts_lost or bool(self._layouts) or bool(self._joined)
        return {
            **super().__getstate__(),
            "_kernel": self._kernel,
            "_state_dtypes": self._state_dtypes,
            "_diagnostics": self._diagnostics.fresh(),
            "_layouts_lost": lost,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Called by unpickling and copying with all of __getstate__, and by load_state_dict with the
        # states and groups alone.
        if "_layouts" not in self.__dict__:
            self._state_dtypes = {}  # of an ALTO that was pickled before there was a choice
            self._model_copies = states.ModelCopies({}, [])
            self._use_layouts({}, ())
        super().__setstate__(state)
        self._plans.clear()


def _is_decayed(group: Mapping[str, Any]) -> bool:
    """A group's intent, if it states one; else whether its weight decay is not 0 today."""
    return bool(group.get("decayed", group["weight_decay"] != 0))
