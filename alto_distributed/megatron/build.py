"""From Megatron's optimizer for Adam to the same wrapper around ALTO.

Megatron decides on wrappers, parameter groups, process groups and buffers while it builds; none of that
depends on the algorithm, but the function that does it knows a few names only. So it builds for Adam,
which has no state yet, and then the algorithm is exchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import __version__ as megatron_version
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer

from .. import states, version
from ..diagnostics import Reading
from ..hyperparameters import Hyperparameters
from ..optimizer import ALTO
from ..param_groups import embedding_parameters
from ..sharding.agreement import require_agreement
from ..sharding.collective import everyone
from . import config as configs
from . import cpu_offload, fp8, monitor, precision_aware
from .distributed import AltoDistributedOptimizer
from .expert_parallelism import AltoChainedOptimizer
from .fsdp import AltoFSDPOptimizer, is_fsdp
from .layout import LayoutBuilder
from .nonfinite import skip_nonfinite
from .refuse import refuse_unsupported
from .unsharded_wrappers import AltoFloat16Optimizer, AltoFP32Optimizer
from .versions import warn_if_untested

#: Megatron's wrapper -> the same with ALTO's three states in its checkpoints.
WRAPPERS: dict[type, type] = {
    FP32Optimizer: AltoFP32Optimizer,
    Float16OptimizerWithFloat16Params: AltoFloat16Optimizer,
    DistributedOptimizer: AltoDistributedOptimizer,
}

#: Of the config, besides hyperparameters: what must be the same on all ranks.
_OPTIONS = ("embeddings", "kernel", "diagnostics_every", "skip_nonfinite", *states.STATE_DTYPES)


def build(original: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
    """What ``get_megatron_optimizer`` returns for ALTO; ``bound`` are the arguments of its call."""
    config, model_chunks = bound.arguments["config"], bound.arguments["model_chunks"]
    warn_if_untested()
    hyper = configs.check(config)
    refuse_unsupported(config, model_chunks, bound.arguments.get("config_overrides"))
    configs.warn_of_adams(config)

    quantized = fp8.initial_weights(model_chunks)
    name, config.optimizer = config.optimizer, "adam"
    try:
        with precision_aware.hidden(config), cpu_offload.hidden(config):
            built = original(*bound.args, **bound.kwargs)
    finally:
        config.optimizer = name

    wrappers = _wrappers(built)
    for wrapper in wrappers:
        if type(wrapper) not in WRAPPERS:
            raise ValueError(
                f"ALTO does not know how Megatron's {type(wrapper).__name__} shards parameters. It works with "
                f"{', '.join(known.__name__ for known in WRAPPERS)}: turn off the feature that brings this one in"
            )
    plain = _embeddings(model_chunks) if configs.of(config, "embeddings") == "adam" else ()
    layouts = LayoutBuilder(model_chunks, bound.arguments.get("pg_collection"), plain, quantized)
    if bound.arguments.get("pg_collection") is None:  # else this model's ranks need not be all of the job's
        _require_agreement(config, hyper, layouts)
    for wrapper in wrappers:
        if wrapper.optimizer is not None:  # all is frozen: a stub that only takes part in Megatron's own norms
            _exchange(wrapper, hyper, layouts)
        if configs.of(config, "skip_nonfinite"):
            skip_nonfinite(wrapper)
    if type(built) is ChainedOptimizer:
        built.__class__ = AltoChainedOptimizer
    if configs.of(config, "diagnostics_every"):
        monitor.watch(altos(built))
    return built


def _embeddings(model_chunks: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Weights of embeddings, and an output layer's on another pipeline stage that must stay equal to one."""
    yield from embedding_parameters(model_chunks)
    for chunk in model_chunks:
        yield from (param for param in chunk.parameters() if getattr(param, "shared_embedding", False))


