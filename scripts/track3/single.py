"""ALTO for whole matrices, in one class that needs torch alone: the track wants all code in one file.

The formula is that of alto_distributed (docs/algorithm.md), with which a test compares it. Parameters and gradients
are the same on all ranks there, so that nothing is sharded.
"""

import torch


class ALTO(torch.optim.Optimizer):
    """Every parameter has the layer-wise ratio."""

    def __init__(self, params, lr, alpha, betas, eps=(1e-6, 1e-6, 1e-10), weight_decay=1e-4):
        defaults = {"lr": lr, "alpha": alpha, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (beta1, beta2, beta3), (eps1, eps2, eps3) = group["betas"], group["eps"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    names = ("m", "v", "u") if group["alpha"] else ("m", "v")
                    state.update({name: torch.zeros_like(p, dtype=torch.float32) for name in names}, k=0)
                state["k"] += 1
                g, theta = p.grad.float(), p.float()
                d = g
                if group["alpha"]:  # u is the average of the gradient; its change is the acceleration
                    d = g + group["alpha"] * (1 - beta1) * (g - state["u"])
                    state["u"].lerp_(g, 1 - beta1)
                state["m"].lerp_(d, 1 - beta2)
                state["v"].mul_(beta3).addcmul_(d, d, value=1 - beta3)
                r = state["m"] / (1 - beta2 ** state["k"])
                r /= (state["v"] / (1 - beta3 ** state["k"])).sqrt() + eps1
                r += group["weight_decay"] * theta
                phi, norm = theta.norm() + eps3, r.norm()
                ratio = phi / (norm + eps2 * phi)
                ratio = torch.where((theta.norm() == 0) | (norm == 0), torch.ones_like(ratio), ratio)
                p.copy_(theta - group["lr"] * ratio * r)
