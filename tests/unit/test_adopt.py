"""Moments and step counts of Adam, AdamW and LAMB go over to ALTO, and back, in one call."""

import copy
import io

import pytest
import torch
from pytorch_optimizer import Lamb
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from alto_distributed import ALTO, LAMB, E, adopt, param_groups

X = torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(12, 4)


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 1)).double()


def train(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        (model(X) - X.sum(1, keepdim=True).sin()).square().mean().backward()
        optimizer.step()


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


SOURCES = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters()),
    "Adam, amsgrad": lambda m: torch.optim.Adam(m.parameters(), amsgrad=True),
    "AdamW with names": lambda m: torch.optim.AdamW(m.named_parameters()),
    "AdamW in our groups": lambda m: torch.optim.AdamW(param_groups(m)),
    "pytorch_optimizer's Lamb": lambda m: Lamb(m.parameters()),  # counts steps in its groups
    "LAMB": lambda m: LAMB(param_groups(m)),
    "ALTO, alpha 0": lambda m: ALTO(m.parameters(), alpha=0),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("target", ["ALTO", "AdamW", "E(AdamW)"])
def test_moments_and_counts_are_taken_over(source, target):
    model = network()
    old = SOURCES[source](model)
    train(model, old)
    targets = {
        "ALTO": lambda: ALTO(param_groups(model), lr=0.02),
        "AdamW": lambda: torch.optim.AdamW(model.parameters(), lr=0.02, amsgrad=True),
        "E(AdamW)": lambda: E(torch.optim.AdamW(model.parameters(), lr=0.02)),
    }
    new = targets[target]()
    before = {p: {k: v.clone() for k, v in old.state[p].items() if "exp_avg" in k} for p in model.parameters()}
    adopt(new, through_a_file(old.state_dict()), model)
    assert all(group["lr"] == 0.02 for group in new.param_groups)
    for p in model.parameters():
        state = new.state[p]
        assert int(state["step"]) == 3
        for key in ("exp_avg", "exp_avg_sq"):
            assert before[p][key].any()
            assert torch.equal(state[key], before[p][key])
        assert ("grad_ema" in state) == (target == "ALTO")
        assert target != "ALTO" or not state["grad_ema"].any()
    train(model, new)
    assert {int(new.state[p]["step"]) for p in model.parameters()} == {6}


def test_what_goes_on_is_what_the_moments_say():
    """AdamW to ALTO without alpha and ratio, which is AdamW, and back: as if nothing had happened."""
    model, other = network(), network()
    options = {"lr": 1e-3, "weight_decay": 0.0}
    adamw = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), eps=1e-6, **options)
    train(model, adamw, 9)
    first = torch.optim.AdamW(other.parameters(), betas=(0.9, 0.99), eps=1e-6, **options)
    train(other, first, 3)
    second = ALTO(param_groups(other), betas=(0.5, 0.9, 0.99), alpha=0, layerwise="none", **options)
    adopt(second, first.state_dict(), other)
    train(other, second, 3)
    third = torch.optim.AdamW(other.parameters(), betas=(0.9, 0.99), eps=1e-6, **options)
    adopt(third, second.state_dict(), other)
    train(other, third, 3)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_nothing_is_shared_with_the_optimizer_before():
    model = network()
    old = torch.optim.AdamW(model.parameters())
    train(model, old)
    new = ALTO(model.parameters())
    adopt(new, old.state_dict())
    kept = copy.deepcopy(old.state_dict()["state"])
    train(model, new)
    for key, state in old.state_dict()["state"].items():
        assert torch.equal(state["exp_avg"], kept[key]["exp_avg"])


@pytest.mark.parametrize("key", ["optim", "app.optimizer"])
@pytest.mark.parametrize("reader", [str, FileSystemReader], ids=["folder", "reader"])
def test_a_folder_of_torch_distributed_checkpoint(tmp_path, key, reader):
    model = network()
    old = torch.optim.AdamW(model.parameters())
    train(model, old)
    content = get_optimizer_state_dict(model, old)
    for part in reversed(key.split(".")):
        content = {part: content}
    save(content, checkpoint_id=str(tmp_path / "saved"))
    for new in (ALTO(param_groups(model)), LAMB(param_groups(model)), torch.optim.AdamW(model.parameters())):
        adopt(new, reader(str(tmp_path / "saved")), model)
        for p in model.parameters():
            assert torch.equal(new.state[p]["exp_avg_sq"], old.state[p]["exp_avg_sq"])
            assert int(new.state[p]["step"]) == 3


