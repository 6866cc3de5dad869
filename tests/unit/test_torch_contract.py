"""What PyTorch's own tests ask of every optimizer (TestOptimRenewed), driven through the OptimizerInfo in its wheel.

The inputs of E are those that PyTorch has for the base. What cannot be, with the reason:

    sparse gradients       states are dense; refused
    complex parameters     ALTO: norms and moments are real; refused (E leaves them to the base, but refuses gradients)
    differentiable         ALTO does not record its step; refused
    CUDA, several GPUs     tests/distributed has them, with --device cuda
    momentum of 1 or more  PyTorch's tests of schedulers write such values to betas; ALTO refuses them at the next step
    other options a group  kernel, skip_nonfinite and the precision of states are one for all groups

PyTorch's own files, test/test_optim.py and test/optim/test_lrscheduler.py, are not in its wheel.
``python scripts/torch_tests.py CHECKOUT`` runs them with the same infos; scripts/torch_tests.csv has what cannot pass,
with reasons. With the files of June 2026 (2.13.0a0) and torch 2.13, TestOptimRenewed passes 200, skips 80 and fails 1;
of TestLRScheduler 15 of 192 fail for ALTO and LAMB, and none for E that does not fail with its base.
"""

import copy
import csv
import inspect
import io
import itertools
import os
import pickle
import subprocess
import sys

import pytest
import tomllib
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.common_optimizers import OptimizerErrorEnum

from alto_distributed import ALTO, LAMB
from scripts import torch_tests
from tests.helpers.cases import REPO
from tests.helpers.optimizer_infos import INFOS
from tests.unit.programs import typed

IDS = [info.optim_cls.__name__ for info in INFOS]
CASES = [
    pytest.param(info, given.kwargs, id=f"{name} {given.desc}")
    for info, name in zip(INFOS, IDS, strict=True)
    for given in info.optim_inputs_func(device="cpu")
]
every_info = pytest.mark.parametrize("info", INFOS, ids=IDS)
every_case = pytest.mark.parametrize(("info", "kwargs"), CASES)
#: Muon takes matrices alone.
X = torch.linspace(-1, 2, 5).reshape(5, 1)


def problem(contiguous=True, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(10, 5, 2, generator=generator)[..., 0], torch.randn(10, 1, 2, generator=generator)[..., 0]]
    return [nn.Parameter(p.to(dtype).clone() if contiguous else p.to(dtype)) for p in made]


def closure_of(optimizer, params, x=X):
    def closure():
        optimizer.zero_grad()
        weight, bias = params
        loss = (weight @ x.to(weight.dtype) + bias).square().sum()
        if torch.is_grad_enabled():
            loss.backward()
        return loss

    return closure


def run(optimizer, params, steps):
    closure = closure_of(optimizer, params)
    for _ in range(steps):
        closure()
        optimizer.step()
    return [p.detach().clone() for p in params]


def fresh(kwargs):
    """Tensors among the arguments are not shared."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()}


def assert_same(one, other):
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


def assert_equal(one, other):
    """Of state dicts."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        assert one == other


CHECKOUT = os.environ.get("ALTO_PYTORCH")


