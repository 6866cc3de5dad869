"""Memory of a training step with LAMB and with ALTO, by batch and by size of the model, to the byte.

Counted is what torch's allocator holds at its fullest during a step: weights, gradients, states, activations and
temporary tensors. The paper measured BERT-base on a GPU; here it is a GPT-2 on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from alto_distributed import ALTO, param_groups
from alto_distributed.pretrain.config.settings import parse
from alto_distributed.pretrain.model import build_model, inputs_of, next_token_loss

from .allocations import held, peak_beyond, states
from .figures import COLOURS, new_figure, save
from .study import Claim, Result, verdict

TITLE = "Memory of a step, by batch"
INTRO = (
    "A GPT-2 in float32, sequence 64, vocabulary 1024, one training step after the states exist. Weights, gradients, "
    "states, activations and temporary tensors are counted to the byte, as torch's CPU allocator hands them out. LAMB "
    "is ALTO with alpha = 0, which keeps two tensors; our ALTO keeps three, the authors' own code "
    "(e-optimizer-adaptor) six. b is what goes through the model at once on one device: the micro-batch, not the "
    "global batch."
)
LAMB, OURS, SMALL, OFFICIAL, OTHER_LAMB = (
    "LAMB",
    "ALTO",
    "ALTO, bf16 grad_ema",
    "ALTO (official)",
    "LAMB (pytorch_optimizer)",
)
#: Of the paper's table for BERT-base: batch -> (LAMB, ALTO), MiB; and its number of parameters.
PAPER = {32: (5491, 7869), 512: (58636, 60822), 1024: (109006, 111228)}
PAPER_PARAMETERS = 108_317_193
MIB = 2**20
#: How far the formula may be from what is measured between the two points that it was fitted to, relatively.
FITS = 0.1
#: Largest over smallest overhead of sizes that count as "the same whatever the size". The paper's own table has 1.28.
SAME = 1.3


@dataclass(frozen=True)
class Size:
    layers: int
    hidden: int


def official(groups: Any) -> torch.optim.Optimizer:
    import ALTO as module

    return module.ALTO(groups, lr=1e-3, betas=(0.99, 0.9, 0.99), alp=-5, eps=1e-6)


def other_lamb(groups: Any) -> torch.optim.Optimizer:
    from pytorch_optimizer import Lamb

    return Lamb(groups, lr=1e-3)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    LAMB: lambda groups: ALTO(groups, lr=1e-3, alpha=0.0),
    OURS: lambda groups: ALTO(groups, lr=1e-3),
    SMALL: lambda groups: ALTO(groups, lr=1e-3, grad_ema_dtype="bfloat16"),
    OFFICIAL: official,
    OTHER_LAMB: other_lamb,
}


def measure(name: str, size: Size, batch: int) -> dict[str, Any]:
    """What a step needs with one of the optimizers."""
    settings = {"layers": size.layers, "hidden": size.hidden, "heads": 4, "sequence": 64, "vocabulary": 1024}
    model = build_model(parse({"model": {**settings, "dropout": 0.0}}))
    optimizer = OPTIMIZERS[name](param_groups(model))
    tokens = torch.randint(0, 1024, (batch, 65), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        next_token_loss(model(**inputs_of(tokens)).logits, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # makes the states
    kept = states(optimizer)
    there = held([*model.parameters(), *model.buffers(), *kept])
    count = sum(p.numel() for p in model.parameters())
    return {
        "optimizer": name,
        "layers": size.layers,
        "hidden": size.hidden,
        "parameters": count,
        "batch": batch,
        "state tensors": round(sum(t.numel() for t in kept) / count),
        "state bytes a parameter": held(kept) / count,
        "peak MiB": (there + peak_beyond(step)) / MIB,
    }


def run(quick: bool, into: Path) -> Result:
    size, batches = (Size(2, 64), (1, 4, 16)) if quick else (Size(4, 128), (1, 2, 4, 8, 16, 32, 64))
    fixed = 8 if quick else 16
    by_layers = [Size(n, size.hidden) for n in ((1, 3) if quick else (2, 4, 6, 8))]
    by_hidden = [Size(size.layers, h) for h in ((32, 128) if quick else (64, 128, 192, 256))]
    points = [*((size, b) for b in batches), *((s, fixed) for s in (*by_layers, *by_hidden))]
    measured: dict[tuple[str, Size, int], dict[str, Any]] = {}
    for at, b in dict.fromkeys(points):
        for name in OPTIMIZERS if at == size else (LAMB, OURS) if quick else (LAMB, OURS, OFFICIAL):
            row = measured[name, at, b] = measure(name, at, b)
            extra = row["peak MiB"] - measured[LAMB, at, b]["peak MiB"]
            row["extra, tensors of d"] = extra * MIB / (4 * row["parameters"])
            row["overhead %"] = 100 * extra / measured[LAMB, at, b]["peak MiB"]

    curves = {name: [measured[name, size, b]["overhead %"] / 100 for b in batches] for name in (OURS, OFFICIAL)}
    fits = {name: fit(batches, curve) for name, curve in curves.items()}
    sizes = {"layers": by_layers, "hidden": by_hidden}
    overheads = {kind: [measured[OURS, s, fixed]["overhead %"] for s in group] for kind, group in sizes.items()}
    extras = [measured[OURS, size, b]["extra, tensors of d"] for b in batches]
    theirs = [measured[OFFICIAL, size, b]["extra, tensors of d"] for b in batches]
    claims = [
        _falls(batches, curves, fits),
        _one_tensor(batches, extras, theirs),
        _whatever_the_size(sizes, overheads, fixed),
    ]
    return Result(
        study="memory",
        title=TITLE,
        form="quick" if quick else "full",
        settings={
            "sequence": 64,
            "vocabulary": 1024,
            "batches": list(batches),
            "batch for other sizes": fixed,
            "measured": list(measured.values()),
            "c1 and c2, from the first and the last batch": {name: list(c) for name, c in fits.items()},
        },
        seeds=[],
        rows=[_row(at, b, measured) for at, b in dict.fromkeys(points)],
        figures=[_draw(batches, curves, fits, into)],
        claims=claims,
        notes=_notes(batches, measured, size),
        guidance=_guidance(batches, curves[OURS]),
        intro=INTRO,
    )


def _row(size: Size, batch: int, measured: dict[tuple[str, Size, int], dict[str, Any]]) -> dict[str, Any]:
    """One row of the table: all optimizers at one batch and size."""
    here = {name: measured.get((name, size, batch)) for name in OPTIMIZERS}
    lamb = measured[LAMB, size, batch]
    row = {key: lamb[key] for key in ("layers", "hidden", "parameters", "batch")}
    row["LAMB, MiB"] = round(lamb["peak MiB"], 1)
    for name in (OURS, SMALL, OFFICIAL):
        row[f"{name}, + %"] = here[name] and round(here[name]["overhead %"], 2)
    for name in (OURS, OFFICIAL):
        row[f"{name}, + tensors"] = here[name] and round(here[name]["extra, tensors of d"], 2)
    return row


def fit(batches: Sequence[int], overhead: Sequence[float]) -> tuple[float, float]:
    """c1 and c2 of 1/(c1 b + c2), from the smallest and the largest batch, as the paper takes them."""
    (b0, y0), (b1, y1) = ((batches[i], 1 / overhead[i]) for i in (0, -1))
    c1 = (y1 - y0) / (b1 - b0)
    return c1, y0 - c1 * b0


def _misfit(batches: Sequence[int], overhead: Sequence[float], c: tuple[float, float]) -> float:
    """The formula's worst relative error at the batches that it was not fitted to."""
    between = zip(batches[1:-1], overhead[1:-1], strict=True)
    return max(abs(1 / (c[0] * b + c[1]) / measured - 1) for b, measured in between)


