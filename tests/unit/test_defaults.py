"""The defaults of hyperparameters are those of :class:`Hyperparameters`, wherever one is left out."""

import inspect

import pytest
import torch
from torch import nn

from alto_distributed import ALTO, LAMB, E, param_groups, recipe
from alto_distributed.hyperparameters import HYPERPARAMETER_NAMES, Hyperparameters
from alto_distributed.kernels import check_kernel

DEFAULTS = Hyperparameters()


def of_signature(function):
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def test_the_constructor():
    literal = of_signature(ALTO)
    assert Hyperparameters(**{name: literal[name] for name in HYPERPARAMETER_NAMES}) == DEFAULTS
    check_kernel(literal["kernel"])


def test_the_adaptor():
    assert of_signature(E) == {"alpha": DEFAULTS.alpha, "beta1": DEFAULTS.betas[0]}


def test_the_recipe_for_large_batches():
    assert Hyperparameters(**recipe(1024)) == DEFAULTS
    small = recipe(1023)
    assert small == {
        "alpha": 0.5, "betas": (0.01, 0.9, 0.99), "eps": (1e-6, 1e-6, 1e-10), "weight_decay": 1e-4,
    }  # fmt: skip


def test_deepspeed():
    pytest.importorskip("deepspeed")
    from alto_distributed.deepspeed.build import ESGD

    literal = of_signature(ESGD)
    assert (literal["alpha"], literal["beta1"]) == (DEFAULTS.alpha, DEFAULTS.betas[0])


def test_megatron():
    pytest.importorskip("megatron.core")
    from alto_distributed.megatron.config import AltoOptimizerConfig, check

    assert check(AltoOptimizerConfig()) == DEFAULTS
    lambs = check(AltoOptimizerConfig(optimizer="lamb", lr=1e-3, weight_decay=0.01)).as_group()
    (group,) = LAMB([nn.Parameter(torch.ones(2, 2))]).param_groups
    assert {name: group[name] for name in lambs} == lambs
    given = check(AltoOptimizerConfig(optimizer="lamb", alto_betas=(0.99, 0.9, 0.99), alto_eps=(1e-6, 1e-6, 0.0)))
    assert (given.betas, given.eps) == ((0.99, 0.9, 0.99), (1e-6, 1e-6, 0.0))
    ours = {name: default for name, default in of_signature(ALTO).items() if name not in HYPERPARAMETER_NAMES}
    for name in ("kernel", "diagnostics_every", "skip_nonfinite"):
        assert getattr(AltoOptimizerConfig, f"alto_{name}") == ours[name]


def test_the_training_program():
    from alto_distributed.pretrain.config.settings import Run
    from alto_distributed.pretrain.optimizers import arguments

    chosen = arguments(Run())
    assert Hyperparameters(**{name: chosen[name] for name in HYPERPARAMETER_NAMES if name in chosen}) == DEFAULTS
    literal = {**of_signature(param_groups), **of_signature(ALTO)}
    own = {"skip_nonfinite": True}  # the program ends a run that only skips
    others = chosen.keys() - HYPERPARAMETER_NAMES
    assert set(HYPERPARAMETER_NAMES) - chosen.keys() == {"maximize"}  # no run wants it
    assert {"kernel", "diagnostics_every", "grad_ema_dtype", "exp_avg_dtype"} < others
    assert {name: chosen[name] for name in others} == {**{name: literal[name] for name in others}, **own}