def test_what_fails_of_pytorchs_own_tests_has_a_reason():
    with (REPO / "scripts/torch_tests.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows
    assert all(row["reason"] and row["reason"] != torch_tests.TO_DO for row in rows)


@pytest.mark.skipif(not CHECKOUT, reason="ALTO_PYTORCH does not name a checkout of PyTorch")
def test_pytorchs_own_tests():
    subprocess.run([sys.executable, str(REPO / "scripts/torch_tests.py"), CHECKOUT], cwd=REPO, check=True)


# -- direction -----------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
def test_the_loss_goes_the_right_way(info, kwargs, contiguous):
    params = problem(contiguous)
    optimizer = info.optim_cls(params, **fresh(kwargs))
    closure = closure_of(optimizer, params)
    before = closure().item()
    for _ in range(20):
        optimizer.step(closure)
    assert (closure().item() < before) != kwargs.get("maximize", False)


@every_info
def test_schedulers_that_pytorch_tests(info):
    for makers in info.scheduler_inputs:
        params = problem()
        optimizer = info.optim_cls(params, lr=0.01)
        closure = closure_of(optimizer, params)
        made = [make(optimizer) for make in makers]
        before = closure().item()
        for _ in range(20):
            loss = optimizer.step(closure)
            for scheduler in made:
                scheduler.step(*([loss] if isinstance(scheduler, schedulers.ReduceLROnPlateau) else []))
        assert closure().item() < before


@every_info
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_lr_as_a_tensor_is_the_number(info, shape):
    tensor, number = problem(), problem()
    by_tensor = run(info.optim_cls(tensor, lr=torch.full(shape, 0.0078125)), tensor, 5)
    by_number = run(info.optim_cls(number, lr=0.0078125), number, 5)
    for a, b in zip(by_tensor, by_number, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@every_info
def test_groups_have_their_own_lr_and_decay(info):
    still, decayed, plain = (nn.Parameter(torch.full((2, 2), 2.0)) for _ in range(3))
    groups = [{"params": [still], "lr": 0.0}, {"params": [decayed], "weight_decay": 0.5}, {"params": [plain]}]
    optimizer = info.optim_cls(groups, lr=0.01, weight_decay=0.0)
    for _ in range(3):
        for p in (still, decayed, plain):
            p.grad = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
        optimizer.step()
    assert torch.equal(still, torch.full((2, 2), 2.0))
    assert not torch.equal(decayed, plain)


@every_case
def test_nothing_moves_without_a_gradient(info, kwargs):
    params = problem()
    before = [p.detach().clone() for p in params]
    optimizer = info.optim_cls(params, **fresh(kwargs))
    optimizer.step()
    assert_same([p.detach() for p in params], before)
    assert not optimizer.state or all("step" not in state for state in optimizer.state.values())


@every_info
def test_zero_gradients_are_no_signal(info):
    """ALTO keeps the weights, also with decay and after a history; the others do so without either."""
    with_history = issubclass(info.optim_cls, ALTO)
    params = problem()
    optimizer = info.optim_cls(params, lr=0.01, weight_decay=0.1 if with_history else 0.0)
    if with_history:
        run(optimizer, params, 3)
    before = [p.detach().clone() for p in params]
    for _ in range(3):
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert_same([p.detach() for p in params], before)


@pytest.mark.parametrize("cls", [ALTO, LAMB])
def test_a_signature_for_type_checkers(cls):
    """Unknown names are refused with a hint, and yet no **unknown hides them from a type checker."""
    parameters = inspect.signature(cls).parameters
    assert not [p for p in parameters.values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    assert {"lr", "betas", "eps", "weight_decay", "maximize", "foreach", "fused"} < set(parameters)
    with pytest.raises(TypeError, match=f"'weight_deca' is not a hyperparameter of {cls.__name__}; did you mean"):
        cls(problem(), weight_deca=0.1)


def test_what_type_checkers_are_shown_runs():
    typed.main()
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    assert typed.__name__ in project["tool"]["mypy"]["modules"]


@every_info
def test_mixed_dtypes_are_each_their_own(info):
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    together = [p for dtype in dtypes for p in problem(dtype=dtype)[:1]]
    apart = [p for dtype in dtypes for p in problem(dtype=dtype)[:1]]
    for _ in range(3):
        for p in (*together, *apart):
            p.grad = torch.full_like(p, 0.5)
        if _ == 0:
            optimizers = [info.optim_cls(together, lr=0.01), *(info.optim_cls([p], lr=0.01) for p in apart)]
        for optimizer in optimizers:
            optimizer.step()
    assert_same([p.detach() for p in together], [p.detach() for p in apart])


@every_info
def test_the_default_dtype_is_of_no_importance(info):
    usual, other = problem(), problem()
    expected = run(info.optim_cls(usual, lr=0.01), usual, 3)
    torch.set_default_dtype(torch.float64)
    try:
        assert_same(run(info.optim_cls(other, lr=0.01), other, 3), expected)
    finally:
        torch.set_default_dtype(torch.float32)


# -- state dicts ---------------------------------------------------------------------------------------


@every_case
def test_a_loaded_optimizer_goes_on_as_the_saved_one(info, kwargs):
    params = problem()
    optimizer = info.optim_cls(params, **fresh(kwargs))
    run(optimizer, params, 5)
    state = optimizer.state_dict()
    before = copy.deepcopy(state)
    assert any(isinstance(value, torch.Tensor) for value in next(iter(state["state"].values())).values())
    again = [nn.Parameter(p.detach().clone()) for p in params]
    other = info.optim_cls(again, **fresh(kwargs))
    other.load_state_dict(before)
    assert_equal(before, state)
    assert_same(run(optimizer, params, 5), run(other, again, 5))
    assert_equal(other.state_dict(), optimizer.state_dict())


@every_case
def test_a_file_read_without_running_code(info, kwargs):
    params = problem()
    optimizer = info.optim_cls(params, **fresh(kwargs))
    run(optimizer, params, 3)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert_equal(loaded, optimizer.state_dict())
    optimizer.load_state_dict(loaded)


@every_info
@pytest.mark.parametrize("flag", ["maximize", "foreach", "fused", "capturable", "differentiable"])
def test_a_state_dict_from_before_an_option(info, flag):
    params = problem()
    optimizer = info.optim_cls(params, lr=0.01)
    run(optimizer, params, 3)
    old = copy.deepcopy(optimizer.state_dict())
    for group in old["param_groups"]:
        group.pop(flag, None)
    optimizer.load_state_dict(old)
    run(optimizer, params, 1)


@every_info
def test_named_and_unnamed_state_dicts_load_into_each_other(info):
    def named(params):
        return [(f"layer{i}.weight", p) for i, p in enumerate(params)]

    for saved_named, loaded_named in ((True, False), (False, True), (True, True)):
        params = problem()
        optimizer = info.optim_cls(named(params) if saved_named else params, lr=0.01)
        assert ("param_names" in optimizer.param_groups[0]) == saved_named
        run(optimizer, params, 2)
        again = [nn.Parameter(p.detach().clone()) for p in params]
        other = info.optim_cls(named(again) if loaded_named else again, lr=0.01)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert "param_names" in other.state_dict()["param_groups"][0]
        assert_same(run(optimizer, params, 2), run(other, again, 2))


@every_info
def test_a_step_count_that_is_a_number(info):
    params = problem()
    optimizer = info.optim_cls(params, lr=0.01)
    run(optimizer, params, 3)
    state = copy.deepcopy(optimizer.state_dict())
    counts = [s for s in state["state"].values() if "step" in s]
    for s in counts:
        s["step"] = float(s["step"])
    optimizer.load_state_dict(state)
    run(optimizer, params, 1)
    assert [int(s["step"]) for s in optimizer.state.values() if "step" in s] == [4] * len(counts)


@every_info
def test_hooks_of_state_dicts(info):
    params = problem()
    optimizer = info.optim_cls(params, lr=0.01)
    run(optimizer, params, 1)
    seen = []
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("pre"))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "extra": seen.append("post")})
    optimizer.register_load_state_dict_pre_hook(
        lambda o, state: {k: v for k, v in state.items() if k != "extra" or seen.append("load pre")}
    )
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("load post"))
    optimizer.register_load_state_dict_post_hook(lambda o: o.state.update(seen=True))  # as PyTorch's own hooks do
    state = optimizer.state_dict()
    assert "extra" in state
    optimizer.load_state_dict(state)
    assert seen == ["pre", "post", "load pre", "load post"]


