"""What came of one run or several: a table, a page to look at, and figures for a paper.

``report.html`` holds everything; ``report.md`` and ``report.json`` the table; ``report*.png`` and ``report*.svg`` the
figures one by one.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...extras import require
from .runs import RunRecords
from .summary import cell, summary, table

__all__ = ["summary", "table", "watch", "write"]

#: Figures of each run, beside those of all together: what to call them, and what they show.
_BY_RUN = {
    "trust-ratios": ("ratio_map", "Trust ratios", "The layer-wise factor of each step. Yellow moves most."),
    "layers": ("layer_lines", "Trust ratios by layer", ""),
    "norms": ("norms", "Norms and acceleration", ""),
}  # fmt: skip


def write(directories: Sequence[Path], into: Path, refresh: int = 0) -> tuple[str, Path]:
    """The table of some runs, which is returned, and all files of the report.

    Args:
        directories: of the runs.
        into: where to write.
        refresh: seconds after which a browser reads the page again; 0 for never.

    Returns:
        The table in Markdown, and the path of the page.

    Raises:
        ValueError: a directory has no records of a run, or its numbers cannot be drawn.
    """
    require("matplotlib")
    summaries = [summary(directory) for directory in directories]
    runs = [RunRecords(directory) for directory in directories]
    text = table(summaries)
    into.mkdir(parents=True, exist_ok=True)
    (into / "report.md").write_text(text + "\n")
    (into / "report.json").write_text(json.dumps(summaries, indent=1))
    try:
        pictures = _draw(runs, into)
    except (ValueError, ArithmeticError) as error:  # axes from -1e308 to 1e308, say
        raise ValueError(f"the curves of {', '.join(map(str, directories))} cannot be drawn: {error}") from error
    from .page import page

    path = into / "report.html"
    beside = path.with_name(".report.html")
    beside.write_text(page(runs, summaries, pictures, cell, refresh), encoding="utf-8")
    beside.replace(path)  # a browser that reads meanwhile sees all of the last one
    return text, path


def watch(
    directories: Sequence[Path], into: Path, seconds: int, say: Callable[[str], None], sleep: Any = time.sleep
) -> None:
    """Write the report again and again while runs go on. It ends with them."""
    while True:
        runs = [RunRecords(directory) for directory in directories]
        diverged = [run.name for run in runs if run.has_diverged]
        done = all(run.is_done or run.has_diverged for run in runs)
        _, path = write(directories, into, 0 if done else seconds)
        steps = ", ".join(f"{run['run']} step {run['steps']}" for run in map(summary, directories))
        ended = f"; {', '.join(diverged)} diverged" if diverged else "; complete"
        say(f"{path}: {steps}{ended if done else ''}")
        if done:
            return
        sleep(seconds)


def _draw(runs: Sequence[RunRecords], into: Path) -> list[tuple[str, str, str, bytes]]:
    """Write the figures as PNG and SVG; heading, note, alternative text and SVG of each for the page."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed, or asked for
    from . import figures

    names = ", ".join(run.name for run in runs)
    ticks = "Marks at the bottom are skipped steps." if any(run.skipped for run in runs) else ""
    drawn = [("Loss", ticks, f"loss and perplexity of {names}", _saved(figures.overview(runs), into / "report"))]
    training = _saved(figures.progress(runs), into / "report-training")
    drawn.append(("Training", "", f"learning rate, gradient norm, speed and memory of {names}", training))
    for end, (drawing, heading, note) in _BY_RUN.items():
        for place, run in enumerate(runs):
            figure = getattr(figures, drawing)(run)
            if figure is None:
                continue
            called = f"report-{end}" + (f"-{run.name}" if len(runs) > 1 else "")
            is_first = not any(have[0] == heading for have in drawn[2:]) or place == 0
            about = (heading, note) if is_first else ("", "")
            drawn.append((*about, f"{heading.lower()} of {run.name}", _saved(figure, into / called)))
    return drawn


def _saved(figure: Any, path: Path) -> bytes:
    """Write ``path`` + .png and .svg; the latter is returned."""
    import matplotlib

    svg = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "alto"}):
        figure.savefig(svg, format="svg", metadata={"Date": None})
    Path(f"{path}.svg").write_bytes(svg.getvalue())
    figure.set_layout_engine("none")  # the layout takes longest, and is done
    figure.savefig(f"{path}.png", dpi=160)
    return svg.getvalue()
