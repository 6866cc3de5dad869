"""The command: one study, all of them, or the page."""

from __future__ import annotations

import argparse
import importlib
import time
from pathlib import Path

from . import STUDIES
from .page import make_pages
from .places import RESULTS, ROOT
from .study import Result, write

#: Quick results show that a study works; they are no evidence and stay out of the repository.
QUICK_RESULTS = ROOT / "runs" / "evidence"


def run_study(name: str, quick: bool, into: Path | None = None) -> Result:
    """Run one study and write what it found, by default where the page looks (quick forms: runs/evidence)."""
    module = importlib.import_module(f"{__package__}.{name}")
    into = into or (QUICK_RESULTS if quick else RESULTS) / name
    into.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    result: Result = module.run(quick, into)
    result.seconds = round(time.perf_counter() - started, 1)
    write(result, into)
    print(f"{name}: {result.seconds} s, written to {into}")
    for claim in result.claims:
        print(f"  {claim.verdict}: {claim.paper} {claim.finding}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.evidence", description=__doc__)
    parser.add_argument("what", choices=[*STUDIES, "all", "page"])
    parser.add_argument("--quick", action="store_true", help="the short form, as CI runs it")
    parser.add_argument("--into", type=Path, help="directory to write to; with all, one folder a study in it")
    options = parser.parse_args()
    if options.what == "page":
        print(*make_pages(), sep="\n")
        return
    for name in STUDIES if options.what == "all" else (options.what,):
        into = options.into / name if options.into and options.what == "all" else options.into
        run_study(name, options.quick, into)
    if options.what == "all" and not options.quick and options.into is None:
        print(*make_pages(), sep="\n")


if __name__ == "__main__":
    main()