# -- hooks, copies, errors -------------------------------------------------------------------------------


@every_info
def test_hooks_of_steps_in_their_order(info):
    params = problem()
    optimizer = info.optim_cls(params, lr=0.01)
    closure_of(optimizer, params)()
    seen = []
    handles = [
        register_optimizer_step_pre_hook(lambda o, *_: seen.append(("all, before", o is optimizer))),
        register_optimizer_step_post_hook(lambda o, *_: seen.append(("all, after", o is optimizer))),
        optimizer.register_step_pre_hook(lambda o, *_: seen.append(("before", o is optimizer))),
        optimizer.register_step_post_hook(lambda o, *_: seen.append(("after", o is optimizer))),
    ]
    try:
        optimizer.step()
        assert seen == [(name, True) for name in ("all, before", "before", "after", "all, after")]
    finally:
        for handle in handles:
            handle.remove()
    optimizer.step()
    assert len(seen) == 4


@every_info
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies_have_all_public_attributes(info, clone):
    params = problem()
    optimizer = info.optim_cls(params, lr=0.01)
    run(optimizer, params, 2)
    copied, again = clone((params, optimizer))
    assert {k for k in vars(again) if k[0] != "_"} == {k for k in vars(optimizer) if k[0] != "_"}
    assert repr(again) == repr(optimizer)
    assert_same(run(optimizer, params, 2), run(again, copied, 2))


@every_info
def test_what_is_printed_names_the_class_and_its_values(info):
    text = repr(info.optim_cls(problem(), lr=0.125))
    assert "0.125" in text
    assert info.optim_cls.__name__.removeprefix("E") in text


