"""FSDP2 state through torch.distributed.checkpoint: saved at 4 ranks, loaded at 4, 2 and 1.

World 4 leaves the checkpoint and, beside it, where an uninterrupted run ends.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from alto_distributed import ALTO, E, adopt, param_groups
from tests.helpers import devices
from tests.helpers.cases import after, each, worlds
from tests.helpers.sharded import HYPER, assert_same, assert_straddles, full, network, sharded_network, train

MAKERS = {
    "alto": lambda m: ALTO(param_groups(m, 1e-2), **HYPER),
    "lamb": lambda m: ALTO(param_groups(m, 1e-2), **{**HYPER, "alpha": 0.0}),
    "eadam": lambda m: E(torch.optim.Adam(m.parameters(), 1e-2)),
}


def fresh(name):
    model = sharded_network(devices.mesh(dist.get_world_size()))
    return model, MAKERS[name](model)


@worlds(4)
@each(name=MAKERS)
def case_save(directory, name):
    model, optimizer = fresh(name)
    assert_straddles(model, dist.group.WORLD)
    train(model, optimizer, sliced=True, steps=4)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=directory / name)
    train(model, optimizer, sliced=True, steps=4)
    at_end = {k: full(p) for k, p in model.named_parameters()}
    averages = {k: full(optimizer.state[p]["grad_ema"]) for k, p in model.named_parameters() if name != "lamb"}
    if dist.get_rank() == 0:
        torch.save((at_end, averages), directory / f"{name}.after")


@worlds(4, 2, 1)
@each(name=MAKERS)
@after("case_save", world=4)
def case_load_and_continue(directory, name):
    model, optimizer = fresh(name)
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=directory / name)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    for p in model.parameters():
        state = optimizer.state[p]
        assert state["step"] == 4, state["step"]
        assert ("grad_ema" in state) == (name != "lamb")
        assert all(isinstance(v, DTensor) for k, v in state.items() if k != "step")
    train(model, optimizer, sliced=True, steps=4)
    expected, averages = torch.load(directory / f"{name}.after", weights_only=True)
    # At the world size that saved: bit for bit. At another, gradients are added up in another order.
    tolerance = dict(rtol=0, atol=0) if dist.get_world_size() == 4 else dict(rtol=1e-10, atol=1e-12)
    for key, p in model.named_parameters():
        torch.testing.assert_close(full(p), expected[key], **tolerance)
        if name != "lamb":
            torch.testing.assert_close(full(optimizer.state[p]["grad_ema"]), averages[key], **tolerance)


@worlds(2)
@each({"flattened": {"flatten_optimizer_state_dict": True}, "full": {"full_state_dict": True}})
def case_other_state_dicts(setting):
    """The other two forms that torch.distributed.checkpoint offers."""
    options = StateDictOptions(**setting)
    model, optimizer = fresh("alto")
    train(model, optimizer, sliced=True, steps=2)
    # A copy: like torch's own optimizers, ALTO takes loaded tensors as they are where they fit.
    weights, states = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    if options.full_state_dict:  # only rank 0 has it; the others receive their pieces on loading
        options.broadcast_from_rank0 = True
    again, fresh_optimizer = fresh("alto")
    set_state_dict(again, fresh_optimizer, model_state_dict=weights, optim_state_dict=states, options=options)
    for m, o in ((model, optimizer), (again, fresh_optimizer)):
        train(m, o, sliced=True, steps=2)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(full(p), full(q), rtol=0, atol=0)


WAYS = {
    "state_dict": lambda model, optimizer, folder: optimizer.state_dict(),
    "by name": lambda model, optimizer, folder: get_optimizer_state_dict(model, optimizer),
    "folder": lambda model, optimizer, folder: saved_in(folder, get_optimizer_state_dict(model, optimizer)),
}


def saved_in(folder, states):
    dcp.save({"optim": states}, checkpoint_id=folder)
    return folder


@worlds(2)
@each(way=WAYS)
def case_adamw_is_adopted_and_given_back(directory, way):
    """As in one process: three steps of AdamW, three of ALTO with its moments, three of AdamW again."""
    models = [sharded_network(devices.mesh(2)), network()]
    assert_straddles(models[0], dist.group.WORLD)
    for model, sliced in zip(models, (True, False), strict=True):
        makers = [
            lambda m: torch.optim.AdamW(m.parameters(), 1e-3),
            lambda m: ALTO(param_groups(m, 1e-2), **HYPER),
            lambda m: torch.optim.AdamW(m.parameters(), 1e-3),
        ]
        before = None
        for k, make in enumerate(makers):
            optimizer = make(model)
            if before is not None:
                source = WAYS[way](model, before, directory / f"adopt {way} {k}") if sliced else before.state_dict()
                adopt(optimizer, source, model)
            train(model, optimizer, sliced=sliced, steps=3)
            assert {int(optimizer.state[p]["step"]) for p in model.parameters()} == {3 * k + 3}
            before = optimizer
    assert_same(*models)


@worlds(4)
def case_a_checkpoint_of_whole_tensors_is_refused():
    """A plain state_dict has whole tensors where a shard is needed: taking one for the other would be silent."""
    model, optimizer = fresh("alto")
    train(model, optimizer, sliced=True, steps=1)
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state.update({k: full(v) for k, v in state.items() if k != "step"})
    with pytest.raises(ValueError, match="torch.distributed.checkpoint"):
        optimizer.load_state_dict(saved)