def _require_agreement(config: Any, hyper: Hyperparameters, layouts: LayoutBuilder) -> None:
    """All ranks have one config; those of a data-parallel group have the same part of the model."""
    world = everyone()
    if world is None:
        return
    common = {
        "the version of alto_distributed": version.__version__,
        "the version of torch": str(torch.__version__),
        "the version of megatron-core": megatron_version,
        **hyper.in_words("in the config"),
        **{f"alto_{option}": repr(configs.of(config, option)) for option in _OPTIONS},
    }
    own = {
        f"parameter {place}": f"{name!r} of shape {tuple(param.shape)}"
        for place, (param, name) in enumerate(layouts.names.items())
    }
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    require_agreement(world, common, own, min(torch.distributed.get_process_group_ranks(replicas)))


def altos(optimizer: Any) -> Iterator[ALTO]:
    """The ALTOs inside what ``get_megatron_optimizer`` returned (one, or one more for experts)."""
    for wrapper in _wrappers(optimizer):
        if isinstance(wrapper.optimizer, ALTO):
            yield wrapper.optimizer


def diagnostics(optimizer: Any) -> dict[str, Reading]:
    """The latest readings of every parameter with a shard on this rank, if ``alto_diagnostics_every`` is set."""
    return {name: reading for alto in altos(optimizer) for name, reading in alto.diagnostics().items()}


def _wrappers(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _exchange(wrapper: Any, hyper: Hyperparameters, layouts: LayoutBuilder) -> None:
    """Put ALTO in the place of a wrapper's Adam."""
    adam, config = wrapper.optimizer, wrapper.config
    # Shards of float32 parameters are views, which torch.optim refuses as parameters: they come in behind its back.
    alto = ALTO(
        [{"params": []}],
        kernel=configs.of(config, "kernel"),
        diagnostics_every=configs.of(config, "diagnostics_every"),
        **{name: configs.of(config, name) for name in states.STATE_DTYPES},
        **hyper.as_group(),
    )
    for group in adam.param_groups:
        _make_altos(group, adam.defaults, hyper)
    alto.param_groups = adam.param_groups
    alto.register_step_post_hook(_count_steps)

    wrapper.optimizer = alto
    wrapper.init_state_fn = _initialize_state
    if is_fsdp(wrapper):
        wrapper.__class__ = AltoFSDPOptimizer
    else:
        wrapper.__class__ = WRAPPERS[type(wrapper)]
        if config.optimizer_cpu_offload:
            cpu_offload.offload(wrapper)
        alto.set_layouts(*layouts.build(wrapper), replicas=layouts.replicas)
    if isinstance(wrapper, (AltoDistributedOptimizer, AltoFSDPOptimizer)):
        wrapper.prepare_for_alto()


def _make_altos(group: dict[str, Any], adams: dict[str, Any], hyper: Hyperparameters) -> None:
    """A parameter group of Adam's into one of ALTO's, in place: Megatron holds on to it."""
    for key in adams.keys() - {"lr"}:
        group.pop(key, None)
    group.update({**hyper.as_group(), "lr": group["lr"]})
    decay = group.get("wd_mult", group.get("pre_wd_mult", 1.0))  # NeMo's name for it is the second
    # The scheduler multiplies by wd_mult at every step; until its first, or without one, this holds.
    group["weight_decay"] = hyper.weight_decay * decay
    group["decayed"] = decay != 0  # also while a schedule of the weight decay passes through 0
    group[states.STEP] = 0
    if hyper.alpha != 0:  # also where this rank has no parameter of the group: rank 0's groups are what is saved
        group[states.GRAD_EMA_BETA1] = hyper.betas[0]


def _count_steps(alto: torch.optim.Optimizer, *_: Any) -> None:
    """A step count in every group, also those without a parameter here: that is the one Megatron saves."""
    for group in alto.param_groups:
        group[states.STEP] += 1


def _initialize_state(alto: ALTO, config: Any = None) -> None:
    """Megatron calls this before it loads into, or saves, an optimizer that has not stepped."""
    del config
    alto.initialize_state()
