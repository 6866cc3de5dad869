"""The figure of :mod:`.gpt`."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from .figures import COLOURS, new_figure, save
from .gpt_findings import NAMES, Findings, gap


def draw(found: Findings, into: Path) -> list[str]:
    panels = [_curves, _others, *([_batches] if found.at("epochs") else [])]
    figure, axes = new_figure(1, len(panels), width=5.0, height=4.2)
    for panel, ax in zip(panels, axes[0], strict=True):
        panel(ax, found)
    return [save(figure, into, "gpt.png")]


def _curves(ax: Any, found: Findings) -> None:
    """Everything that sees the text once; what is not in the paper's table is dashed. Bands are the range of seeds."""
    peers = found.peers().values()
    for entry in sorted(found.at("once"), key=lambda entry: -statistics.fmean(entry.losses)):
        curves = list(zip(*(outcome.valid for outcome in entry.outcomes), strict=True))
        steps, colour = entry.outcomes[0].steps, COLOURS[NAMES[entry.trial.optimizer]]
        mean = [statistics.fmean(at) for at in curves]
        if entry in peers:
            ax.fill_between(steps, list(map(min, curves)), list(map(max, curves)), color=colour, alpha=0.12, lw=0)
        style = "-" if entry in peers else ":" if entry.trial.alpha < 0 else "--"
        ax.plot(steps, mean, style, color=colour, label=f"{entry.name}: {entry.perplexity:.0f}")
    ax.set(xlabel="iterations", ylabel="validation loss, nats a token", title="tuned; text seen once", ylim=(None, 6.3))
    ax.legend(title="perplexity at the end", fontsize=7, title_fontsize=8)
    ax.grid(alpha=0.3)


def _others(ax: Any, found: Findings) -> None:
    """The loss of every (alpha, beta1) at one rate on the tuning seed, by rho."""
    rate, losses, lamb = found.by_rho()
    for beta1, colour in zip(sorted({b for _, b in losses}), ("tab:blue", "tab:green", "tab:red", "k"), strict=False):
        by_rho = sorted([(-alpha * (1 - b), loss) for (alpha, b), loss in losses.items() if b == beta1] + [(0.0, lamb)])
        ax.plot(*zip(*by_rho, strict=True), "o-", ms=4, color=colour, label=f"beta1 {beta1:g}")
    ax.axhline(lamb, color=COLOURS["LAMB"], ls="--", label="LAMB (rho 0)")
    ax.set(xlabel="rho = -alpha (1 - beta1)", ylabel="validation loss", title=f"tuning seed, lr {rate:g}")
    ax.legend(fontsize=8)
    ax.grid(alpha=0.3)


def _batches(ax: Any, found: Findings) -> None:
    """ALTO's loss less LAMB's for the same number of epochs; bars are two standard errors."""
    sizes = list(found.by_batch())
    for index, colour in ((2, COLOURS["ALTO"]), (3, "tab:blue")):
        gaps = [gap(size[index], size[1]) for size in sizes]
        label = sizes[0][index].name
        ax.errorbar(
            [size[0] for size in sizes],
            [d.mean for d in gaps],
            [2 * d.error for d in gaps],
            fmt="o-",
            capsize=4,
            color=colour,
            label=label,
        )
    ax.axhline(0, color=COLOURS["LAMB"], ls="--", label="LAMB")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set(xlabel="batch, same number of epochs", ylabel="validation loss less LAMB's", title="below 0: ahead of LAMB")
    ax.legend(fontsize=8)
    ax.grid(alpha=0.3)
