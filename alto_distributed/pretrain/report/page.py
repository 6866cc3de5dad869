"""One HTML page that needs nothing else: no script, no network, the figures inside."""

from __future__ import annotations

import base64
import html
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from .palette import color
from .runs import RunRecords

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto; max-width: 1180px;
  padding: 1.5rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .4rem; border-bottom: 1px solid #ddd; padding-bottom: .2rem; }
p.note { color: #555; margin: .2rem 0 .8rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
div.wide { overflow-x: auto; }
th, td { text-align: right; padding: .3rem .5rem; font-size: 14px; border-bottom: 1px solid #e5e5e5;
  white-space: nowrap; }
th:first-child, td:first-child, td.text { text-align: left; }
td.text { white-space: normal; overflow-wrap: anywhere; }
th { font-weight: 600; color: #555; }
i.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .5em; }
img { max-width: 100%; height: auto; display: block; margin: .4rem 0 1rem; }
pre { background: #f6f6f6; padding: .7rem; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; }
summary { cursor: pointer; font-weight: 600; padding: .3rem 0; }
"""


def page(
    runs: Sequence[RunRecords],
    summaries: Sequence[Mapping[str, Any]],
    pictures: Sequence[tuple[str, str, str, bytes]],
    cell: Any,
    refresh: int = 0,
) -> str:
    """The page.

    Args:
        runs: in the order of the table.
        summaries: a row each.
        pictures: heading, what it shows, alternative text and SVG of each.
        cell: makes text of a value of the table.
        refresh: seconds after which a browser reads the page again; 0 for never.
    """
    again = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    title = html.escape(", ".join(run.name for run in runs)[:120])
    body = [
        f"<h1>{title}</h1>",
        f'<p class="note">{_state(runs)}</p>',
        _table(runs, summaries, cell),
        *(_picture(*picture) for picture in pictures),
        "<h2>How they were made</h2>",
        *(_about(run) for run in runs),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>{again}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _state(runs: Sequence[RunRecords]) -> str:
    done = sum(run.is_done for run in runs)
    diverged = sum(run.has_diverged for run in runs)
    ended = f" {diverged} of {len(runs)} runs diverged." if diverged else ""
    return ("All runs are complete." if done == len(runs) else f"{done} of {len(runs)} runs are complete.") + ended


def _table(runs: Sequence[RunRecords], summaries: Sequence[Mapping[str, Any]], cell: Any) -> str:
    columns = [*summaries[0], "skipped steps"]
    columns[1:1] = ["optimizer", "rate"]
    rows = []
    for run, row in zip(runs, summaries, strict=True):
        swatch = f'<i class="swatch" style="background:{color(run.optimizer)}"></i>'
        values = [cell(value) for value in row.values()] + [str(run.skipped)]
        values[1:1] = [run.optimizer or "-", run.rate]
        first, *others = map(html.escape, values)
        rows.append(f"<tr><td>{swatch}{first}</td>" + "".join(f"<td>{value}</td>" for value in others) + "</tr>")
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _picture(heading: str, note: str, alternative: str, svg: bytes) -> str:
    # As an image of its own: ids in one drawing must not meet those of another.
    source = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
    head = f"<h2>{html.escape(heading)}</h2>" if heading else ""
    about = f'<p class="note">{html.escape(note)}</p>' if note else ""
    return f'{head}{about}<img alt="{html.escape(alternative)}" src="{source}">'


def _about(run: RunRecords) -> str:
    """Seeds, command line, versions, hardware and settings."""
    if not run.settings:
        return f"<p>{html.escape(run.name)}: this run was made by a version that did not write this down.</p>"
    training = run.settings.get("training")
    rows = [("seed", str(training.get("seed", "-")) if isinstance(training, Mapping) else "-")]
    for start in run.starts:
        when = f"start at step {start.get('step', 0)}, {start.get('began', '')}"
        command = start.get("command")
        words = [str(word) for word in command] if isinstance(command, list) else []
        ranks = start.get("ranks", "?")
        rows.append((when, f"{ranks} rank{'' if ranks == 1 else 's'}: {shlex.join(words)}"))
    rows += [(f"from step {step} on", said) for step, said in run.changes]
    if run.starts:
        for name in ("versions", "hardware"):
            rows.append((name, _flat(run.starts[-1].get(name))))
    lines = "".join(f'<tr><td>{html.escape(k)}</td><td class="text">{html.escape(v)}</td></tr>' for k, v in rows)
    settings = html.escape(_sections(run.settings))
    return (
        f"<details open><summary>{html.escape(run.name)}</summary><table><tbody>{lines}</tbody></table>"
        f"<pre>{settings}</pre></details>"
    )


def _flat(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    return ", ".join(f"{k} {_flat(v) if isinstance(v, Mapping) else v}" for k, v in value.items())


def _sections(settings: Mapping[str, Any]) -> str:
    """A section a line, as in the YAML files."""
    lines = []
    for section, values in settings.items():
        inner = ", ".join(f"{k}: {json.dumps(v)}" for k, v in values.items()) if isinstance(values, dict) else values
        lines.append(f"{section}: {{{inner}}}" if isinstance(values, dict) else f"{section}: {inner}")
    return "\n".join(lines)
