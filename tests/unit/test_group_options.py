"""Keys of parameter groups: each is done, has no meaning, or is refused. torchtitan passes all options this way."""

import logging

import pytest
import torch
from deepspeed.runtime.lr_schedules import OneCycle
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from alto_distributed import ALTO, LAMB, hyperparameters


def weight(*shape):
    p = nn.Parameter(torch.linspace(0.5, 1.5, 6).reshape(shape or (2, 3)))
    p.grad = torch.linspace(-1, 2, p.numel()).reshape(p.shape)
    return p


OPTIONS = {
    "kernel": "reference",
    "diagnostics_every": 3,
    "skip_nonfinite": True,
    "grad_ema_dtype": torch.bfloat16,
    "exp_avg_dtype": "bfloat16",
}


def test_options_in_all_groups_are_those_of_the_optimizer():
    given = [{"params": [weight()], **OPTIONS}, {"params": [weight()], "lr": 0.1, **OPTIONS}]
    by_groups, by_name = ALTO(given), ALTO([weight()], **OPTIONS)
    assert by_groups._options() == by_name._options() != ALTO([weight()])._options()
    assert all(option not in group for group in by_groups.param_groups for option in OPTIONS)
    assert given[0]["kernel"] == "reference"  # the caller's groups may serve another optimizer
    by_groups.step()
    assert by_groups.state[given[0]["params"][0]]["exp_avg"].dtype == torch.bfloat16
    by_groups.add_param_group({"params": [weight()], "grad_ema_dtype": "bfloat16"})


@pytest.mark.parametrize(("name", "value"), OPTIONS.items())
def test_options_that_differ_between_groups_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"{name}=.* in parameter group 0 and .* in group 1: it is one for all"):
        ALTO([{"params": [weight()], name: value}, {"params": [weight()]}])
    optimizer = ALTO([weight()])
    with pytest.raises(ValueError, match=rf"{name}=.*in a parameter group, .* in the optimizer"):
        optimizer.add_param_group({"params": [weight()], name: value})
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=f"{name}=.*was written into a parameter group.*Delete it"):
        optimizer.step()


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("wd", "did you mean 'weight_decay'"),
        ("alp", "did you mean 'alpha'"),
        ("momentum", "did you mean 'betas'"),
        ("beta2", "did you mean 'betas'"),
        ("learning_rate", "did you mean 'lr'"),
        ("skip_nonfinit", "did you mean 'skip_nonfinite'"),
        ("grad_ema_type", "did you mean 'grad_ema_dtype'"),
        ("kernal", "did you mean 'kernel'"),
        ("max_coeff", "did you mean 'trust_clip'"),
    ],
)
def test_other_names_and_slips_are_refused_with_the_right_one(key, hint):
    for build in (lambda: ALTO([{"params": [weight()], key: 1}]), lambda: ALTO([weight()], **{key: 1})):
        with pytest.raises(ValueError, match=hint):
            build()


#: Options of other optimizers: what is so anyway, what is not, and the advice.
OF_OTHERS = {
    "differentiable": (False, True, "autograd"),
    "amsgrad": (False, True, "largest second moment"),
    "nesterov": (None, True, "alpha does that"),
    "decoupled_weight_decay": (True, False, "into the moments"),
    "max_grad_norm": (0.0, 1.0, "clip_grad_norm_ before step"),
    "pre_norm": (False, True, "clip_grad_norm_ before step"),
    "use_nvlamb": (False, True, 'write "decayed": True'),
    "always_adapt": (False, 1, 'write "decayed": True'),
    "adam_w_mode": (1, 0, "into the moments"),
    "grad_averaging": (True, False, "is an average"),
    "eps_inside_sqrt": (False, True, "eps=sqrt"),
    "decoupled_decay": (False, True, "inside the layer-wise ratio"),
    "corrected_weight_decay": (False, True, "inside the layer-wise ratio"),
    "weight_decouple": (False, True, "inside the layer-wise ratio"),
    "fixed_decay": (False, True, "inside the layer-wise ratio"),
    "caution": (False, "yes", "no such variant"),
    "rectify": (False, True, "no such variant"),
    "adanorm": (False, torch.ones(2), "no such variant"),
    "adam": (False, True, 'layerwise="none"'),
}


