"""Megatron's checkpoints of another optimizer: ALTO adopts Adam's if it is asked, and all others are refused."""

import pytest
import torch

from alto_distributed import ALTO
from tests.helpers.cases import after, each, worlds
from tests.helpers.megatron_saves import (
    AFTER,
    BEFORE,
    REFUSALS,
    RUNS,
    adam,
    advance,
    assert_same,
    engine_for,
    hyperparameters,
    load,
    other_engine_for,
    picture,
    place,
    save,
)


@worlds(2)
@each(kind=("fully", "dp"))
@after("megatron_checkpoints.case_save", "DP2", "DP2, LAMB")
def case_lamb_is_not_taken_for_alto(directory, kind):
    """With alpha 0 there is no third state."""
    with other_engine_for(RUNS["DP2"]) as engine, pytest.raises(REFUSALS, match="grad_ema"):
        load(engine, place(directory, "DP2, LAMB", kind), kind)
    refused = pytest.raises(ValueError, match=r"has 'grad_ema' and this run has not.*alto_alpha=-5.0")
    with other_engine_for(RUNS["DP2, LAMB"]) as engine, refused:
        load(engine, place(directory, "DP2", kind), kind)


def moments(engine):
    """This rank's weights and Adam's states, by name."""
    out = {key: engine.gathered(lambda inner, p, key=key: inner.state[p][key]) for key in ALTO.state_keys[:2]}
    model = {name: p.detach().clone() for name, p in engine.named_parameters()}
    return {"model": model, "master": engine.gathered(), **out}


@torch.no_grad()
def put(engine, values, groups, step):
    """Give ALTO by hand what Adam had: weights, moments, the groups' rates and the step count."""
    parameters = dict(engine.named_parameters())
    names = {p: name for name, p in parameters.items()}
    for name, p in parameters.items():
        p.copy_(values["model"][name])
    (wrapper,) = engine.wrappers
    inner = wrapper.optimizer
    inner.initialize_state()
    if engine.distributed:
        held = list(engine.shards(wrapper))
    else:
        held = [(p, 0, getattr(p, "main_param", p)) for p in parameters.values()]
    for p, start, master in held:
        for key, tensor in (("master", master), *inner.state[master].items()):
            if key in values:
                tensor.copy_(values[key][names[p]].view(-1)[start : start + master.numel()].view(master.shape))
        inner.state[master]["step"].fill_(step)
    for ours, theirs in zip(inner.param_groups, groups, strict=True):
        # Adam's groups have the decay everywhere until a scheduler's first step.
        ours.update(step=step, lr=theirs["lr"], weight_decay=theirs["weight_decay"] if ours["decayed"] else 0.0)


@worlds(2)
@each({"DP2": None, "TP2, FP32Optimizer": None}, exhaustive={"TP2, Float16Optimizer": None})
@after("megatron_checkpoints.case_save")
def case_adam_is_adopted_only_when_asked(directory, label):
    run = RUNS[label]
    with engine_for(run, optimizer=adam(run.job)) as engine:
        advance(engine, 0, BEFORE)
        for kind in run.formats:
            save(engine, place(directory, label, f"{kind}, Adam"), kind)
        expected, groups = moments(engine), hyperparameters(engine)
    with engine_for(run) as engine:
        put(engine, expected, groups, BEFORE)
        at_start = picture(engine, run)
        advance(engine, BEFORE, BEFORE + AFTER)
        at_end = picture(engine, run)
    for kind in run.formats:
        folder = place(directory, label, f"{kind}, Adam")
        with other_engine_for(run) as engine, pytest.raises(REFUSALS, match="grad_ema"):
            load(engine, folder, kind)
        with other_engine_for(run, alto_adopt=True) as engine:
            load(engine, folder, kind)
            got = picture(engine, run)
            assert_same(f"{kind}, adopted", got, at_start)
            assert not any(value.any() for key, value in got.items() if key.endswith("grad_ema"))
            advance(engine, BEFORE, BEFORE + AFTER)
            assert_same(f"{kind}, continued", picture(engine, run), at_end)
        refused = pytest.raises(ValueError, match=r"grad_ema.*alto_adopt=False \(leave out --alto-adopt\)")
        with other_engine_for(run, alto_adopt=True) as engine, refused:
            load(engine, place(directory, label, kind), kind)


@worlds(2)
@each(saved=("DP2", "TP2, FP32Optimizer", "TP2, Float16Optimizer"))
@after("megatron_checkpoints.case_save")
def case_adam_says_what_to_do_with_altos_checkpoint(directory, saved):
    run = RUNS[saved]
    for kind in run.formats:
        if run.distributed and kind != "files":
            continue  # torch's Adam cannot describe what it would load; with TransformerEngine's it is the same load
        refused = pytest.raises(ValueError, match=r"saved by ALTO.*is adam.*--no-load-optim, or --finetune")
        with engine_for(run, optimizer=adam(run.job)) as engine, refused:
            load(engine, place(directory, saved, kind), kind)