@pytest.mark.parametrize("flat", [False, True], ids=["groups", "flattened"])
def test_a_folder_of_a_lamb_that_counts_steps_in_its_groups(tmp_path, flat):
    """There is no ``step`` beside the moments; the folder was refused."""
    model = network()
    old = Lamb([{"params": list(model.parameters())[:3]}, {"params": list(model.parameters())[3:]}])
    train(model, old)
    old.param_groups[1]["step"] = torch.tensor(7)  # timm's is a tensor
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    content = get_optimizer_state_dict(model, old, options=options)
    save({"optim": content}, checkpoint_id=str(tmp_path / "saved"))
    new = LAMB(param_groups(model))
    adopt(new, tmp_path / "saved", model)
    assert [int(new.state[p]["step"]) for p in model.parameters()] == [3] * 3 + [7] * 3
    for p in model.parameters():
        assert torch.equal(new.state[p]["exp_avg"], old.state[p]["exp_avg"])


def test_refusals(tmp_path):
    model = network()
    old = torch.optim.AdamW(model.parameters())
    ours = ALTO(param_groups(model))
    with pytest.raises(ValueError, match="has no state of any of this optimizer's parameters"):
        adopt(ours, old.state_dict(), model)
    train(model, old)
    saved = old.state_dict()
    cases = {
        "give the model to adopt, whose order of": lambda: adopt(ours, saved),
        "adopt is for ALTO, LAMB, Adam and AdamW.*not for a SGD": lambda: adopt(
            torch.optim.SGD(model.parameters(), lr=0.1), saved
        ),
        "this is not an optimizer's state_dict": lambda: adopt(ours, {"model": {}}),
        "takes a state_dict, a folder or a StorageReader, not 5": lambda: adopt(ours, 5, model),
        "by name: give the model to adopt": lambda: adopt(
            ALTO(model.parameters()), get_optimizer_state_dict(model, old)
        ),
        r"has 6 parameters, the model 8 that are trained": lambda: adopt(
            ALTO([{"params": [p]} for p in network().parameters()]), saved, nn.Sequential(*network(), nn.Linear(1, 1))
        ),
        "another 'maximize'": lambda: adopt(ALTO(param_groups(model), maximize=True), saved, model),
        r"has shape \(6, 4\), the parameter has \(4, 6\)": lambda: adopt(
            ALTO([nn.Parameter(torch.ones(*shape)) for shape in ((4, 6), (6,), (6,), (6,), (1, 6), (1,))]), saved
        ),
    }
    for message, call in cases.items():
        with pytest.raises(ValueError, match=message):
            call()
    assert not ours.state
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, sgd)
    with pytest.raises(ValueError, match="has no 'exp_avg', 'exp_avg_sq', 'step' for parameter 0 of group 0; adopt"):
        adopt(ours, sgd.state_dict(), model)
    train(model, ours)
    with pytest.raises(ValueError, match="saved by ALTO and has 'grad_ema'.*load it with load_state_dict"):
        adopt(ALTO(param_groups(model)), ours.state_dict(), model)
    adapted = E(torch.optim.AdamW(model.parameters()))
    train(model, adapted)
    for target in (ALTO(param_groups(model)), E(torch.optim.AdamW(model.parameters()))):
        with pytest.raises(ValueError, match="saved by E and has 'grad_ema'.*delete that state to have it so"):
            adopt(target, adapted.state_dict(), model)
    adopt(torch.optim.AdamW(model.parameters()), adapted.state_dict(), model)  # which has no such state
    save({"optim": {}}, checkpoint_id=str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="at 0 places"):
        adopt(ours, tmp_path / "empty", model)
