"""``python -m alto_distributed doctor``: this machine and environment on one page, with self-checks.

It needs torch alone. What could hang or crash (devices, frameworks, kernels, process groups) runs in processes of its
own (:mod:`.processes`, :mod:`.child`), so that it is reported and the doctor goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence

from ..errors import Parser
from .examination import examine
from .processes import run
from .report import page


def main(arguments: Sequence[str]) -> int:
    """Print the page, or the same as JSON; returns the exit code: 1 if something is wrong that a user relies on."""
    parser = Parser(
        "alto_distributed doctor",
        description="Versions, devices, what each engine supports, and self-checks. A bug report contains its output.",
    )
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    parser.add_argument(
        "--timeout", type=_seconds, default=60.0, metavar="SECONDS", help="limit of each check (default: 60)"
    )
    parser.add_argument(
        "--benchmark", action="store_true", help="instead, measure steps on this device, in a block to paste"
    )
    options = parser.parse_args(arguments)
    if options.benchmark:
        return _benchmark(options.timeout, options.json)
    try:
        found = examine(options.timeout)
    except KeyboardInterrupt:
        return 130  # as a shell has it
    print(json.dumps(found, indent=2) if options.json else page(found))
    return 0 if found["ok"] else 1


def _benchmark(seconds: float, as_json: bool) -> int:
    from .benchmark import block

    (ended,) = run(["benchmark"], seconds=seconds)
    machine, *rows = ended.records or [{"machine": "unknown"}]
    print(json.dumps({**machine, "rows": rows}, indent=2) if as_json else block(rows, machine["machine"]))
    if ended.problem:
        print(f"the benchmark did not end well: {ended.problem}", file=sys.stderr)
    return 1 if ended.problem else 0


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 1e6:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
