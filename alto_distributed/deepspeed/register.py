"""Registration: the few places where DeepSpeed has to know about ALTO.

Names go into DeepSpeed's two lists; some methods of its engine and its config are wrapped, and each passes
everything that is not ours on to the original.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

from .. import states
from ..kernels.hugepages import collapse
from ..optimizer import ALTO
from ..param_groups import whole_shape
from ..sharding.agreement import require_agreement
from ..sharding.collective import everyone
from . import checkpoint, master_weights, offload_states, one_cycle, partial_offload
from .build import (
    BUILDERS,
    OPTIMIZERS,
    build,
    refuse_misplaced,
    refuse_other_than_object,
    rename_lamb,
    split_bare_parameters,
)
from .layout import LayoutBuilder
from .monitor import monitor_events
from .nonfinite import skip_nonfinite
from .notices import warn_of_dropped, warn_of_other_peak
from .nvme import check_swapping, swapped_sub_groups
from .refuse import refuse_unsupported
from .versions import check_version, warn_if_untested, warn_of_gloo
from .wrap import wrap_method


def register() -> None:
    """Register with the installed DeepSpeed. Idempotent.

    Raises:
        ValueError: DeepSpeed lacks something that ALTO needs.
    """
    check_version()
    if getattr(DeepSpeedEngine._configure_optimizer, "knows_alto", False):
        return
    DEEPSPEED_OPTIMIZERS.extend(BUILDERS)
    ZERO_SUPPORTED_OPTIMIZERS.extend(OPTIMIZERS)
    wrap_method(DeepSpeedConfig, "_initialize_params", _initialize_params)
    wrap_method(DeepSpeedEngine, "_do_sanity_check", _do_sanity_check)
    wrap_method(DeepSpeedEngine, "_configure_optimizer", _configure_optimizer)
    wrap_method(DeepSpeedEngine, "_configure_basic_optimizer", _configure_basic_optimizer)
    wrap_method(DeepSpeedEngine, "_configure_fp16_optimizer", _configure_fp16_optimizer)
    wrap_method(DeepSpeedEngine, "_take_model_step", _take_model_step)
    checkpoint.install()
    offload_states.install()
    partial_offload.install()
    master_weights.install()
    one_cycle.install()


def _initialize_params(original: Callable[..., Any], config: Any, entries: Any) -> None:
    refuse_other_than_object(entries.get("optimizer"))
    original(entries)


def _do_sanity_check(original: Callable[..., Any], engine: Any) -> None:
    rename_lamb(engine._config)
    original()


def _configure_optimizer(original: Callable[..., Any], engine: Any, client: Any, parameters: list[Any]) -> None:
    if client is None and engine.optimizer_name() in BUILDERS:
        refuse_misplaced(engine._config)
        refuse_unsupported(engine, parameters)
        original(None, split_bare_parameters(parameters, engine.optimizer_params(), engine.module))
    elif isinstance(client, OPTIMIZERS):
        _accept_client(engine, client)
        original(client, parameters)
    elif client is not None and not isinstance(client, torch.optim.Optimizer):

        def build_and_look(params: Any) -> Any:
            optimizer = client(params)
            if isinstance(optimizer, OPTIMIZERS):
                _accept_client(engine, optimizer)
            return optimizer

        original(build_and_look, parameters)
    else:
        original(client, parameters)
    warn_of_dropped(engine)
    if isinstance(engine.basic_optimizer, OPTIMIZERS):
        warn_of_other_peak(engine)
        _attach(engine)


def _accept_client(engine: Any, optimizer: Any) -> None:
    """A client-built optimizer of ours, treated as if the JSON had named it."""
    refuse_unsupported(engine, optimizer.param_groups)
    # DeepSpeed asks clients for its own CPU optimizers under offload; ours steps where its shards are.
    engine._config.zero_force_ds_cpu_optimizer = False


def _configure_basic_optimizer(original: Callable[..., Any], engine: Any, parameters: list[Any]) -> Any:
    if engine.optimizer_name() in BUILDERS:
        return build(engine.optimizer_name(), parameters, dict(engine.optimizer_params() or {}))
    return original(parameters)


def _configure_fp16_optimizer(original: Callable[..., Any], engine: Any, optimizer: Any, *args: Any) -> Any:
    if isinstance(optimizer, OPTIMIZERS):
        with not_stepping(optimizer):
            return original(optimizer, *args)
    return original(optimizer, *args)


@contextmanager
def not_stepping(optimizer: Any) -> Iterator[None]:
    """The wrapper of stage 0 steps once with zero gradients to have state allocated: the decay would shrink
    the weights, and counting would start at 1."""
    before = optimizer.__dict__.get("step")
    optimizer.step = lambda *_: None
    try:
        yield
    finally:
        del optimizer.step
        if before is not None:
            optimizer.step = before


def _attach(engine: Any) -> None:
    """Tell the optimizer what its tensors are, and allocate all of its states.

    ZeRO links parameters to states after the first group's step; a state that is allocated later is
    never found by ``safe_get_full_optimizer_state`` and the universal checkpoint.
    """
    optimizer = engine.basic_optimizer
    warn_if_untested()
    warn_of_gloo(engine)
    check_swapping(engine)
    master_weights.round_masters(engine)
    if isinstance(optimizer, ALTO):
        _require_agreement(engine, optimizer)
        optimizer.set_layouts(LayoutBuilder(engine).build())
        sub_groups = getattr(engine.optimizer, "sub_group_to_group_id", None)
        if sub_groups is None:
            optimizer.initialize_state()
        else:  # stage 3 shows the optimizer one sub-group at a time
            swapped = swapped_sub_groups(engine.optimizer)
            for sub_group, flat in enumerate(engine.optimizer.fp32_partitioned_groups_flat):
                if sub_group in swapped:
                    continue
                group = optimizer.param_groups[sub_groups[sub_group]]
                group["params"] = [flat]
                optimizer.initialize_state()
                group["params"] = []
        for flat in optimizer.state:  # offload allocates gradients with the weights, and keeps both
            for tensor in (flat, flat.grad):
                if tensor is not None:
                    collapse(tensor)
        if optimizer.skip_nonfinite:
            skip_nonfinite(engine)
        optimizer.register_step_post_hook(_count_group_steps)
    else:
        checkpoint.link_late_states(engine)


def _require_agreement(engine: Any, optimizer: ALTO) -> None:
    """All ranks run one program with one config; those of a data-parallel group have the same part of the model."""
    world = everyone()
    if world is not None:
        own = {
            f"parameter {place}": f"{name!r} of shape {whole_shape(param)}"
            for place, (param, name) in enumerate(engine.param_names.items())
        }
        part = min(torch.distributed.get_process_group_ranks(engine.seq_data_parallel_group))
        require_agreement(world, optimizer.description(), {**optimizer.description_of_groups(), **own}, part)


def _take_model_step(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """After a measured step, a summary of it goes to DeepSpeed's monitor (TensorBoard, CSV, ...)."""
    result = original(*args, **kwargs)
    optimizer = getattr(engine, "basic_optimizer", None)
    if isinstance(optimizer, ALTO) and engine.monitor.enabled and engine.global_rank == 0:
        events = monitor_events(optimizer, engine.global_samples)
        if events:
            engine.monitor.write_events(events)
    return result


def _count_group_steps(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A step count in the group as well: DeepSpeed's elastic checkpoints look for it there."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if states.STEP in optimizer.state.get(param, {}):
                group[states.STEP] = int(optimizer.state[param][states.STEP])
