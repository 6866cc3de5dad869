"""What differs between releases of megatron-core, and which of them are known to work.

A release is not refused for its number: a main branch keeps its number while its code changes. What ALTO calls or
overrides must be there, with the parameters that it has. How shards are laid out is verified against the model's
weights when the optimizer is built (:mod:`..sharding.proof`).
"""

from __future__ import annotations

import inspect
import re
import warnings

import megatron.core
from megatron.core import optimizer as core_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from ..errors import UnsupportedVersion

#: Releases in which the tests ran (scripts/matrix.py), oldest first; the last is Megatron-LM's main branch of August
#: 2026. Others warn.
SUPPORTED_VERSIONS = ("0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2", "0.20.0")

#: What the README's commands install.
_PINNED = "0.16.1"

#: From 0.19 on the distributed optimizer asks one property for the names of its states. Before, two
#: names are written out in the methods that gather and scatter, and a third state needs its own way.
STATE_KEYS_ARE_A_PROPERTY = isinstance(getattr(DistributedOptimizer, "optimizer_state_keys", None), property)

#: Methods that are called or overridden here, with the parameters they must have.
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
    """Raise an UnsupportedVersion if the installed megatron-core lacks something that ALTO needs."""
    for name, parameters in _EXPECTED.items():
        method = getattr(DistributedOptimizer, name, None)
        if method is None:
            raise missing(f"DistributedOptimizer has no method {name}")
        if tuple(inspect.signature(method).parameters)[1:] != parameters:
            raise missing(f"DistributedOptimizer.{name} does not take ({', '.join(parameters)})")
    if tuple(inspect.signature(core_optimizer.get_megatron_optimizer).parameters)[:2] != ("config", "model_chunks"):
        raise missing("get_megatron_optimizer does not take (config, model_chunks, ...)")


def missing(what: str) -> UnsupportedVersion:
    """The error for something that is not there."""
    return UnsupportedVersion(
        f"ALTO does not work with megatron-core {megatron.core.__version__}: {what}. Install a supported version "
        f"({', '.join(SUPPORTED_VERSIONS[:-1])}) with the Megatron-LM that goes with it; "
        f"pip install megatron-core=={_PINNED}"
    )


def is_tested() -> bool:
    """Whether the tests ran with the installed release."""
    found = re.match(r"\d+\.\d+\.\d+", megatron.core.__version__)
    return found is not None and found.group() in SUPPORTED_VERSIONS


def warn_if_untested() -> None:
    """Say that the tests did not run with the installed release."""
    if not is_tested():
        warnings.warn(
            f"ALTO: the tests ran with megatron-core {', '.join(SUPPORTED_VERSIONS)}, and {megatron.core.__version__} "
            "is installed. What ALTO reads from it is verified; the rest is untested.",
            stacklevel=2,
        )
