"""ALTO straight from the paper, in float64 and in its own two-tensor form.

Nothing here comes from the package: it keeps the acceleration a and the previous gradient, as the
paper's Algorithm "ALTO" does, so that comparing with it also tests the one-tensor identity of
``shared/alto.md``. One instance serves one whole parameter.
"""

import torch


class PaperALTO:
    def __init__(
        self, theta, *, lr, betas, alpha, eps, weight_decay, ratio=True, one_at_zero=True, debias=True, zero_stays=True
    ):
        self.theta = theta.detach().clone().double()
        self.lr, self.alpha, self.wd = lr, alpha, weight_decay
        self.b1, self.b2, self.b3 = betas
        self.e1, self.e2, self.e3 = eps
        self.ratio, self.one_at_zero, self.debias, self.zero_stays = ratio, one_at_zero, debias, zero_stays
        zero = torch.zeros_like(self.theta)
        self.k, self.a, self.g_prev, self.m, self.v = 0, zero, zero, zero, zero

    def step(self, g):
        g = g.detach().double()
        self.k += 1
        self.a = self.b1 * self.a + (1 - self.b1) * (g - self.g_prev)
        d = g + self.alpha * self.a
        self.m = self.b2 * self.m + (1 - self.b2) * d
        self.v = self.b3 * self.v + (1 - self.b3) * d * d
        m_hat = self.m / (1 - self.b2**self.k) if self.debias else self.m
        v_hat = self.v / (1 - self.b3**self.k) if self.debias else self.v
        r = m_hat / (v_hat.sqrt() + self.e1) + self.wd * self.theta
        if g.any() or not self.zero_stays:  # shared/alto.md, "Zero gradients"
            self.theta = self.theta - self.lr * self._ratio(r) * r
        self.g_prev = g
        return self.theta

    def _ratio(self, r):
        theta_norm, r_norm = self.theta.norm(), r.norm()
        if not self.ratio or (self.one_at_zero and (theta_norm == 0 or r_norm == 0)):
            return 1.0
        phi = theta_norm + self.e3
        return phi / (r_norm + self.e2 * phi)
