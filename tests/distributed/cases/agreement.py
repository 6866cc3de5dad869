"""Ranks that disagree are told at the first step, or when an engine is built: all of them, what, and where."""

import datetime

import pytest
import torch
import torch.distributed as dist

from alto_distributed import ALTO, LogicalParameter, Segment, ShardLayout, param_groups, version
from alto_distributed.pretrain.config.settings import parse
from alto_distributed.pretrain.runtime.same_settings import same_settings
from alto_distributed.sharding.agreement import require_agreement
from tests.helpers import devices
from tests.helpers.cases import each, worlds
from tests.helpers.sharded import HYPER, sharded_network


def step(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()


def refused(optimizer, *said):
    """By all ranks, before anything has changed, with words that say what and where."""
    with pytest.raises(ValueError, match="do not agree|do not fit together") as error:
        step(optimizer)
    for words in said:
        assert words in str(error.value), str(error.value)
    assert not optimizer.state


def is_last():
    return dist.get_rank() == dist.get_world_size() - 1


#: Another value, and the usual one.
CHANGED = {
    "lr": (0.25, HYPER["lr"]),
    "alpha": (0.5, HYPER["alpha"]),
    "layerwise": ("all", "decayed"),
    "bias_correction": (False, True),
}


@worlds(2, 4)
@each(CHANGED)
def case_other_hyperparameters_on_one_rank(label, setting):
    last, (value, usual) = dist.get_world_size() - 1, setting
    others = ", ".join(map(str, range(last)))
    model = sharded_network(devices.mesh(dist.get_world_size()))
    options = {**HYPER, label: value} if is_last() else HYPER
    said = f"{label} of parameter group 0 is {usual!r} on rank {others} and {value!r} on rank {last}"
    refused(ALTO(param_groups(model, 1e-2), **options), said)


CHANGED_OPTIONS = {
    "kernel": ("reference", "kernel is auto on rank 0 and reference on rank 1"),
    "diagnostics_every": (5, "diagnostics_every is 0 on rank 0 and 5 on rank 1"),
    "skip_nonfinite": (True, "skip_nonfinite is False on rank 0 and True on rank 1"),
}


@worlds(2)
@each(CHANGED_OPTIONS)
def case_other_options_on_one_rank(label, setting):
    value, said = setting
    model = sharded_network(devices.mesh(2))
    refused(ALTO(param_groups(model, 1e-2), **HYPER, **({label: value} if is_last() else {})), said)


@worlds(2)
def case_another_version_on_one_rank():
    mesh = devices.mesh(2)
    number = version.__version__
    try:
        if is_last():
            version.__version__ = "0.0.9"
        optimizer = ALTO(param_groups(sharded_network(mesh), 1e-2), **HYPER)
        refused(optimizer, f"the version of alto_distributed is {number} on rank 0 and 0.0.9 on rank 1")
    finally:
        version.__version__ = number


def flat_optimizer(names, shapes=None, *, held=3, group=None):
    """A flat tensor of pieces, ``held`` elements of each parameter."""
    shapes = shapes or [(2, 3)] * len(names)
    logical = [LogicalParameter(n, s, (group or dist.group.WORLD,)) for n, s in zip(names, shapes, strict=True)]
    flat = torch.arange(float(held * len(names)), device=devices.here())
    optimizer = ALTO([{"params": [flat]}], **HYPER)
    optimizer.set_layouts({flat: ShardLayout(len(flat), [Segment(p, i * held, held) for i, p in enumerate(logical)])})
    return optimizer


@worlds(2)
def case_other_parameters_and_layouts_on_one_rank():
    refused(
        flat_optimizer(["a", "c" if is_last() else "b"]),
        "parameter 1 is 'b' of shape (2, 3) over [2] ranks on rank 0 and 'c' of shape (2, 3) over [2] ranks on rank 1",
    )
    refused(flat_optimizer(["a", "b"], [(2, 3), (3, 2) if is_last() else (2, 3)]), "(3, 2) over [2] ranks on rank 1")
    refused(flat_optimizer(["a", "b"][: 1 if is_last() else 2]), "parameter 1 is", "missing on rank 1")
    refused(flat_optimizer(["a", "b"], held=4 if is_last() else 3), "'a', which has 6 elements, they hold 7 in all")
    step(flat_optimizer(["a", "b"]))


@worlds(4)
def case_other_parts_of_the_model_may_differ():
    """Two pipeline stages of two ranks: other names, groups and rates in each are no disagreement."""
    stage = dist.get_rank() // 2
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    step(flat_optimizer([f"stage {stage}.w"], group=pairs[stage]))
    optimizer = flat_optimizer([f"stage {stage}.{dist.get_rank() if stage else ''}"], group=pairs[stage])
    if stage:
        refused(optimizer, "on rank 2 and 'stage 1.3'")
    else:
        step(optimizer)
    common, own = {"rate": "0.1"}, {"parameter 0": f"of stage {stage}"}
    require_agreement(dist.group.WORLD, common, own, position=stage)
    with pytest.raises(ValueError, match="rate is 0.1 on rank 0, 1, 2 and 0.2 on rank 3"):
        require_agreement(dist.group.WORLD, {"rate": "0.2" if is_last() else "0.1"}, own, position=stage)
    with pytest.raises(ValueError, match="parameter 0 is of stage 1 on rank 2 and of another on rank 3"):
        require_agreement(dist.group.WORLD, common, {"parameter 0": "of another"} if is_last() else own, position=stage)


@worlds(2)
def case_a_rank_that_plans_anew_does_not_wait_for_the_others():
    """Only one of them loads its state: the next step has the norms' collective, and no other."""
    optimizer = flat_optimizer(["a", "b"])
    step(optimizer)
    if is_last():
        optimizer.load_state_dict(optimizer.state_dict())
    step(optimizer)


@worlds(2)
def case_a_rank_that_does_not_come_is_reported_in_time():
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    if dist.get_rank() == 0:
        with pytest.raises(
            RuntimeError, match=r"rank 0 compared its settings with ranks \[0, 1\], and not all of them"
        ):
            require_agreement(group, {"a": "1"})


@worlds(2)
def case_settings_of_a_run():
    same_settings(parse({"data": {"directory": f"somewhere-{dist.get_rank()}"}}))
    with pytest.raises(ValueError, match=r"optimizer.lr is 0.01 on rank 0 and 0.02 on rank 1"):
        same_settings(parse({"optimizer": {"lr": 0.02 if is_last() else 0.01}}))
