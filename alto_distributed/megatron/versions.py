"""The versions of megatron-core that this folder was made for."""

from __future__ import annotations

import inspect
import re
from typing import NoReturn

import megatron.core
from megatron.core import optimizer as core_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from ..errors import UnsupportedVersion

#: A release, and the state of Megatron-LM's main branch in August 2026. Shards are read from private
#: fields of the distributed optimizer, and a checkpoint's states are collected by its methods; both
#: change between releases without notice.
SUPPORTED_VERSIONS = ("0.16.1", "0.20.0")

#: From 0.19 on the distributed optimizer asks one property for the names of its states. Before, two
#: names are written out in the methods that gather and scatter, and a third state needs its own way.
STATE_KEYS_ARE_A_PROPERTY = isinstance(getattr(DistributedOptimizer, "optimizer_state_keys", None), property)

#: Methods that are called or overridden here, with the parameters they must have (a main branch keeps
#: its version number while its code changes).
_EXPECTED = {
    "_get_model_param_range_map": ("param",),
    "_get_main_param_and_optimizer_states": ("model_param",),
    "_set_main_param_and_optimizer_states": ("model_param", "tensors"),
    "get_parameter_state_dp_zero": ("use_gloo_comm", "empty_data", "return_on_all_ranks"),
    "load_parameter_state_from_dp_zero": ("state_dict", "update_legacy_format"),
    "load_state_dict": ("state_dict",),
    "prepare_grads": (),
    "get_grad_stats_parallel_group": (),
    "sharded_state_dict": ("model_sharded_state_dict", "is_loading", "sharding_type", "metadata"),
}


def check_version() -> None:
    """Raise an UnsupportedVersion if the installed megatron-core is not one whose internals are known."""
    found = re.match(r"\d+\.\d+\.\d+", megatron.core.__version__)
    if found is None or found.group() not in SUPPORTED_VERSIONS:
        raise UnsupportedVersion(
            f"alto_distributed supports megatron-core {' and '.join(SUPPORTED_VERSIONS)}, and "
            f"{megatron.core.__version__} is installed. It reads how private buffers are laid out, which changes "
            f"between releases; pip install megatron-core=={SUPPORTED_VERSIONS[0]}"
        )
    if (found.group() != SUPPORTED_VERSIONS[0]) != STATE_KEYS_ARE_A_PROPERTY:
        _refuse("DistributedOptimizer.optimizer_state_keys is not what it was")
    for name, parameters in _EXPECTED.items():
        method = getattr(DistributedOptimizer, name, None)
        if method is None:
            _refuse(f"DistributedOptimizer has no method {name}")
        if tuple(inspect.signature(method).parameters)[1:] != parameters:
            _refuse(f"DistributedOptimizer.{name} does not take ({', '.join(parameters)})")
    if tuple(inspect.signature(core_optimizer.get_megatron_optimizer).parameters)[:3] != (
        "config",
        "model_chunks",
        "config_overrides",
    ):
        _refuse("get_megatron_optimizer does not take (config, model_chunks, config_overrides, ...)")


def _refuse(what: str) -> NoReturn:
    raise UnsupportedVersion(
        f"this megatron-core calls itself {megatron.core.__version__}, but {what}, so its internals are not the ones "
        f"alto_distributed knows; use megatron-core=={SUPPORTED_VERSIONS[0]} with the Megatron-LM that goes with it"
    )