def _falls(batches: Sequence[int], curves: dict[str, list[float]], fits: dict[str, tuple[float, float]]) -> Claim:
    checks, told = [], []
    for name, curve in curves.items():
        misfit = _misfit(batches, curve, fits[name])
        falls = all(later < earlier for earlier, later in pairwise(curve))
        checks += [falls, misfit < FITS]
        told.append(
            f"{name}: {curve[0]:.1%} at b = {batches[0]}, {curve[-1]:.2%} at {batches[-1]}, c1 = {fits[name][0]:.3f} "
            f"and c2 = {fits[name][1]:.2f}, and the formula is off by at most {misfit:.1%} in between"
        )
    return Claim(
        "The memory that ALTO needs beyond LAMB's shrinks in relation as the batch b grows, as 1/(c1 b + c2).",
        "section 5.2, table of memory (a)",
        verdict(checks),
        "; ".join(told) + ".",
    )


def _one_tensor(batches: Sequence[int], ours: Sequence[float], theirs: Sequence[float]) -> Claim:
    paper = [(alto - lamb) * MIB / (4 * PAPER_PARAMETERS) for lamb, alto in PAPER.values()]
    checks = [all(abs(extra - 1) < 0.01 for extra in values) for values in (ours, theirs)]
    return Claim(
        "The extra memory is that of one number a parameter, d.",
        "section 5.2, derivation of the formula",
        verdict(checks),
        f"Our ALTO's peak is {min(ours):.2f} to {max(ours):.2f} float32 tensors of d above LAMB's; that of the "
        f"authors' code {min(theirs):.2f} to {max(theirs):.2f} (b = {batches[0]} to {batches[-1]}). The paper's own "
        f"table amounts to {min(paper):.1f} to {max(paper):.1f}.",
    )