@pytest.mark.parametrize("cls", [ALTO, LAMB])
@pytest.mark.parametrize("name", OF_OTHERS)
def test_options_of_others_that_would_lie_are_refused(cls, name):
    """In groups, where other packages' LAMBs keep them, they passed without effect."""
    harmless, lie, advice = OF_OTHERS[name]
    for build in (
        lambda value: cls([{"params": [weight()], name: value}]),
        lambda value: cls([weight()], **{name: value}),
    ):
        with pytest.raises(ValueError, match=rf"{name}=.* is not possible with ALTO: .*{advice}.*Leave '{name}' out"):
            build(lie)
        build(harmless).step()


def test_options_of_torch_without_meaning_change_nothing():
    results = []
    for options in (
        {},
        {"foreach": True, "fused": False},
        {"fused": True, "capturable": False},
        {"capturable": True},
    ):
        for in_group in (False, True):
            p = weight()
            (ALTO([{"params": [p], **options}]) if in_group else ALTO([p], **options)).step()
            results.append(p.detach().clone())
    assert all(torch.equal(result, results[0]) for result in results)
    with pytest.raises(ValueError, match="fused='yes' must be True, False or None"):
        ALTO([weight()], fused="yes")


@pytest.mark.parametrize("kernel", ["auto", "torch", "reference"])
def test_maximize_is_the_negated_gradient(kernel):
    up, down = weight(), weight()
    climbing, descending = ALTO([up], maximize=True, kernel=kernel), ALTO([down], kernel=kernel)
    for k in range(3):
        gradient = torch.linspace(-1, 2 + k, 6).reshape(2, 3)
        up.grad, down.grad = gradient, -gradient
        climbing.step()
        descending.step()
        assert torch.equal(up.grad, gradient)
    assert torch.equal(up, down)
    one = ALTO([{"params": [weight()], "maximize": True}, {"params": [weight()]}])
    one.step()
    a, b = (group["params"][0].detach() - weight().detach() for group in one.param_groups)
    assert (a * b < 0).any()
    assert one.state_dict()["param_groups"][0]["maximize"] is True


# -- two betas, and schedulers that cycle momentum ---------------------------------------------------


def test_two_betas_are_adams_and_it_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(hyperparameters, "_said", set())
    with caplog.at_level(logging.INFO, "alto_distributed"):
        two = [ALTO([weight()], betas=(0.8, 0.95)), ALTO([{"params": [weight()], "betas": [0.8, 0.95]}])]
    assert [o.param_groups[0]["betas"] for o in two] == [(0.99, 0.8, 0.95)] * 2
    assert len(caplog.messages) == 1
    assert "betas=(0.8, 0.95) are two" in caplog.messages[0]
    assert "beta2 and beta3" in caplog.messages[0]
    assert "beta1=0.99" in caplog.messages[0]
    group = {"params": [weight()], "betas": (0.8, 0.95)}
    assert ALTO([group], betas=(0.5, 0.9, 0.99), alpha=1).param_groups[0]["betas"] == (0.5, 0.8, 0.95)


SCHEDULERS = {
    "OneCycleLR": lambda o: OneCycleLR(o, 0.1, total_steps=10, base_momentum=0.7, max_momentum=0.95),
    "CyclicLR": lambda o: CyclicLR(o, 0.01, 0.1, step_size_up=4, base_momentum=0.7, max_momentum=0.95),
    "DeepSpeed's OneCycle": lambda o: OneCycle(
        o, 0.01, 0.1, cycle_first_step_size=4, cycle_min_mom=0.7, cycle_max_mom=0.95
    ),
}


