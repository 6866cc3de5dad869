"""A mixture of experts whose routing the test decides: one expert gets tokens on one rank only, one gets none at all.

An expert without tokens has gradients of zero, not None, as in the buffers of Megatron and ZeRO.
"""

import torch
from torch import nn

EXPERTS, TOKENS = 4, 8
#: Steps in which every expert gets tokens, so that there is momentum, and all steps.
WARM, STEPS = 5, 105
ALONE, IDLE = 2, 3


class Routed(nn.Module):
    """Odd sizes, so that shards cut through experts."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, 7)
        self.up = nn.ModuleList(nn.Linear(7, 9) for _ in range(EXPERTS))
        self.down = nn.ModuleList(nn.Linear(9, 7) for _ in range(EXPERTS))
        self.head = nn.Linear(7, 1)

    def forward(self, x, routes):
        h = self.embed(x)
        mixed = torch.zeros_like(h)
        for e, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            mine = (routes == e).nonzero().squeeze(1)
            mixed = mixed.index_add(0, mine, down(torch.tanh(up(h[mine]))))
        return self.head(h + mixed)


def network(dtype, device="cpu"):
    torch.manual_seed(3)
    return Routed().to(device, dtype)


def batches(dtype, device="cpu"):
    """Of each step: inputs, targets, and the expert of each token. After the first steps, ALONE has the last token."""
    generator = torch.Generator().manual_seed(17)
    for k in range(STEPS):
        x = torch.randn(TOKENS, 5, dtype=torch.float64, generator=generator).to(device, dtype)
        y = torch.randn(TOKENS, 1, dtype=torch.float64, generator=generator).to(device, dtype)
        routes = torch.arange(TOKENS) % EXPERTS if k < WARM else torch.tensor([0, 1, 0, 1, 0, 1, 0, ALONE])
        yield k, x, y, routes.to(device)


def is_idle(name):
    return name.startswith((f"up.{IDLE}.", f"down.{IDLE}."))


def is_alone(name):
    return name.startswith((f"up.{ALONE}.", f"down.{ALONE}."))


def check_idle(after_warm_up, at_the_end):
    """By name: no idle expert has moved since, to the bit, and all else has."""
    for name, weight in at_the_end.items():
        assert torch.equal(weight, after_warm_up[name]) == is_idle(name), name
