"""Megatron-FSDP: its distributed optimizer with ALTO inside, and ALTO's three states in ``fsdp_dtensor`` checkpoints.

Parameters, gradients and states are DTensors, which know how they are laid out over the ranks. So Megatron's wrapper
needs no layouts, and no format but its own.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer import fsdp_dtensor_checkpoint

from .. import states
from ..sharding import dtensor
from . import config as configs
from .group_loading import take_over

FORMAT = "fsdp_dtensor"

#: Functions of Megatron's that cut fused weights for a checkpoint, and of the states those that they know by name.
#: Only the first is in 0.16.1.
_SPLITTERS = ("handle_swiglu_in_state_dict", "handle_gdn_in_state_dict", "handle_mla_down_proj_in_state_dict")

#: Of a group, while its values are to be loaded. One that stays was not in the checkpoint.
_NOT_LOADED = "not in the checkpoint"


def is_fsdp(holder: Any) -> bool:
    """Whether a model chunk, or a wrapper of Megatron's, is of Megatron-FSDP."""
    return bool(getattr(getattr(holder, "ddp_config", None), "use_megatron_fsdp", False))


class AltoFSDPOptimizer(DistributedOptimizer):
    """A DistributedOptimizer of Megatron-FSDP becomes one by its ``__class__``; its constructor is Megatron's."""

    def prepare_for_alto(self) -> None:
        if configs.of(self.config, "adopt"):
            raise ValueError(
                "ALTO under Megatron: alto_adopt does not read checkpoints of Megatron-FSDP; start with the weights "
                "alone (--finetune, or --no-load-optim, without --alto-adopt)"
            )
        if self.ddp_config.data_parallel_sharding_strategy == "no_shard" and self.config.clip_grad > 0:
            warnings.warn(
                "with data_parallel_sharding_strategy no_shard, Megatron-FSDP clips by a gradient norm that counts the "
                "gradients of every data-parallel rank (measured in megatron-core 0.16.1). Set another "
                "strategy (--data-parallel-sharding-strategy optim_grads_params), or clip_grad=0 (--clip-grad 0)",
                stacklevel=5,
            )
        # At once: a rank whose piece of a parameter is empty would save no states of it, and the others wait for it.
        self.optimizer.initialize_state()
        _split_third_state()

    def _copy_model_grads_to_main_grads(self) -> None:
        """Megatron has None where this rank's piece is empty, which would stand for no gradient at all."""
        self._refuse_unsummed_gradients()
        super()._copy_model_grads_to_main_grads()
        for param in self.get_parameters():
            if param.grad is None and dtensor.local(param).numel() == 0:
                param.grad = torch.zeros_like(param)

    def _refuse_unsummed_gradients(self) -> None:
        """Several optimizer instances (HSDP): Megatron-FSDP adds up their gradients at the last microbatch, if it was
        told which one that is."""
        for fsdp in (chunk.module for chunk in self.model_chunks):
            told = getattr(fsdp, "is_last_microbatch", False) or fsdp.model_auto_sync
            if fsdp.dist_index.use_hybrid_fsdp and not told:
                raise ValueError(
                    "ALTO under Megatron: Megatron-FSDP has not added up the gradients of its optimizer instances "
                    "(num_distributed_optimizer_instances above 1), which then train apart, with any optimizer. Set "
                    "--overlap-grad-reduce, or config.no_sync_func = model.no_sync in a script of your own"
                )

    # -- checkpoints ----------------------------------------------------------------------------------

    def _init_optimizer_states_with_dummy_values(self) -> None:
        """Megatron takes a step to have states to load into. They are there."""

    def sharded_param_state_fsdp_dtensor(self, is_loading: bool = False) -> dict[str, Any]:
        described: dict[str, Any] = super().sharded_param_state_fsdp_dtensor(is_loading)
        if is_loading:
            for group in described["param_to_group_meta"].values():
                group["alpha"] = _NOT_LOADED
        return described

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        current = self.optimizer.param_groups
        saved = self._param2group_meta_to_param_groups(state_dict["param_to_group_meta"], current)
        # Megatron loads what it finds, and leaves the rest as it is: Adam's states among ours.
        if any(group.get("alpha") == _NOT_LOADED for group in saved):
            raise ValueError(
                "this checkpoint was saved by another optimizer, and ALTO does not take over Adam's states from "
                "checkpoints of Megatron-FSDP; load the weights alone (--finetune, or --no-load-optim)"
            )
        for group, mine in zip(saved, current, strict=True):
            if group and (group["alpha"] == 0) != (mine["alpha"] == 0):
                raise ValueError(
                    f"the checkpoint has alpha={group['alpha']} and this run alpha={mine['alpha']}, and only one of "
                    f"them has {states.GRAD_EMA!r} (alpha 0 is LAMB): load with the alpha that was saved (--alto-alpha)"
                )
        groups = take_over(saved, current, adopt=False)
        self.optimizer.load_state_dict({"state": state_dict["state"], "param_groups": groups})


def _split_third_state() -> None:
    """Have Megatron cut ``grad_ema`` of fused weights as it cuts the states of Adam. Idempotent."""
    for name in _SPLITTERS:
        original = getattr(fsdp_dtensor_checkpoint, name, None)
        if original is None or getattr(original, "knows_alto", False):
            continue
        ours = _with_third_state(original)
        for module in list(sys.modules.values()):  # megatron.training has imported it by name
            if getattr(module, "__dict__", {}).get(name) is original:
                setattr(module, name, ours)


def _with_third_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that cuts ``exp_avg`` and ``exp_avg_sq``, called once more with ``grad_ema`` for ``exp_avg``."""

    @functools.wraps(original)
    def split(model: Any, model_state_dict: Any, optimizer_state_dict: Any) -> Any:
        cut_model, cut = original(model, model_state_dict, optimizer_state_dict)
        held = {} if optimizer_state_dict is None else optimizer_state_dict["state"]
        if not any(states.GRAD_EMA in state for state in held.values()):
            return cut_model, cut
        lent = {key: {**state, states.EXP_AVG: state.get(states.GRAD_EMA)} for key, state in held.items()}
        _, thirds = original(model, {}, {**optimizer_state_dict, "state": lent})
        third = thirds["state"]
        cut["state"] = {
            key: {**state, states.GRAD_EMA: third[key][states.EXP_AVG]} if states.GRAD_EMA in state else state
            for key, state in cut["state"].items()
        }
        return cut_model, cut

    split.knows_alto = True  # type: ignore[attr-defined]
    return split
