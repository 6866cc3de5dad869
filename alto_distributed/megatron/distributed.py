"""Megatron's distributed optimizer with ALTO's three states in every checkpoint format.

The formats collect what they save by way of a few methods, which are overridden here: what belongs to one
parameter (:meth:`_get_main_param_and_optimizer_states` and its inverse), the names of the states, and in
megatron-core 0.16.1, which writes two names out, the gathering and scattering of the third.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from .. import states
from ..optimizer import ALTO
from ..sharding.rank_sync import run_on_rank0
from . import config as configs
from .checkpoint_formats import CORRUPTED, corrupts_fully_reshardable, refuse_format
from .gather_state import gather, require_gloo, scatter
from .group_loading import disambiguated, has_third_state, take_over
from .layout import main_parameters
from .param_gather import WARNING, finish_param_gather, is_outstanding
from .versions import STATE_KEYS_ARE_A_PROPERTY

#: Megatron's name for the weights among the states of a parameter.
PARAM = "param"


class AltoDistributedOptimizer(DistributedOptimizer):
    """A DistributedOptimizer becomes one by its ``__class__``; its constructor is Megatron's."""

    def prepare_for_alto(self) -> None:
        # Megatron's own map from a parameter to its place among the shards is wrong where dtypes mix in a group.
        self._alto_shards = dict(main_parameters(self))
        self._alto_describing = False  # a state_dict is being described, for loading into
        self._alto_stepped = False
        if configs.of(self.config, "checkpoint_format"):
            refuse_format(self, configs.of(self.config, "checkpoint_format"), is_loading=False)
        elif corrupts_fully_reshardable(self):
            warnings.warn(f"do not save as fully_reshardable: {CORRUPTED}", stacklevel=5)
        self._alto_without_third = False  # grad_ema is left out, because it is missing or goes its own way

    def step_with_ready_grads(self) -> bool:
        self._alto_stepped = True
        return bool(super().step_with_ready_grads())

    # -- which states ---------------------------------------------------------------------------------

    @property
    def optimizer_state_keys(self) -> tuple[str, ...]:
        third = has_third_state(self.optimizer.param_groups) and not self._alto_without_third
        return ALTO.state_keys if third else (states.EXP_AVG, states.EXP_AVG_SQ)

    @contextmanager
    def _without_third(self, really: bool = True) -> Iterator[None]:
        before, self._alto_without_third = self._alto_without_third, really or self._alto_without_third
        try:
            yield
        finally:
            self._alto_without_third = before

    @property
    def _adopts(self) -> bool:
        return bool(configs.of(self.config, "adopt"))

    # -- one parameter --------------------------------------------------------------------------------

    def _get_main_param_and_optimizer_states(self, model_param: torch.Tensor) -> dict[str, torch.Tensor]:
        shard = self._alto_shards[model_param]
        state = self.optimizer.state[shard]
        return {PARAM: shard, **{key: state[key] for key in self.optimizer_state_keys}}

    @torch.no_grad()  # shards of float32 parameters are views of them
    def _set_main_param_and_optimizer_states(self, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        missing = [key for key in (PARAM, *self.optimizer_state_keys) if key not in tensors]
        if missing:
            raise ValueError(
                f"the checkpoint has no {', '.join(map(repr, missing))} for a parameter of shape "
                f"{tuple(model_param.shape)}; a run resumed from it would differ from the saved one"
            )
        for key, tensor in self._get_main_param_and_optimizer_states(model_param).items():
            tensor.copy_(tensors[key])

    # -- what is the same on all data-parallel ranks --------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Groups with their step count, and the loss scale; also on a rank that holds no shard.

        Megatron-LM calls it on one rank alone, so it cannot gather weights; it warns.
        """
        if self._alto_stepped and not self._alto_describing and any(map(is_outstanding, self.model_chunks)):
            warnings.warn(WARNING, stacklevel=2)
        groups = [{**group} for group in self.optimizer.param_groups]
        for group in groups:
            del group["params"]
        state_dict: dict[str, Any] = {"optimizer": {"param_groups": groups}}
        if self.grad_scaler:
            state_dict["grad_scaler"] = self.grad_scaler.state_dict()
        return state_dict

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._alto_describing:
            return  # Megatron allocates states this way; they are
        self.optimizer.initialize_state()
        inner = state_dict["optimizer"]
        inner["param_groups"] = take_over(inner["param_groups"], self.optimizer.param_groups, self._adopts)
        with self._without_third(self._adopts), disambiguated(inner["param_groups"], self.optimizer):
            super().load_state_dict(state_dict)
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                state = self.optimizer.state[param]
                state[states.STEP] = states.new_step() + float(group[states.STEP])  # its own: counted in place
                if self._adopts:
                    state[states.GRAD_EMA].zero_()

    # -- the formats ----------------------------------------------------------------------------------

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Any = None,
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        refuse_format(self, sharding_type or (metadata or {}).get("distrib_optim_sharding_type"), is_loading)
        if not is_loading:
            finish_param_gather(self.model_chunks)  # the model is saved with it
        self.optimizer.initialize_state()
        self._alto_describing = is_loading
        try:
            with self._without_third(is_loading and self._adopts):
                return super().sharded_state_dict(model_sharded_state_dict or {}, is_loading, sharding_type, metadata)
        finally:
            self._alto_describing = False

    def get_parameter_state_dp_zero(
        self, use_gloo_comm: bool = True, empty_data: bool = False, return_on_all_ranks: bool = False
    ) -> Any:
        if use_gloo_comm:
            require_gloo(self)
        if not empty_data:
            finish_param_gather(self.model_chunks)
        self.optimizer.initialize_state()
        state = super().get_parameter_state_dp_zero(use_gloo_comm, empty_data, return_on_all_ranks)
        if not STATE_KEYS_ARE_A_PROPERTY and states.GRAD_EMA in self.optimizer_state_keys:
            gather(self, states.GRAD_EMA, state, use_gloo_comm, empty_data, return_on_all_ranks)
        return state

    @torch.no_grad()
    def load_parameter_state_from_dp_zero(self, state_dict: Any, *, update_legacy_format: bool = False) -> None:
        if update_legacy_format:
            raise ValueError(
                "ALTO does not read the checkpoint format from before February 2024: convert the checkpoint with "
                "Adam first (--ckpt-convert-update-legacy-dist-opt-format), then load the result with --alto-adopt"
            )
        self.optimizer.initialize_state()
        with self._without_third(self._adopts):
            keys, adopts = self.optimizer_state_keys, self._adopts
            run_on_rank0(lambda: _refuse_incomplete(state_dict, keys, adopts), require_gloo(self))
            apart = not STATE_KEYS_ARE_A_PROPERTY and states.GRAD_EMA in self.optimizer_state_keys
            with self._without_third(apart):
                super().load_parameter_state_from_dp_zero(state_dict)
            if apart:
                scatter(self, states.GRAD_EMA, state_dict)


def _refuse_incomplete(state_dict: Any, keys: tuple[str, ...], adopts: bool) -> None:
    """Raise for a gathered checkpoint that has other states; only data-parallel rank 0 has it in hand."""
    for index, by_dtype in (state_dict or {}).items():
        if not isinstance(by_dtype, dict):
            continue  # a remark of Megatron's on the format
        for tensors in by_dtype.values():
            missing = [key for key in (PARAM, *keys) if key not in tensors]
            if missing:
                raise ValueError(
                    f"buffer {index} of the checkpoint has no {', '.join(map(repr, missing))}; a run resumed from it "
                    "would differ from the saved one. To take over Adam's, set alto_adopt=True (--alto-adopt)"
                )
            if adopts and states.GRAD_EMA in tensors:
                raise ValueError(
                    f"the checkpoint has {states.GRAD_EMA!r}: load it with alto_adopt=False (leave out --alto-adopt)"
                )
