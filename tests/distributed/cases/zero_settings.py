"""How ALTO reaches DeepSpeed, and its options there: names, parameter groups, schedulers, zero.Init, diagnostics."""

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_optimizer_state
from torch import nn

import alto_distributed.deepspeed
from alto_distributed import ALTO, LAMB, param_groups
from alto_distributed.deepspeed.build import split_bare_parameters
from tests.helpers.cases import each, some, worlds
from tests.helpers.zero import (
    PARAMS,
    assert_straddles,
    batches,
    config,
    largest_gap,
    loss_of,
    network,
    reference,
    running,
    train,
    trainable,
    weights,
)


@worlds(2)
@some(name=("alto", "Alto", "ALTO"))
def case_a_name_in_any_case(name):
    with running(network(), config({"stage": 2}, name=name)) as engine:
        train(engine)
        assert largest_gap(weights(engine), reference()) < 1e-6


@worlds(2)
@some(stage=(0, 1, 2, 3))
def case_eadamw(stage):
    with running(network(), config({"stage": stage} if stage else None, name="EAdamW")) as engine:
        train(engine)
        assert largest_gap(weights(engine), reference(layerwise="none")) < 1e-6


@worlds(2)
@some(stage=(0, 1, 2, 3))
def case_lamb(stage):
    with running(network(), config({"stage": stage} if stage else None, params={**PARAMS, "alpha": 0})) as engine:
        train(engine)
        assert not any("grad_ema" in s for s in engine.basic_optimizer.state.values())
        assert largest_gap(weights(engine), reference(alpha=0)) < 1e-6


@worlds(2)
@some(stage=(0, 1, 2, 3))
def case_esgd(stage):
    params = {"lr": 0.05, "momentum": 0.9, "alpha": -5, "beta1": 0.99}
    model = network()
    optimizer = alto_distributed.deepspeed.ESGD(trainable(model).values(), **params)
    for step in batches():
        optimizer.zero_grad()
        for x, y in step:
            loss_of(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with running(network(), config({"stage": stage} if stage else None, name="ESGD", params=params)) as engine:
        train(engine)
        gap = largest_gap(weights(engine), model)
        assert gap < 1e-6, gap


CLIENTS = {
    "stage 1": {"stage": 1},
    "stage 2, offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "stage 3": {"stage": 3},
}


@worlds(2)
@some(CLIENTS, given=("instance", "callable"))
def case_client_built_optimizers_get_the_same_treatment(setting, given):
    model, ds_config = network(), config(setting)
    del ds_config["optimizer"]

    def build(params):
        return ALTO(split_bare_parameters(list(params)), **{**PARAMS, "betas": tuple(PARAMS["betas"])})

    optimizer = build(model.parameters()) if given == "instance" else build
    with running(model, ds_config, optimizer=optimizer) as engine:
        train(engine)
        assert largest_gap(weights(engine), reference()) < 1e-6


def two_groups(model):
    named = trainable(model)
    fast = [p for n, p in named.items() if n.startswith("up")]
    slow = [p for n, p in named.items() if not n.startswith("up")]
    return [{"params": fast, "lr": 0.1, "alpha": 2.0, "layerwise": "all"}, {"params": slow, "weight_decay": 0.3}]


@worlds(2, exhaustive=(4,))
@each(stage=(0, 1, 2, 3))
def case_parameter_groups_are_kept_as_they_are(stage):
    model = network()
    with running(model, config({"stage": stage} if stage else None), model_parameters=two_groups(model)) as engine:
        assert [g["alpha"] for g in engine.basic_optimizer.param_groups] == [2.0, -5.0]
        train(engine)
        gap = largest_gap(weights(engine), reference(groups=two_groups))
        assert gap < 1e-6, gap


def born_sharded():
    """A model made under zero.Init, and the same in plain tensors."""
    with deepspeed.zero.Init(config_dict_or_path=config({"stage": 3})):
        model = network()
    whole = network()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([p]), torch.no_grad():
            q.copy_(p)
    assert {p.ndim for p in model.parameters()} == {1}
    return model, whole


#: How ALTO reaches DeepSpeed: what is left of the config, and arguments for deepspeed.initialize.
DOORS = {
    "JSON": lambda model: {},
    "groups": lambda model: {"model_parameters": param_groups(model)},
    "client": lambda model: {"optimizer": ALTO(param_groups(model), **PARAMS)},
    "callable": lambda model: {"optimizer": lambda _: ALTO(param_groups(model), **PARAMS)},
}


@worlds(2)
@each(DOORS)
def case_zero_init(setting):
    """Parameters born sharded hide their shape; the split into decayed and undecayed must not be fooled.

    ``param_groups`` once was: all parameters went undecayed and without the ratio.
    """
    model, expected = born_sharded()
    options, ds_config = setting(model), config({"stage": 3})
    if "optimizer" in options:
        del ds_config["optimizer"]
    with running(model, ds_config, **options) as engine:
        decays = [g["weight_decay"] for g in engine.basic_optimizer.param_groups]
        assert decays == [0.01, 0.0], decays
        train(engine)
        gap = largest_gap(weights(engine), reference(make=lambda: expected))
        assert gap < 1e-6, gap


SCHEDULERS = {
    "WarmupLR": {"warmup_min_lr": 0.01, "warmup_max_lr": 0.05, "warmup_num_steps": 5, "warmup_type": "linear"},
    "WarmupDecayLR": {"total_num_steps": 12, "warmup_min_lr": 0.0, "warmup_max_lr": 0.05, "warmup_num_steps": 4},
    "WarmupCosineLR": {"total_num_steps": 12, "warmup_num_steps": 4, "warmup_min_ratio": 0.1},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.05, "cycle_first_step_size": 4},
}


