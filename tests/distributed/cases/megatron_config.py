"""What ALTO makes of Megatron's config: defaults, its name, decay and the ratio. Other optimizers stay Megatron's."""

import dataclasses
import warnings

import pytest
import torch

from tests.helpers import megatron_one_rank
from tests.helpers.cases import each, worlds
from tests.helpers.megatron_one_rank import assert_same_weights, optimizer_of, trained

# isort: split
# The imports below need what megatron_gpt, imported by megatron_one_rank, puts in place of a GPU.

from megatron.core import optimizer as core_optimizer
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from alto_distributed import ALTO
from alto_distributed.megatron import AltoOptimizerConfig, altos, register


def quiet(config, **options):
    """``trained``, and ALTO has nothing to warn of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = trained(config, **options)
    assert not [w for w in said if "ALTO" in str(w.message)]
    return result


@worlds(1)
@each(distributed=(False, True))
def case_a_plain_config_stands_for_the_defaults(distributed):
    shared = {"lr": 0.01, "weight_decay": 0.05, "use_distributed_optimizer": distributed}
    plain, weights = quiet(OptimizerConfig(optimizer="alto", **shared))
    assert [type(inner) for inner in altos(plain)] == [ALTO]
    assert_same_weights(weights, quiet(AltoOptimizerConfig(**shared))[1])
    # and the comparison tells one setting from another
    other = quiet(AltoOptimizerConfig(**shared, alto_alpha=-4.0))[1]
    assert any(not torch.equal(other[name], weights[name]) for name in weights)
    # upper case is the same name, as on DeepSpeed's side
    config = OptimizerConfig(optimizer="ALTO", **shared)
    assert_same_weights(weights, quiet(config)[1])
    assert config.optimizer == "ALTO"


@worlds(1)
def case_replace_keeps_what_is_ours():
    given = {
        "alto_alpha": 0.5,
        "alto_betas": (0.01, 0.9, 0.99),
        "alto_eps": (1e-5, 1e-6, 1e-9),
        "alto_layerwise": "matrices",
        "alto_bias_correction": False,
        "alto_kernel": "reference",
        "alto_diagnostics_every": 7,
        "alto_trust_clip": (0.1, 10.0),
        "alto_vector_lr": 0.3,
        "alto_embeddings": "adam",
        "alto_skip_nonfinite": True,
        "alto_grad_ema_dtype": "bfloat16",
        "alto_exp_avg_dtype": "bfloat16",
        "alto_adopt": True,
        "alto_checkpoint_format": "dp_reshardable",
    }
    assert set(given) == {f.name for f in dataclasses.fields(AltoOptimizerConfig) if f.name.startswith("alto_")}
    replaced = dataclasses.replace(AltoOptimizerConfig(**given), lr=0.5)
    assert type(replaced) is AltoOptimizerConfig
    assert (replaced.optimizer, replaced.lr) == ("alto", 0.5)
    assert {name: getattr(replaced, name) for name in given} == given
    with pytest.raises(ValueError, match="alpha=-5 is out of range"):
        dataclasses.replace(replaced, alto_alpha=-5.0)  # checked again
    (alto,) = altos(optimizer_of(replaced))
    for group in alto.param_groups:
        assert not {"amsgrad", "capturable", "fused"} & set(group), "Adam's own keys"
        names = ("alpha", "betas", "eps", "layerwise", "bias_correction", "trust_clip", "vector_lr")
        assert {f"alto_{k}": group[k] for k in names} == {
            k: v for k, v in given.items() if k.removeprefix("alto_") in group
        }


@worlds(1)
def case_the_config_has_its_name_back_whatever_happens():
    with pytest.MonkeyPatch.context() as patch:
        config = AltoOptimizerConfig()
        optimizer = optimizer_of(config)
        assert config.optimizer == "alto"
        assert all(part.config is config for part in optimizer.chained_optimizers)

        seen = []

        def fail(*args, **kwargs):
            seen.append(config.optimizer)
            raise RuntimeError("from within Megatron")

        patch.setattr(core_optimizer, "_get_param_groups_and_buffers", fail)
        with pytest.raises(RuntimeError, match="from within Megatron"):
            optimizer_of(config)
        assert seen == ["adam"]
        assert config.optimizer == "alto"


@worlds(1)
def case_registered_after_the_name_was_imported():
    """helpers/megatron_gpt.py imports the function before ALTO; test_megatron_imports.py tries the other order."""
    from tests.helpers import megatron_gpt

    ours = core_optimizer.get_megatron_optimizer
    assert ours.knows_alto
    assert megatron_gpt.get_megatron_optimizer is ours
    assert not hasattr(ours.__wrapped__, "knows_alto")
    register()
    assert core_optimizer.get_megatron_optimizer is ours, "once is enough"


OTHERS = {
    "adam, distributed": {"optimizer": "adam", "use_distributed_optimizer": True},
    "adam": {"optimizer": "adam", "use_distributed_optimizer": False},
    "sgd": {"optimizer": "sgd", "use_distributed_optimizer": False},
}


@worlds(1)
@each(OTHERS)
def case_other_optimizers_are_not_touched(setting):
    """Types, weights and states: what Megatron's own function, called past us, gives."""
    original = get_megatron_optimizer.__wrapped__
    config = OptimizerConfig(lr=0.01, weight_decay=0.05, **setting)
    with pytest.MonkeyPatch.context() as patch:
        with_us, weights = trained(config)
        patch.setattr(megatron_one_rank, "get_megatron_optimizer", original)
        without, expected = trained(config)
    for one, other in zip(with_us.chained_optimizers, without.chained_optimizers, strict=True):
        assert type(one) is type(other)
        assert type(one).__module__.startswith("megatron.")
        assert type(one.optimizer) is type(other.optimizer)
        assert type(one.optimizer).__module__.startswith("torch.optim")
        assert [g.keys() for g in one.optimizer.param_groups] == [g.keys() for g in other.optimizer.param_groups]
    assert not list(altos(with_us))
    assert_same_weights(weights, expected)


