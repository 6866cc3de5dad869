"""What ALTO is between its steps: parameter groups, layouts, states, and their saving and loading."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from . import states, version
from .diagnostics import Diagnostics
from .eager import EagerStep
from .errors import UnsupportedTensor
from .hyperparameters import (
    ADDED_LATER,
    OWN_BETA1,
    OWN_BETA2,
    Hyperparameters,
    betas_of,
    check_beta,
    check_betas,
    is_cycled,
)
from .kernels import check_kernel
from .nonfinite import SkippedSteps
from .options import OPTIONS, check_capturable, for_all_groups, refuse_in_mid_run, without_options
from .planning import Plans
from .presets import describe
from .sharding.dtensor import is_dtensor
from .sharding.layout import LogicalParameter, ShardLayout
from .sharding.plan import check_length
from .state_dict import check_saved_by_alto, load_exactly
from .states import GRAD_EMA_BETA1

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ALTOBase(EagerStep):
    """All of ALTO but its step."""

    state_keys: ClassVar[tuple[str, str, str]] = (states.EXP_AVG, states.EXP_AVG_SQ, states.GRAD_EMA)

    _rounds_weights = False

    def __init__(self, params: Iterable[Any], hyper: Hyperparameters, options: Mapping[str, Any]) -> None:
        if isinstance(params, Iterable) and not isinstance(params, (torch.Tensor, dict)):
            params = list(params)
            options = for_all_groups(options, params)
        self._kernel = check_kernel(options["kernel"])
        self._diagnostics = Diagnostics(options["diagnostics_every"])
        self._skipped = SkippedSteps(options["skip_nonfinite"])
        self._state_dtypes = {
            key: states.check_dtype(f"{key}_dtype", options[f"{key}_dtype"]) for key in states.SHRINKABLE
        }
        self._capturable = check_capturable(options)
        self._use_layouts({}, ())
        super().__init__(params, hyper.as_group())

    # -- parameter groups and layouts ---------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):
            param_group = without_options(param_group, self._options())
            merged = {OWN_BETA1: self.defaults["betas"][0], **self.defaults, **param_group}
            hyper = Hyperparameters.from_group(merged)
            param_group.update({**hyper.as_group(), OWN_BETA1: hyper.betas[0], OWN_BETA2: hyper.betas[1]})
            if is_cycled(param_group):  # as the scheduler wrote them
                param_group["betas"] = tuple(merged["betas"])
                param_group[OWN_BETA2] = param_group["betas"][1]
            self._complete_names(param_group)
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

    def _complete_names(self, group: dict[str, Any]) -> None:
        """torch wants names in all groups or none. A group that comes without gets some, if the others have them."""
        if any("param_names" in other for other in self.param_groups) and "param_names" not in group:
            params = group.get("params")
            group["params"] = params = [params] if isinstance(params, torch.Tensor) else list(params or ())
            if not any(isinstance(param, tuple) for param in params):
                g = len(self.param_groups)
                group["param_names"] = [f"parameter {i} of group {g}" for i in range(len(params))]

    def _options(self) -> dict[str, Any]:
        """What the constructor was told for all groups."""
        dtypes = {f"{key}_dtype": str(dtype or "float32") for key, dtype in self._state_dtypes.items()}
        return {
            "kernel": self._kernel,
            "diagnostics_every": self._diagnostics.every,
            "skip_nonfinite": self._skipped.on,
            "capturable": self._capturable,
            **dtypes,
        }

    def _refuse_small_states(self, param: torch.Tensor) -> None:
        for chosen in self._state_dtypes.values():
            states.state_dtype(param, chosen)

    def set_layouts(
        self,
        layouts: Mapping[torch.Tensor, ShardLayout],
        joined: Sequence[LogicalParameter] = (),
        replicas: Sequence[ProcessGroup] | None = None,
    ) -> None:
        """Tell what sharded tensors are made of. Engines call this once their shards exist.

        Args:
            layouts: for each sharded tensor among the parameters, its layout. Tensors that are not named
                are whole logical parameters (or DTensors, which know their own layout).
            joined: parameters in whose norms this rank takes part although none of its tensors has a
                segment of them, not even an empty one.
            replicas: process groups of all ranks that have the same parameters, or shards of them, whose kernels must
                be the same ("auto" asks once); None if they are not known, and all ranks of the job are asked.
        """
        for tensor, layout in layouts.items():
            if is_dtensor(tensor):
                raise ValueError("a DTensor knows its own layout: leave it out of set_layouts")
            if tensor.numel():  # else an engine may have swapped it out; each plan looks again
                check_length(tensor, layout)
            if not layout.is_whole and not tensor.is_contiguous():
                raise ValueError(f"the tensor of {layout!r} is not contiguous, so its elements have no one order")
        if joined and self._diagnostics.every and not all(states.STEP in group for group in self.param_groups):
            raise ValueError(
                "diagnostics_every needs a tensor on every rank, or an engine that counts steps in the groups: a rank "
                "that only joins cannot tell when a step is measured; set diagnostics_every to 0"
            )
        for group in self.param_groups:  # their parameters have become flat tensors, which layouts name
            if any(param in layouts for param in group["params"]):
                group.pop("param_names", None)
        self._use_layouts(layouts, joined, replicas)

    def round_weights_stochastically(self) -> None:
        """Engines whose master weights are bfloat16 call this: rounded to nearest, small updates would be lost."""
        self._rounds_weights = True

    def _use_layouts(
        self,
        layouts: Mapping[torch.Tensor, ShardLayout],
        joined: Sequence[LogicalParameter],
        replicas: Sequence[ProcessGroup] | None = None,
    ) -> None:
        self._plans = Plans(layouts, joined, replicas)
        self._layouts_lost = False

    def describe(self) -> str:
        """The settings of all groups in a line each: alpha and betas, and the lag and momentum that they amount to."""
        settings = {describe(Hyperparameters.from_group(group)): None for group in self.param_groups}
        return "\n".join(f"{type(self).__name__}: {setting}" for setting in settings)

    def description(self) -> dict[str, str]:
        """What must be the same on all ranks that train a model together, in words."""
        said = {"the version of alto_distributed": version.__version__, "the version of torch": str(torch.__version__)}
        said.update({option: str(value) for option, value in self._options().items()})
        return {**said, **Hyperparameters.from_group(self.defaults).in_words("by default")}

    def description_of_groups(self) -> dict[str, str]:
        """The same for ranks that have the same part of it."""
        said = {"the number of parameter groups": str(len(self.param_groups))}
        for g, group in enumerate(self.param_groups):
            said.update(Hyperparameters.from_group(group).in_words(f"of parameter group {g}"))
        return said

    # -- state --------------------------------------------------------------------------------------

    @torch.no_grad()
    def initialize_state(self) -> None:
        """Allocate the states of all parameters now. Engines that save or link state early need it."""
        for group in self.param_groups:
            hyper = self._checked(group)
            for param in group["params"]:
                self._state_of(param, group, hyper)

    def _checked(self, group: dict[str, Any]) -> Hyperparameters:
        """A group's hyperparameters, checked again: schedulers and users change them between steps."""
        refuse_in_mid_run(group)
        beta1, beta2, _ = check_betas(betas_of(group))
        gathered_with = group.get(GRAD_EMA_BETA1, beta1)
        if gathered_with != beta1:
            raise ValueError(
                f"beta1 was changed from {gathered_with} to {beta1} in mid-run: grad_ema was gathered with the old "
                "one. Keep betas[0], or start a new ALTO"
            )
        group[OWN_BETA1] = beta1
        if not is_cycled(group):
            group[OWN_BETA2] = beta2
        return Hyperparameters.from_group(group)

    def _lacking(self, param: torch.Tensor, state: Mapping[str, Any], alpha: float) -> Iterator[str]:
        """The states that :meth:`_state_of` has to make or convert."""
        count = state.get(states.STEP)
        # If an engine moved all states, each step would wait for it.
        if count is None or not (count.device == param.device if self._capturable else count.is_cpu):
            yield states.STEP
        for key in self.state_keys:
            value = state.get(key)
            if value is None:
                if key != states.GRAD_EMA or alpha != 0:
                    yield key
            elif (chosen := self._state_dtypes.get(key)) is not None and value.dtype != chosen:
                yield key  # an engine loaded states in its own way
            elif value.stride() != param.stride() and not states.is_in_order(value, param):
                yield key  # as after ``model.to(memory_format=...)``

    def _is_complete(self, param: torch.Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> bool:
        """Whether :meth:`_state_of` has nothing to do."""
        if next(self._lacking(param, state, group["alpha"]), None) is not None:
            return False
        return states.GRAD_EMA not in state or GRAD_EMA_BETA1 in group

    def _state_of(self, param: torch.Tensor, group: dict[str, Any], hyper: Hyperparameters) -> dict[str, Any]:
        """A parameter's states, allocated on first use.

        grad_ema comes with the first alpha that is not 0 (from zero, as at step 1) and then stays up to
        date, so that alpha may change at any time.
        """
        state: dict[str, Any] = self.state[param]
        home = param.device if self._capturable else torch.device("cpu")
        for key in list(self._lacking(param, state, hyper.alpha)):
            value = state.get(key)
            if key == states.STEP:
                state[key] = states.new_step(home) if value is None else value.to(home)
            elif value is None:
                state[key] = self.new_state(param, key)
            else:
                state[key] = states.match_layout(value, param, self._state_dtypes.get(key))
        if states.GRAD_EMA in state:
            group.setdefault(GRAD_EMA_BETA1, hyper.betas[0])
        return state

    def new_state(self, param: torch.Tensor, key: str) -> torch.Tensor:
        """Zeros for one of the ``state_keys`` of a parameter, in the precision chosen for it."""
        return states.new_state(param, self._state_dtypes.get(key))

    def state_dict(self) -> dict[str, Any]:
        """As in ``torch.optim``. A step that may have been skipped is waited for, so that the count is right."""
        self._skipped.settle()
        for plan in self._plans:
            plan.witness.resolve()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, all of it or nothing.

        A checkpoint that lacks a state, or whose tensors do not fit, is refused before anything changes.
        Hyperparameters come from the checkpoint, as in ``torch.optim``; the precision of states does not: one
        that was saved in another is converted, to float32 exactly, to bfloat16 by rounding to nearest.
        """
        self._skipped.resolve_pending()
        load_exactly(self, super().load_state_dict, state_dict, self._check_saved, self.state_keys, self._state_dtypes)
        for param in (param for group in self.param_groups for param in group["params"]):
            state = self.state.get(param, {})  # hooks of the user's may keep other things there
            count = state.get(states.STEP)
            if count is not None and not isinstance(count, torch.Tensor):  # as old optimizers kept it
                state[states.STEP] = states.new_step() + count

    def _check_saved(self, state_dict: Mapping[str, Any]) -> None:
        check_saved_by_alto(state_dict, self.param_groups)
        for g, group in enumerate(state_dict["param_groups"]):
            if GRAD_EMA_BETA1 in group:
                check_beta(f"the checkpoint's {GRAD_EMA_BETA1} of group {g}", group[GRAD_EMA_BETA1])

    def __getstate__(self) -> dict[str, Any]:
        self._skipped.resolve_pending()
        lost = self._layouts_lost or bool(self._plans.layouts) or bool(self._plans.joined)
        return {
            **super().__getstate__(),
            "_kernel": self._kernel,
            "_state_dtypes": self._state_dtypes,
            "_diagnostics": self._diagnostics.fresh(),
            "_skipped": self._skipped.fresh(),
            "_capturable": self._capturable,
            "_layouts_lost": lost,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Called by unpickling and copying with all of __getstate__, and by load_state_dict with the
        # states and groups alone.
        if "_plans" not in self.__dict__:
            # Of an ALTO that was pickled before there was a choice.
            self._state_dtypes, self._skipped, self._capturable = {}, SkippedSteps(False), False
            self._use_layouts({}, ())
        super().__setstate__(state)
        for group in self.param_groups:
            for name in OPTIONS:  # 0.1 let them pass, and in checkpoints
                group.pop(name, None)
            for name in ADDED_LATER:
                group.setdefault(name, getattr(Hyperparameters, name))
            group.setdefault(OWN_BETA1, group["betas"][0])
            group.setdefault(OWN_BETA2, group["betas"][1])
        self._plans.clear()