@pytest.mark.parametrize("alpha", [-5.0, 0.0])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_cycle_the_first_moments_beta(name, alpha):
    """As they cycle Adam's beta1. The acceleration's beta1, which must not change, is left alone."""
    ours, adams, by_hand = weight(), weight(), weight()
    # 0.7 is also a value that the schedulers write: a group that holds it is not mistaken for one that they left alone.
    start = {"alpha": alpha / 10, "betas": (0.7, 0.9, 0.99)}
    optimizer, plain = (ALTO([p], **start) for p in (ours, by_hand))
    adam = torch.optim.Adam([adams], betas=(0.9, 0.99))
    schedulers = [SCHEDULERS[name](optimizer), SCHEDULERS[name](adam)]
    seen = []
    for _ in range(9):
        seen.append(adam.param_groups[0]["betas"][0])
        plain.param_groups[0].update(lr=optimizer.param_groups[0]["lr"], betas=(0.7, seen[-1], 0.99))
        for o, p in ((optimizer, ours), (adam, adams), (plain, by_hand)):
            p.grad = torch.linspace(-1, 2, 6).reshape(2, 3) * len(seen)
            o.step()
        assert torch.equal(ours, by_hand)
        # A checkpoint in the middle of a cycle goes on with the same betas.
        again = ALTO([weight()])
        again.load_state_dict(optimizer.state_dict())
        assert again._checked(again.param_groups[0]).betas == (0.7, seen[-1], 0.99)
        for scheduler in schedulers:
            scheduler.step()
    assert len(set(seen)) > 3


def test_a_group_with_another_beta1_keeps_it_under_a_scheduler():
    optimizer = ALTO([{"params": [weight()], "betas": (0.5, 0.9, 0.99), "alpha": 1.0}, {"params": [weight()]}])
    OneCycleLR(optimizer, 0.1, total_steps=10, base_momentum=0.7, max_momentum=0.95)
    optimizer.step()
    assert [group["grad_ema_beta1"] for group in optimizer.param_groups] == [0.5, 0.99]
    optimizer.param_groups[0]["betas"] = (1.0, 0.9, 0.99)
    with pytest.raises(ValueError, match=r"betas\[1\] \(beta2\)=1.0 is out of range"):
        optimizer.step()


@pytest.mark.parametrize("when", ["at once", "after a step", "after a checkpoint"])
def test_betas_written_under_such_a_scheduler_are_not_misread(when):
    """betas=(0.99, 0.5, 0.95) became (0.99, 0.99, 0.95) without a word: betas[0] is the first moment's there."""
    optimizer = ALTO([weight()])
    if when != "at once":
        optimizer.param_groups[0]["betas"] = (0.99, 0.7, 0.99)
        optimizer.step()
        optimizer.param_groups[0]["betas"] = (0.99, 0.9, 0.99)
        optimizer.step()
    OneCycleLR(optimizer, 0.1, total_steps=10)
    if when == "after a checkpoint":
        saved, optimizer = optimizer.state_dict(), ALTO([weight()], betas=(0.99, 0.5, 0.95))
        optimizer.load_state_dict(saved)
    group = optimizer.param_groups[0]
    group["betas"] = (0.8, 0.9, 0.95)  # the first moment's, and the second's
    optimizer.step()
    assert optimizer._checked(group).betas == (0.99, 0.8, 0.95)
    group["betas"] = (0.99, 0.5, 0.95)
    for do in (optimizer.step, optimizer.describe):
        with pytest.raises(ValueError, match=r"betas\[1\] was changed from 0.9 although a scheduler cycles momentum"):
            do()
    del group["base_momentum"]
    optimizer.step()
    assert optimizer._checked(group).betas == (0.99, 0.5, 0.95)


def test_a_checkpoint_of_0_1_gets_what_came_later():
    p = weight()
    optimizer = ALTO([p], lr=0.1)
    optimizer.step()
    old = optimizer.state_dict()
    for key in ("trust_clip", "maximize", "vector_lr", "alto_beta1", "alto_beta2"):
        del old["param_groups"][0][key]
    old["param_groups"][0]["kernel"] = "reference"  # was let pass, and ignored
    fresh = ALTO([p])
    fresh.load_state_dict(old)
    assert fresh.param_groups[0] == optimizer.param_groups[0]
    fresh.step()