def _whatever_the_size(sizes: dict[str, list[Size]], overheads: dict[str, list[float]], batch: int) -> Claim:
    spreads = {kind: max(values) / min(values) for kind, values in overheads.items()}
    told = [
        f"{getattr(sizes[kind][0], kind)} to {getattr(sizes[kind][-1], kind)} {'wide' if kind == 'hidden' else kind}: "
        f"{overheads[kind][0]:.1f}% to {overheads[kind][-1]:.1f}% (largest over smallest {spreads[kind]:.2f})"
        for kind in sizes
    ]
    return Claim(
        "At a fixed batch the relative overhead does not depend on the number of parameters.",
        "section 5.2, table of memory (b)",
        verdict([spread < SAME for spread in spreads.values()]),
        f"At b = {batch}, {'; '.join(told)}. Activations grow with the width and parameters with its square.",
    )


def _notes(batches: Sequence[int], measured: dict[tuple[str, Size, int], dict[str, Any]], size: Size) -> list[str]:
    small = {name: measured[name, size, batches[0]] for name in OPTIMIZERS}
    kept = [f"{name} {row['state bytes a parameter']:.0f}" for name, row in small.items()]
    return [
        f"Bytes of state a parameter: {', '.join(kept)}.",
        "Where the batch is small, the authors' code is fullest within its step, by its temporary tensors, and not in "
        "the backward pass; so no one formula holds for all batches.",
        "Batches are of one device. In a pretraining run with accumulation b is the micro-batch, which is small "
        "whatever the global batch, and with recomputation activations are fewer still; so a large global batch alone "
        "does not bring the overhead down to the paper's 2%. Sharding the states (ZeRO, FSDP) divides it by the "
        "ranks.",
    ]


def _guidance(batches: Sequence[int], overhead: Sequence[float]) -> list[str]:
    return [
        f"Memory: one more tensor a parameter than LAMB's is {overhead[0]:.0%} of a step's memory here at a "
        f'micro-batch of {batches[0]} and {overhead[-1]:.1%} at {batches[-1]}; `grad_ema_dtype="bfloat16"` halves it.'
    ]


def _draw(
    batches: Sequence[int], curves: dict[str, list[float]], fits: dict[str, tuple[float, float]], into: Path
) -> str:
    figure, axes = new_figure(width=6.5, height=4.2)
    ax = axes[0][0]
    smooth = [batches[0] * (batches[-1] / batches[0]) ** (i / 100) for i in range(101)]
    for name, colour in ((OURS, COLOURS["ALTO"]), (OFFICIAL, "tab:gray")):
        ax.plot(batches, [100 * y for y in curves[name]], "o", color=colour, label=f"{name}, measured")
        c1, c2 = fits[name]
        label = f"1/({c1:.3f} b + {c2:.2f})"
        ax.plot(smooth, [100 / (c1 * b + c2) for b in smooth], "-", color=colour, lw=1, label=label)
    paper = {b: 100 * (alto / lamb - 1) for b, (lamb, alto) in PAPER.items()}
    ax.plot(list(paper), list(paper.values()), "k^", label="paper, BERT-base on a GPU")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}%")
    ax.set(xlabel="samples at once on the device, b", ylabel="peak memory beyond LAMB's")
    ax.set_title("Memory of a step, relative to LAMB's")
    ax.grid(alpha=0.3, which="both")
    ax.legend()
    return save(figure, into, "memory.png")
