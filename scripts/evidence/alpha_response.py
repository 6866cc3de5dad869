"""Draw docs/pictures/alpha.svg: what alpha and the betas do to a gradient that swings, by the length of a swing.

python -m scripts.evidence.alpha_response
"""

from __future__ import annotations

import cmath
import math

from alto_distributed import Hyperparameters, recipe

from .figures import new_figure, plain_ticks
from .places import DOCS

PICTURE = DOCS / "pictures" / "alpha.svg"
SHOWN = {
    "LAMB, beta2 0.9": (Hyperparameters(alpha=0.0), "tab:orange", "-"),
    "recommended (LAMB, beta2 0.8)": (Hyperparameters(**recipe(4096, "recommended")), "tab:green", "-"),
    "paper (-5, 0.99)": (Hyperparameters(), "tab:red", "--"),
    "nesterov (0.8, 0)": (Hyperparameters(**recipe(4096, "nesterov")), "tab:blue", "-"),
    "zero-lag (4, 0.8)": (Hyperparameters(**recipe(4096, "zero-lag")), "tab:purple", "-"),
}


def response(hyper: Hyperparameters, period: float) -> complex:
    """m over g for a gradient that swings once in ``period`` steps, when the start is forgotten."""
    beta1, beta2, _ = hyper.betas
    back = cmath.exp(-2j * math.pi / period)  # one step back
    adapted = 1 + hyper.alpha * (1 - beta1) * (1 - back) / (1 - beta1 * back)
    return adapted * (1 - beta2) / (1 - beta2 * back)


def draw() -> None:
    periods = [2 * 1.03**i for i in range(180)]
    figure, axes = new_figure(1, 2, 5.2, 3.8)
    for name, (hyper, color, style) in SHOWN.items():
        values = [response(hyper, period) for period in periods]
        axes[0][0].plot(periods, [abs(v) for v in values], color=color, ls=style, label=name)
        lags = [-cmath.phase(v) * period / (2 * math.pi) for v, period in zip(values, periods, strict=True)]
        axes[0][1].plot(periods, lags, color=color, ls=style)
    axes[0][0].set(xscale="log", xlabel="steps in a swing of the gradient", ylabel="size of m against g")
    axes[0][1].set(xscale="log", xlabel="steps in a swing of the gradient", ylabel="lag of m, steps")
    axes[0][0].legend(fontsize=7)
    for axis in axes[0]:
        plain_ticks(axis.xaxis)
    figure.savefig(PICTURE, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "alpha"  # the same file each time
    draw()
    print(PICTURE)
