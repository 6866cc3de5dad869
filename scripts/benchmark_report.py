"""What scripts/benchmark.py found, as a page and a figure, held to the bars that the project set itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmark_peers import C_KERNEL, OFFICIAL, TORCH_KERNEL


def table(result: dict[str, Any]) -> str:
    return "\n\n".join(part for part in (_steps(result), _shares(result), _bars(result)) if part)


def _steps(result: dict[str, Any]) -> str:
    count, speeds = result["parameters"], result["bandwidth"]
    lines = [
        f"GPT-2 shapes, {count / 1e6:.0f}M parameters in float32; {result['device']}, {result['threads']} threads, "
        f"torch {result['torch']}; {result['rounds']} rounds. Copy {speeds['copy'] / 1e9:.1f} GB/s at best; triad "
        f"{speeds['triad'] / 1e9:.1f} GB/s in the median, {speeds['best_triad'] / 1e9:.1f} at best.",
        "",
        "| optimizer | ms a step | from - to | x AdamW fused | from - to | GB/s | x its bytes at triad speed | "
        "state, bytes a parameter | peak extra, MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        cells = [
            f"{row['seconds'] * 1e3:.0f}",
            f"{row['fastest'] * 1e3:.0f} - {row['slowest'] * 1e3:.0f}",
            f"{row['to_adamw']:.2f}",
            f"{row['to_adamw_least']:.2f} - {row['to_adamw_most']:.2f}",
            f"{row['bytes'] * count / row['seconds'] / 1e9:.1f}",
            f"{row['to_triad']:.2f}",
            f"{row['state'] / count:.1f}",
            f"{row['extra'] / 2**20:.0f}",
        ]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    disturbed = [f"{row['name']} ({row['others']:.0%})" for row in result["rows"] if row["others"] > result["quiet"]]
    lines += ["", f"Other processes took at most {result['quiet']:.0%} of the cores in any round that counts"]
    lines[-1] += f", except beside: {', '.join(disturbed)}." if disturbed else "."
    lines += ["", *(f"Left out: {name} ({why})." for name, why in result["left_out"].items())]
    return "\n".join(lines).rstrip()


def _shares(result: dict[str, Any]) -> str:
    lines = [
        f"Norm collective, {entry['ranks']} gloo ranks: {entry['seconds'] * 1e6:.0f} us for {entry['parameters']} "
        f"parameters ({entry['bytes']} bytes)."
        for entry in result.get("collectives", [])
    ]
    iteration = result.get("iteration")
    if iteration:
        parts = ", ".join(
            f"{part} {seconds:.2f} s ({seconds / iteration['seconds']:.1%})"
            for part, seconds in iteration["parts"].items()
        )
        lines.append(
            f"An iteration of {iteration['samples']} sample, {iteration['tokens']} tokens, in float32 on "
            f"{result['threads']} threads: {iteration['seconds']:.1f} s: {parts}."
        )
    return "\n\n".join(lines)


def bars(result: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """(what was promised, what was found, whether it holds), as far as this run can tell."""
    rows = {row["name"]: row for row in result["rows"]}
    c, official = rows.get(C_KERNEL), rows.get(OFFICIAL)
    found: list[tuple[str, str, bool]] = []

    def hold(what: str, value: float, shown: str, limit: float, *, at_least: bool = False) -> None:
        found.append((what, shown, value >= limit if at_least else value <= limit))

    if c:
        ratio, at_triad = c["to_adamw"], c["to_triad"]
        hold("C at most 1.75 times AdamW fused", ratio, f"{ratio:.3f}", 1.75)
        hold("C within 1.15 of 48 bytes a parameter at triad speed", at_triad, f"{at_triad:.3f}", 1.15)
    for name, kernel, least in (("C", c, 6.0), ("torch path", rows.get(TORCH_KERNEL), 2.5)):
        if kernel and official:
            speed = official["seconds"] / kernel["seconds"]
            what = f"{name} at least {least:g} times as fast as the official ALTO"
            hold(what, speed, f"{speed:.2f}", least, at_least=True)
    for kernel in (c, rows.get(TORCH_KERNEL)):
        if kernel:
            extra = kernel["extra"] / 2**20
            hold(f"{kernel['name']}: at most 16 MiB beyond states and gradients", extra, f"{extra:.1f}", 16)
    if result.get("collectives") and result.get("iteration"):
        two = next(entry for entry in result["collectives"] if entry["ranks"] == 2)
        share = two["seconds"] / result["iteration"]["seconds"]
        hold("norm collective at two ranks below 1% of an iteration of one sample", share, f"{share:.3%}", 0.01)
    return found


def _bars(result: dict[str, Any]) -> str:
    held = bars(result)
    if not held:
        return ""
    lines = [f"| {what} | {shown} | {'met' if met else '**missed**'} |" for what, shown, met in held]
    return "\n".join(["| bar | here | |", "|---|---|---|", *lines])


def draw(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = sorted(result["rows"], key=lambda row: row["seconds"], reverse=True)
    drawing, axes = pyplot.subplots(figsize=(9, 0.45 * len(rows) + 1.5), layout="constrained")
    ours = ["tab:blue" if "ALTO" in row["name"] and row["name"] != OFFICIAL else "0.6" for row in rows]
    axes.barh([row["name"] for row in rows], [row["seconds"] * 1e3 for row in rows], color=ours)
    for position, row in enumerate(rows):
        least = row["bytes"] * result["parameters"] / result["bandwidth"]["triad"] * 1e3
        axes.plot([least, least], [position - 0.4, position + 0.4], color="black")
        axes.plot([row["fastest"] * 1e3, row["slowest"] * 1e3], [position, position], color="0.3", linewidth=1)
    axes.set(xlabel="ms a step (black: the bytes it must move, at triad speed; thin: fastest to slowest)", xscale="log")
    drawing.savefig(path, dpi=90)
    pyplot.close(drawing)
