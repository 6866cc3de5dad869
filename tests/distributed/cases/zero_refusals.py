"""What ALTO refuses or warns of under DeepSpeed, and that other optimizers are left alone."""

import warnings

import deepspeed
import pytest
import torch
from torch import nn

from alto_distributed import ALTO, param_groups
from tests.helpers import devices
from tests.helpers.cases import each, some, worlds
from tests.helpers.zero import PARAMS, config, network, running, train

ZENFLOW = {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 4, "update_interval": 4}
REFUSED = {
    "alpha out of range": ({"params": {**PARAMS, "alpha": -100}}, r"alpha=-100 is out of range"),
    "one beta": ({"params": {**PARAMS, "betas": [0.99]}}, r"betas=\[0.99\] must be three numbers"),
    "lr as text": ({"params": {**PARAMS, "lr": "1e-2"}}, r"lr='1e-2' must be a finite number"),
    "a name with a typo": (
        {"params": {**PARAMS, "weight_deacy": 0}}, r"'weight_deacy' is not a hyperparameter of ALTO; did you mean",
    ),
    "auto": ({"params": {**PARAMS, "lr": "auto"}}, r'"lr": "auto" of alto is for Hugging Face.*; write one, or'),
    "torch_adam": ({"params": {**PARAMS, "torch_adam": True}}, r"'torch_adam' is not a hyperparameter of ALTO"),
    "max_grad_norm": ({"params": {**PARAMS, "max_grad_norm": 1.0}}, r'set "gradient_clipping"'),
    "lr beside params": (
        {"optimizer": {"type": "Alto", "lr": 0.03}},
        r'"lr": 0.03 of the optimizer Alto is not among its "params", and would be ignored; write .*{"lr": ...}',
    ),
    "params that are no object": (
        {"params": [{"lr": 0.03}]},
        r'"params": \[\{.lr.: 0.03\}\] of the optimizer ALTO should be an object such as {"lr": 0.01}; write one, or',
    ),
    "LAMB's implementation beside params": (
        {"optimizer": {"type": "LAMB", "params": {}, "implementation": "alto"}},
        r'"implementation": .alto. of the optimizer LAMB is not among its "params"',
    ),
    "EAdamW with layerwise": ({"name": "EAdamW", "params": {"layerwise": "all"}}, r"EAdamW is ALTO with layerwise"),
    "ESGD with a typo": (
        {"name": "ESGD", "params": {"momentun": 0.9}}, r"'momentun' is not a hyperparameter.*did you mean 'momentum'",
    ),
    "fp16 at stage 0": ({"fp16": {"enabled": True}}, r"fp16 at ZeRO stage 0 does not scale the loss.*stage\": 1"),
    "parameters to NVMe": (
        {"zero": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}},
        r'offload_param to NVMe has not been tested.*use "device": "cpu"',
    ),
    "zenflow": (
        {"zero": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": ZENFLOW}},
        r"zenflow steps its own CPU Adam",
    ),
    "SuperOffload": (
        {"zero": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
        r'SuperOffload runs DeepSpeedCPUAdam in its own processes; set "super_offload": false',
    ),
    "float16 autocast": (
        {"zero": {"stage": 1}, "torch_autocast": {"enabled": True, "dtype": "float16"}},
        r'torch_autocast with float16 skips steps on each rank by itself.*use "dtype": "bfloat16"',
    ),
    "float16 master weights": (
        {"zero": {"stage": 2}, "fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
        r"float16 master weights lose small updates; remove fp16_master_weights_and_grads, or use bf16",
    ),
    "DeepCompile": ({"zero": {"stage": 2}, "compile": {"deepcompile": True}}, r"DeepCompile has not been tested"),
}  # fmt: skip


@worlds(2)
@some(REFUSED)
def case_what_cannot_be_done_right_is_refused(setting):
    """On every rank, before training."""
    options, message = setting
    with pytest.raises(ValueError, match=message):
        deepspeed.initialize(model=network(), config=config(**options))


@worlds(2)
def case_a_parameter_without_elements_is_refused():
    model = network()
    model.empty = nn.Parameter(torch.empty(0, 3))
    with pytest.raises(ValueError, match="without elements .* breaks ZeRO stage 3"):
        deepspeed.initialize(model=model, config=config({"stage": 3}))


def told(about, model, ds_config, **options):
    """Of the warnings when an engine is built: those with some words in them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with running(model, ds_config, **options):
            pass
    return [str(w.message) for w in caught if about in str(w.message)]


#: Scheduler -> its params, and the rate of its own that it has a default for.
RATES = {
    "WarmupDecayLR": ({"total_num_steps": 12}, "warmup_max_lr"),
    "LRRangeTest": ({}, "lr_range_test_min_lr"),
    "WarmupLR": ({}, None),
    "WarmupCosineLR": ({"total_num_steps": 12}, None),
    "OneCycle": ({"cycle_min_lr": 0.01, "cycle_max_lr": 0.05, "cycle_first_step_size": 4}, None),
}


@worlds(2)
def case_a_rate_that_is_not_lr_is_told():
    """WarmupDecayLR warms up to 0.001 and LRRangeTest begins there, unless told otherwise. The others take lr."""
    for name, (params, own) in RATES.items():
        for given in ({}, {own: 0.05}) if own else ({},):
            scheduler = {"type": name, "params": {**params, **given}}
            said = told("is not used. Write", network(), config({"stage": 1}, scheduler=scheduler))
            expected = [
                f"the scheduler {name} takes its default {own} of 0.001, and the optimizer's lr of 0.05 is not used. "
                f'Write "{own}": 0.05 among the params of the scheduler'
            ]
            assert said == (expected if own and not given else []), (name, given, said)


@worlds(2)
def case_faults_of_other_releases_are_told():
    """Those that hang on more than the config: torch's version, and gloo."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed, "__version__", "0.18.8")
        if torch.__version__ >= "2.11":
            with pytest.raises(
                ValueError, match=r"0\.18\.8 fails at ZeRO stages 1 and 2 over .*use DeepSpeed 0\.18\.6"
            ):
                deepspeed.initialize(model=network(), config=config({"stage": 1}))
        patch.setattr(torch, "__version__", "2.10.0")
        assert told("over gloo", network(), config({"stage": 2})) == []
        said = told("over gloo", network(), config({"stage": 3}))
        assert len(said) == (devices.NAME == "cpu")  # the others do not run over gloo
        expected = "DeepSpeed 0.18.8 at ZeRO stage 3 over gloo may use weights before they have arrived"
        assert all(line.startswith(expected) for line in said)
    assert told("over gloo", network(), config({"stage": 3})) == []


def dropped(model, ds_config, **options):
    """Those about an optimizer that never reaches the engine."""
    return told("never reached DeepSpeed", model, ds_config, **options)


@worlds(2)
def case_an_optimizer_that_never_reaches_the_engine_is_told():
    """As Trainer's, which takes ``optimizers=`` and gives DeepSpeed another one."""
    model, adam = network(), config({"stage": 1}, name="AdamW", params=OTHERS["AdamW"])
    optimizer = ALTO(param_groups(model), **PARAMS)
    (said,) = dropped(model, adam)
    assert said.startswith("ALTO was built for this model and never reached DeepSpeed, which trains with AdamW. Name")
    (said,) = dropped(model, config({"stage": 1}))  # another ALTO
    assert "trains with ALTO" in said
    assert dropped(network(), adam) == []
    by_client = config({"stage": 1})
    del by_client["optimizer"]
    assert dropped(model, by_client, optimizer=optimizer) == []


OTHERS = {"AdamW": {"lr": 1e-3, "torch_adam": True}, "SGD": {"lr": 0.1}, "RMSprop": {"lr": 1e-3}}


@worlds(2)
@each(name=OTHERS)
def case_other_optimizers_are_left_alone(name):
    with running(network(), config(name=name, params=OTHERS[name])) as engine:
        train(engine, steps=2)
        assert type(engine.basic_optimizer).__name__ == name


@worlds(2)
def case_what_deepspeed_says_of_other_optimizers():
    with running(network(), config({"stage": 1}, name="AdamW", params=OTHERS["AdamW"])) as engine:
        train(engine, steps=2)
    with pytest.raises(AssertionError, match="untested ZeRO Optimizer"):
        deepspeed.initialize(model=network(), config=config({"stage": 1}, name="SGD", params={"lr": 0.1}))
    with pytest.raises(AssertionError, match="not a supported DeepSpeed Optimizer"):
        deepspeed.initialize(model=network(), config=config(name="Allto"))
