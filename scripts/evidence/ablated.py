"""ALTO with parts taken out, for the ablation alone: plain formulas, one tensor after the other.

With nothing taken out it is the package's ALTO (tests/end_to_end/test_evidence.py holds it to that).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class AblatedALTO(torch.optim.Optimizer):
    """The paper's Algorithm ALTO, line by line.

    Args:
        params: groups; those with weight decay get the layer-wise ratio.
        lr: learning rate.
        alpha: weight of the acceleration.
        betas: of the acceleration, the first and the second moment.
        weight_decay: inside the update.
        eps: added to the root of the second moment; eps2 and eps3 are the paper's.
        in_m: whether the first moment gets the acceleration.
        in_v: whether the second moment gets it.
        bias_correction: whether moments are divided by 1 - beta^k.
        ratio: whether a step is scaled by the parameter's norm.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        alpha: float,
        betas: tuple[float, float, float] = (0.99, 0.9, 0.99),
        weight_decay: float = 1e-4,
        eps: float = 1e-6,
        *,
        in_m: bool = True,
        in_v: bool = True,
        bias_correction: bool = True,
        ratio: bool = True,
    ) -> None:
        self.parts = {"in_m": in_m, "in_v": in_v, "bias_correction": bias_correction, "ratio": ratio}
        super().__init__(params, {"lr": lr, "alpha": alpha, "betas": betas, "weight_decay": weight_decay, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)

    def _update(self, param: torch.Tensor, g: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state.update({name: torch.zeros_like(param) for name in ("a", "g", "m", "v")}, k=0)
        state["k"] += 1
        b1, b2, b3 = group["betas"]
        state["a"].mul_(b1).add_((1 - b1) * (g - state["g"]))
        state["g"].copy_(g)
        adapted = g + group["alpha"] * state["a"]
        state["m"].lerp_(adapted if self.parts["in_m"] else g, 1 - b2)
        state["v"].lerp_((adapted if self.parts["in_v"] else g) ** 2, 1 - b3)
        corrected = self.parts["bias_correction"]
        m = state["m"] / (1 - b2 ** state["k"]) if corrected else state["m"]
        v = state["v"] / (1 - b3 ** state["k"]) if corrected else state["v"]
        r = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * param
        scale = 1.0
        if self.parts["ratio"] and group["weight_decay"]:
            size, length = param.norm().item(), r.norm().item()
            if size and length:
                phi = size + 1e-10
                scale = phi / (length + 1e-6 * phi)
        param.sub_(group["lr"] * scale * r)
