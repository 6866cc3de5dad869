"""The single-file optimizer for the open track is ALTO, and the track's script can be adapted."""

import pytest
import torch
from torch import nn

from alto_distributed import ALTO, recipe
from alto_distributed.presets import PRESETS
from scripts.track3 import single
from scripts.track3.adapt import adapt

#: The lines of the track's script that are looked for, and what they need.
SCRIPT = """\
from torch.optim import AdamW
########################################
#                Setup                 #
########################################
model = make()
for _ in range(1):
    # we want to minimize this
    train_steps = 3250

    # create the optimizer(s)
    optimizer1 = AdamW([dict(params=[model.embed.weight], lr=0.7),
                        dict(params=[p for p in model.parameters() if p.ndim < 2], lr=0.015)],
                       betas=(0.8, 0.95))
    optimizer2 = Muon([p for p in model.blocks.parameters() if p.ndim >= 2],
                      lr=0.025, weight_decay=0.05)
    optimizers = [optimizer1, optimizer2]
    assert set(p for opt in optimizers for group in opt.param_groups
               for p in group["params"]) == set(model.parameters())
"""


def network():
    torch.manual_seed(5)
    model = nn.Module()
    model.embed, model.blocks = nn.Embedding(5, 4), nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
    nn.init.zeros_(model.blocks[1].weight)
    return model


def matrices(model):
    return [p for p in model.blocks.parameters() if p.ndim >= 2]


@pytest.mark.parametrize("preset", PRESETS)
def test_it_is_alto(preset):
    chosen = recipe(4096, preset=preset, lr=0.03)
    one, other = network(), network()
    ours = ALTO(matrices(other), **chosen)
    chosen.pop("vector_lr", None)
    theirs = single.ALTO(matrices(one), **chosen)
    for k in range(5):
        torch.manual_seed(k)
        for p, q in zip(matrices(one), matrices(other), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    for p, q, start in zip(matrices(one), matrices(other), matrices(network()), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert not torch.equal(p, start)


def test_the_adapted_script_has_alto_for_the_matrices():
    text = adapt(SCRIPT, "zero-lag", 0.02, 4000)
    found = {"make": network, "torch": torch}
    exec(compile(text, "train_gpt_alto.py", "exec"), found)  # its assertion looks for all parameters
    first, second = found["optimizers"]
    assert type(first) is torch.optim.AdamW
    assert type(second).__name__ == "ALTO"
    assert {name: second.defaults[name] for name in ("lr", "alpha", "betas")} == {
        "lr": 0.02, "alpha": 4.0, "betas": (0.8, 0.8, 0.99),
    }  # fmt: skip
    assert found["train_steps"] == 4000


def test_another_script_is_refused():
    with pytest.raises(ValueError, match="train_steps 0 times"):
        adapt(SCRIPT.replace("train_steps = 3250", "steps = 1"), "paper", 0.01, 10)
    with pytest.raises(ValueError, match="Muon"):
        adapt(SCRIPT.replace("Muon", "Lion"), "paper", 0.01, 10)