@worlds(2)
@some(name=SCHEDULERS, stage=(1, 3))
def case_schedulers_from_the_json(name, stage):
    """OneCycle cycles the beta of the first moment as well. The second's is kept: it became 0.99, whatever it was."""
    rank, given = dist.get_rank(), []
    params, scheduler = {**PARAMS, "betas": [0.99, 0.9, 0.95]}, {"type": name, "params": SCHEDULERS[name]}
    with running(network(), config({"stage": stage}, params=params, scheduler=scheduler)) as engine:
        for x, y in (pair for step in batches() for pair in step):
            *_, momentum, _ = engine.basic_optimizer.param_groups[0]["betas"]
            given.append({"lr": engine.get_lr()[0], "betas": (0.99, momentum, 0.95)})
            engine.backward(loss_of(engine(x.chunk(2)[rank]), y.chunk(2)[rank]))
            engine.step()
        assert len({step["lr"] for step in given}) > 3, given
        momenta = {step["betas"][1] for step in given}
        assert len(momenta) > 3 if name == "OneCycle" else momenta == {0.9}, momenta
        gap = largest_gap(weights(engine), reference(schedule=given.__getitem__))
        assert gap < 1e-6, gap


READ = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, small sub-groups": {"stage": 3, "sub_group_size": 40},
}


@worlds(2)
@each(READ)
def case_every_state_of_every_group_can_be_read(setting):
    with running(network(), config(setting)) as engine:
        train(engine, steps=1)
        for name, p in trainable(engine.module).items():
            for key in ALTO.state_keys:
                state = safe_get_full_optimizer_state(p, key)
                assert state is not None, (name, key)
                if name != "unused":
                    assert state.abs().sum() > 0, (name, key)