# -- weight decay and the layer-wise ratio ---------------------------------------------------------------


def decays(optimizer):
    (alto,) = altos(optimizer)
    return {(g["wd_mult"], g["weight_decay"], g["decayed"]) for g in alto.param_groups}


@worlds(1)
@each(distributed=(False, True))
def case_without_a_scheduler_biases_are_not_decayed(distributed):
    """wd_mult is applied by Megatron's scheduler alone; ALTO does not wait for one."""
    config = AltoOptimizerConfig(weight_decay=0.3, use_distributed_optimizer=distributed)
    optimizer, weights = trained(config)
    assert decays(optimizer) == {(1.0, 0.3, True), (0.0, 0.0, False)}
    half = dataclasses.replace(config, weight_decay=0.15)
    other = trained(half)[1]
    moved = {name for name in weights if not torch.equal(weights[name], other[name])}
    assert moved == {name for name, value in weights.items() if value.ndim > 1}


@worlds(1)
def case_a_decay_that_is_0_today_does_not_end_the_ratio():
    """A schedule that begins at 0: the ratio goes on, and the same parameters have it."""
    config = AltoOptimizerConfig(lr=0.01, weight_decay=0.1)
    schedulers = []

    def schedule(optimizer):
        if not schedulers:
            options = {"lr_warmup_steps": 0, "lr_decay_steps": 10, "lr_decay_style": "constant"}
            decay = {"start_wd": 0.0, "end_wd": 0.0, "wd_incr_steps": 10, "wd_incr_style": "constant"}
            schedulers.append(OptimizerParamScheduler(optimizer, 0.0, 0.01, 0.01, **options, **decay))
        schedulers[0].step(increment=1)

    optimizer, weights = trained(config, finish=schedule)
    assert decays(optimizer) == {(1.0, 0.0, True), (0.0, 0.0, False)}

    def by_hand(optimizer):
        (alto,) = altos(optimizer)
        for group in alto.param_groups:
            group["weight_decay"] = 0.0

    assert_same_weights(weights, trained(config, finish=by_hand)[1])
    assert_ratio_of_matrices(config, weights, finish=by_hand)

    never = dataclasses.replace(config, weight_decay=0.0)  # nor one that is 0 for ever
    optimizer, weights = quiet(never)
    assert decays(optimizer) == {(1.0, 0.0, True), (0.0, 0.0, False)}
    assert_ratio_of_matrices(never, weights)


def assert_ratio_of_matrices(config, weights, **options):
    """Matrices, and nothing else, would have moved otherwise without the layer-wise ratio."""
    without = trained(dataclasses.replace(config, alto_layerwise="none"), **options)[1]
    for name, value in weights.items():
        assert torch.equal(value, without[name]) == (value.ndim == 1), name