@every_info
def test_errors(info):
    for given in info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
        built = given.optimizer_error_input
        if "complex" in built.desc:
            continue  # E: the base says it
        params = built.params if built.params is not None else problem()
        if given.error_on is OptimizerErrorEnum.STEP_ERROR:
            optimizer = info.optim_cls(params, **built.kwargs)
            with pytest.raises(given.error_type, match=given.error_regex):
                optimizer.step()
        elif issubclass(given.error_type, Warning):
            with pytest.warns(given.error_type, match=given.error_regex):
                info.optim_cls(params, **built.kwargs)
        else:
            with pytest.raises(given.error_type, match=given.error_regex):
                info.optim_cls(params, **built.kwargs)


@every_info
def test_sparse_and_complex_are_refused(info):
    (p, _) = params = problem()
    optimizer = info.optim_cls(params, lr=0.01)
    p.grad = torch.ones_like(p).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()
    if issubclass(info.optim_cls, ALTO):
        with pytest.raises(RuntimeError, match="does not support complex parameters"):
            info.optim_cls([nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))])


# -- schedulers ----------------------------------------------------------------------------------------

SCHEDULERS = {
    "StepLR": lambda o: schedulers.StepLR(o, 2, gamma=0.1),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 5]),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, [lambda k: 0.9**k, lambda k: 0.8**k]),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda k: 0.95),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.5, total_iters=4),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 7, 0.9),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 7, 1e-4),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: schedulers.CyclicLR(
        o, [0.01, 0.02], 0.5, 3, base_momentum=[0.1, 0.2], max_momentum=[0.5, 0.6], mode="triangular2"
    ),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, [0.5, 0.4], total_steps=8, max_momentum=[0.9, 0.95]),
    "OneCycleLR with a tensor": lambda o: schedulers.OneCycleLR(
        o, [0.5, 0.4], total_steps=8, max_momentum=[torch.tensor(0.9), torch.tensor(0.95)]
    ),
    "OneCycleLR in three phases": lambda o: schedulers.OneCycleLR(
        o, 0.5, total_steps=8, three_phase=True, anneal_strategy="linear", final_div_factor=4
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, 3),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ExponentialLR(o, 0.9), schedulers.ConstantLR(o, 0.2, 4)]
    ),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1, 3), schedulers.ExponentialLR(o, 0.9)], [3]
    ),
}


def groups_of(params):
    return [{"params": params[:1]}, {"params": params[1:], "lr": 0.5}]


@every_info
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_sets_what_it_sets_for_adam(info, name, recwarn):
    """Rates and momentum; also after a scheduler and its optimizer were saved and loaded in the middle."""
    momentum_in_betas = "betas" in info.optim_cls(problem()).defaults
    params, adams = problem(), problem()
    reference = torch.optim.Adam if momentum_in_betas else torch.optim.SGD
    optimizer, adam = info.optim_cls(groups_of(params), lr=0.05), reference(groups_of(adams), lr=0.05)
    pairs = [(optimizer, SCHEDULERS[name](optimizer)), (adam, SCHEDULERS[name](adam))]
    seen = []
    for k in range(7):
        ours, theirs = (settings_of(o, momentum_in_betas) for o, _ in pairs)
        assert ours == theirs
        seen.append(ours)
        if k == 4:
            saved = [copy.deepcopy(o.state_dict()) for o in pairs[0]]
            again = [nn.Parameter(p.detach().clone()) for p in params]
            optimizer = info.optim_cls(groups_of(again), lr=0.05)
            scheduler = SCHEDULERS[name](optimizer)
            optimizer.load_state_dict(saved[0])
            scheduler.load_state_dict(saved[1])
            params, pairs[0] = again, (optimizer, scheduler)
        for (o, scheduler), p in zip(pairs, (params, adams), strict=True):
            closure_of(o, p)()
            o.step()
            scheduler.step(*([10.0] if name == "ReduceLROnPlateau" else []))
    assert any(a != b for a, b in itertools.pairwise(seen))
    assert not [w for w in recwarn if "lr_scheduler.step()" in str(w.message)]


def settings_of(optimizer, momentum_in_betas):
    cycled = ["base_momentum" in group for group in optimizer.param_groups]
    return [
        (group["lr"], (group["betas"][0] if momentum_in_betas else group["momentum"]) if is_cycled else None)
        for group, is_cycled in zip(optimizer.param_groups, cycled, strict=True)
    ]
