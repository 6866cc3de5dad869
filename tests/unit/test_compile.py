"""torch.compile over a whole training step: the step is called as it is, and the rest is compiled."""

import pytest
import torch
from torch import nn

from alto_distributed import ALTO, E, param_groups

OPTIMIZERS = {
    "ALTO": lambda model: ALTO(param_groups(model)),
    "LAMB": lambda model: ALTO(param_groups(model), alpha=0),
    "E(SGD)": lambda model: E(torch.optim.SGD(model.parameters(), lr=0.1)),
    "E(AdamW)": lambda model: E.of(torch.optim.AdamW)(model.parameters(), lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_compiled_training_step_is_the_training_step(name):
    x = torch.linspace(-1, 1, 96).reshape(16, 6)
    graphs, results = [], []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))
        optimizer = OPTIMIZERS[name](model)
        called = []
        optimizer.register_step_post_hook(lambda *_, called=called: called.append(1))

        def step(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        train = torch.compile(step, backend=backend) if compiled else step
        losses = [train().item() for _ in range(4)]
        assert len(called) == 4
        results.append([torch.tensor(losses), *(p.detach() for p in model.parameters())])
        for p in model.parameters():
            assert "grad_ema" in optimizer.state[p] or name == "LAMB"
    assert graphs  # the model is compiled
    assert not any("sqrt" in str(graph.code) or "lerp" in str(graph.code) for graph in graphs)  # the optimizer is not
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)
