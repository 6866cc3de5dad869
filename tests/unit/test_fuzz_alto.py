"""Hyperparameters, parameter groups and state_dicts that are nonsense: refused, and nothing has changed."""

import copy

import torch
from hypothesis import given
from hypothesis import strategies as st

from alto_distributed import ALTO
from tests.helpers.fuzz import cases, documented, mutated, objects, parameters, trained, words

OPTIONS = ["lr", "betas", "alpha", "eps", "weight_decay", "layerwise", "bias_correction", "kernel", "diagnostics_every"]
OPTIONS += ["grad_ema_dtype", "exp_avg_dtype", "beta", "weight_decai", "momentum", "initial_lr", "decayed"]


def step(optimizer):
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            tensor.grad = torch.ones_like(tensor)
    optimizer.step()


def _is_hashable(value):
    try:
        hash(value)
    except TypeError:
        return False
    return True


@cases(300)
@given(options=st.dictionaries(st.sampled_from(OPTIONS) | words, objects, max_size=3))
def test_arguments_of_any_kind(options):
    optimizer, refusal = documented(lambda: ALTO(parameters(), **options))
    if refusal is None:
        documented(lambda: step(optimizer))


@cases(300)
@given(group=st.dictionaries(st.sampled_from(OPTIONS) | words | objects.filter(_is_hashable), objects, max_size=3))
def test_a_parameter_group_of_any_kind(group):
    tensors = parameters()
    optimizer = ALTO(tensors[:1])
    before = copy.deepcopy(optimizer.state_dict())
    _, refusal = documented(lambda: optimizer.add_param_group({"params": tensors[1:], **group}))
    if refusal is not None:
        assert optimizer.state_dict() == before  # no states yet, so there are no tensors to compare
    documented(lambda: step(optimizer))


def plain(state_dict):
    """With bytes instead of tensors, to be compared."""
    if isinstance(state_dict, torch.Tensor):
        return state_dict.numpy().tobytes()
    if isinstance(state_dict, dict):
        return {key: plain(value) for key, value in state_dict.items()}
    return [plain(value) for value in state_dict] if isinstance(state_dict, (list, tuple)) else state_dict


SAVED = trained().state_dict()
tensors = st.sampled_from(
    [
        *(torch.ones(3, 4), torch.ones(4), torch.ones(12), torch.zeros(0), torch.ones(3, 4, dtype=torch.int64)),
        *(
            torch.ones(3, 4).bool(),
            torch.ones(3, 4) * 1j,
            torch.ones(3, 4).to_sparse(),
            torch.ones(3, 4, device="meta"),
        ),
        *(torch.ones(3, 4, dtype=torch.float64), torch.full((3, 4), torch.nan), torch.tensor(-1.0), torch.tensor(1.5)),
        *(torch.tensor(float("inf")), torch.tensor(1e30), torch.ones(4).half()),
    ]
)


@cases(400)
@given(state_dict=mutated(SAVED, objects | tensors))
def test_a_state_dict_of_any_kind(state_dict):
    """Loaded, and then a step can be taken, or refused, and then everything is as it was."""
    state_dict = copy.deepcopy(state_dict)  # states are loaded without a copy, as by torch.optim
    optimizer = trained(steps=1)
    before = plain(optimizer.state_dict())
    _, refusal = documented(lambda: optimizer.load_state_dict(state_dict))
    if refusal is not None:
        assert plain(optimizer.state_dict()) == before
    documented(lambda: step(optimizer))
