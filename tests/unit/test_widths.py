"""A learning rate over widths: why Megatron's --use-mup, which divides it by the width, is refused (docs/megatron.md).

Adam moves each element by lr, so that a wider layer's step grows with the width, and muP divides it out. ALTO's step is
a share of the weights' norm, and the rate that is best for one width is best for another.
"""

import torch
from torch import nn

from alto_distributed import ALTO, param_groups

RATES = (0.006, 0.024, 0.096)


def loss_after(width, lr, steps=60):
    torch.manual_seed(0)
    layers = [nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)]
    model = nn.Sequential(*layers)
    x = torch.randn(256, 16)
    y = torch.sin(x.sum(1, keepdim=True))
    optimizer = ALTO(param_groups(model), lr=lr, vector_lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def test_the_best_rate_does_not_depend_on_the_width():
    losses = {width: {lr: loss_after(width, lr) for lr in RATES} for width in (64, 256)}
    for width, by_rate in losses.items():
        assert min(by_rate, key=by_rate.get) == 0.024, (width, by_rate)
        assert by_rate[0.024] < 0.5 * min(by_rate[0.006], by_rate[0.096]), (width, by_rate)