@worlds(2)
@each(stage=(0, 1, 2, 3))
def case_diagnostics_are_those_of_whole_parameters_and_reach_the_monitor(stage, directory):
    """Names as in the module, values as without sharding, a summary in DeepSpeed's CSV monitor."""
    model = network()
    plain = ALTO(split_bare_parameters(list(model.parameters())), diagnostics_every=2, **PARAMS)
    for step in batches(2):
        plain.zero_grad()
        for x, y in step:
            loss_of(model(x), y).backward()
        for p in trainable(model).values():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        plain.step()
    names = [n for decayed in (True, False) for n, p in trainable(model).items() if (p.ndim >= 2) == decayed]
    expected = dict(zip(names, plain.diagnostics().values(), strict=True))
    csv = {"enabled": True, "output_path": str(directory), "job_name": f"stage{stage}"}
    zero = {"stage": stage} if stage else None
    ds_config = config(zero, params={**PARAMS, "diagnostics_every": 2}, csv_monitor=csv)
    with running(network(), ds_config) as engine:
        train(engine, steps=2)
        readings = engine.basic_optimizer.diagnostics()
        assert readings.keys() == expected.keys(), readings.keys()
        for name, reading in readings.items():
            assert tuple(reading) == pytest.approx(tuple(expected[name]), rel=1e-4, abs=1e-6), name
    if dist.get_rank() == 0:
        written = {p.name for p in (directory / f"stage{stage}").iterdir()}
        assert "Train_ALTO_trust_ratio_median.csv" in written, written


def groups_with_embeddings(model):
    return param_groups(model, PARAMS["weight_decay"], embeddings="adam")


@worlds(2)
@each({"stage 1": {"stage": 1}, "stage 3": {"stage": 3, "sub_group_size": 40}})
def case_vectors_at_a_rate_of_their_own_and_embeddings_without_ratio(setting):
    params = {**PARAMS, "vector_lr": 0.3, "embeddings": "adam"}
    with running(network(), config(setting, params=params)) as engine:
        assert_straddles(engine)
        train(engine)
        gap = largest_gap(weights(engine), reference(vector_lr=0.3, groups=groups_with_embeddings))
        assert gap < 1e-6, gap
        for other in (reference(groups=groups_with_embeddings), reference(vector_lr=0.3)):
            assert largest_gap(weights(engine), other) > 1e-3
    model = network()
    given = {"model": model, "model_parameters": param_groups(model), "config": config(setting, params=params)}
    with pytest.raises(ValueError, match='"embeddings": "adam" has no effect on parameter groups that are given'):
        deepspeed.initialize(**given)


@worlds(2)
def case_lamb_is_ours_if_it_is_asked_for():
    """ "type": "LAMB" was DeepSpeed's, with a ratio for each shard of its own, and stays so."""
    params = {"lr": 0.01, "betas": [0.9, 0.99], "weight_decay": 0.01, "trust_clip": [0.01, 10.0]}
    results = []
    for name, more in (("LAMB", {"implementation": "alto"}), ("ALTO_LAMB", {})):
        for zero in (None, {"stage": 2}, {"stage": 3}):
            torch.manual_seed(0)
            with running(network(), config(zero, name=name, params={**params, **more})) as engine:
                train(engine, steps=3)
                assert type(engine.basic_optimizer) is LAMB
                assert all("grad_ema" not in state for state in engine.basic_optimizer.state.values())
                results.append(weights(engine))
    for other in results[1:]:
        for name, weight in results[0].items():
            torch.testing.assert_close(other[name], weight, rtol=1e-5, atol=1e-6)
    with pytest.raises(TypeError, match="FusedLamb.*trust_clip"):  # DeepSpeed's own, which does not know it
        deepspeed.initialize(model=network(), config=config(name="LAMB", params=params))
    with pytest.raises(ValueError, match=r'"implementation": .apex. of LAMB is not "alto"'):
        deepspeed.initialize(model=network(), config=config(name="Lamb", params={**params, "implementation": "apex"}))


@worlds(2)
def case_two_betas():
    """They are Adam's, and become those of the moments."""
    with running(network(), config({"stage": 1}, params={**PARAMS, "betas": [0.8, 0.95]})) as engine:
        assert {group["betas"] for group in engine.basic_optimizer.param_groups} == {(0.99, 0.8, 0.95)}
