"""Run the fitting tests with other releases of torch, DeepSpeed and megatron-core, and write the table in
docs/versions.md.

    python scripts/matrix.py                        every combination that has no result yet
    python scripts/matrix.py deepspeed-0.18.9 ...   those, again
    python scripts/matrix.py --table                write the table alone

A release is installed beside the environment, not into it: ``pip install --target`` into .cache/matrix, first on the
Python path of the tests. Everything else is the environment's. Another Python needs an environment of its own, made
with ``PYTHON=python3.12 bash scripts/test.sh``. Results are kept in .cache/matrix; a run that is stopped goes on.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "matrix"
RESULTS = CACHE / "results.json"
TABLE = ROOT / "docs" / "versions.md"

RELEASES = {
    "torch": ("2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"),
    "deepspeed": (
        *("0.16.9", "0.17.6", "0.18.0", "0.18.3", "0.18.9"),
        *(f"0.19.{patch}" for patch in range(9)),
    ),
    "megatron-core": ("0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2"),
}
TESTS = {
    "torch": (
        *("unit/test_optimizer.py", "unit/test_paper.py", "unit/test_layout.py", "unit/test_native.py"),
        *("unit/test_nonfinite.py", "unit/test_precision.py", "unit/test_small_states.py", "unit/test_adaptor.py"),
        *("unit/test_diagnostics.py", "unit/test_replaced_data.py", "unit/test_triton.py"),
        "distributed/test_sharded.py",
    ),
}
#: Of tests/distributed/cases, over two ranks.
CASES = {
    "deepspeed": "release_deepspeed",
    "megatron-core": "release_megatron,megatron,megatron_precision",
}


def install(name: str, version: str) -> Path:
    """A folder with one release: of torch with what it needs, of a framework by itself."""
    folder = CACHE / f"{name}-{version}"
    done = folder / ".installed"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        # megatron-core asks for Python 3.12 from 0.17 on, and its code runs on 3.11 too.
        own = [] if name == "torch" else ["--no-deps", "--no-build-isolation", "--ignore-requires-python"]
        command += [*own, "--target", str(folder), f"{name}=={version}"]
        subprocess.run(command, check=True, env={**os.environ, "DS_BUILD_OPS": "0"})
        done.touch()
    return folder


def run(name: str, version: str) -> dict[str, Any]:
    """How many tests of one combination pass, and which fail."""
    overlay = install(name, version)
    path = os.pathsep.join([str(overlay), str(ROOT)])
    variables = {"ALTO_OVERLAY": str(overlay), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    variables["ONEDNN_MAX_CPU_ISA"] = os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    passed, failed = (run_cases if name in CASES else run_files)(name, version, variables)
    return {
        "passed": passed,
        "failed": failed,
        "python": platform.python_version(),
        "torch": version if name == "torch" else _installed("torch"),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def run_cases(name: str, version: str, variables: dict[str, str]) -> tuple[int, list[str]]:
    """The cases over two ranks: how many passed, and the names of the others."""
    sys.path.insert(0, str(ROOT))
    os.environ["EXHAUSTIVE"] = "1"  # all cells, here and on the ranks
    from tests.helpers.cases import Launch
    from tests.helpers.launcher import SKIPPED
    from tests.helpers.launcher import run as run_ranks

    folder = CACHE / f"ranks-{name}-{version}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    launch = Launch(CASES[name], 2, "cpu")
    outcomes = run_ranks(launch, [*launch.cases()], folder, timeout=3600, **variables)
    outcomes = {case: problem for case, problem in outcomes.items() if not (problem or "").startswith(SKIPPED)}
    failed = {case: problem for case, problem in outcomes.items() if problem}
    (CACHE / f"{name}-{version}.log").write_text("\n\n".join(f"{case}\n{why}" for case, why in failed.items()))
    return len(outcomes) - len(failed), list(failed)


def run_files(name: str, version: str, variables: dict[str, str]) -> tuple[int, list[str]]:
    """Test files, by pytest: how many tests passed, and the names of those that failed."""
    report = CACHE / f"{name}-{version}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", f"--junit-xml={report}"]
    command += [f"tests/{test}" for test in TESTS[name]]
    with (CACHE / f"{name}-{version}.log").open("w") as log:
        streams: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT}
        subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, check=False, **streams)
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [str(c.get("name")) for c in cases if c.find("failure") is not None or c.find("error") is not None]
    return len(cases) - len(bad) - sum(c.find("skipped") is not None for c in cases), bad


def _installed(name: str) -> str:
    import importlib.metadata

    return importlib.metadata.version(name).partition("+")[0]


def results() -> dict[str, dict[str, Any]]:
    known: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return known


def table(known: dict[str, dict[str, Any]]) -> str:
    """The results as Markdown."""
    lines = ["| release | Python | torch | passed | failed | date |", "|---|---|---|---|---|---|"]
    for name, releases in RELEASES.items():
        for version in releases:
            found = known.get(f"{name}-{version}")
            if found is not None:
                numbers = [found["passed"], len(found["failed"])]
                cells = [f"{name} {version}", found["python"], found["torch"], *numbers, found["date"]]
                lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def write_table() -> None:
    """Replace the table in docs/versions.md."""
    begin, end = "<!-- matrix: begin -->", "<!-- matrix: end -->"
    before, _, rest = TABLE.read_text().partition(begin)
    _, _, after = rest.partition(end)
    TABLE.write_text(f"{before}{begin}\n{table(results())}\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("combinations", nargs="*", metavar="NAME-VERSION", help="like deepspeed-0.18.9")
    parser.add_argument("--table", action="store_true", help="write the table of the results that there are")
    parser.add_argument("--keep", action="store_true", help="keep the folders of torch, 3 GB each")
    options = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    if not options.table:
        known = results()
        every = {f"{name}-{version}": (name, version) for name, releases in RELEASES.items() for version in releases}
        unknown = [chosen for chosen in options.combinations if chosen not in every]
        if unknown:
            parser.error(f"{', '.join(unknown)}: not one of {', '.join(every)}")
        for chosen in options.combinations or [key for key in every if key not in known]:
            name, version = every[chosen]
            outcome = run(name, version)
            known = {**results(), chosen: outcome}  # read again: another run may have added to it
            RESULTS.write_text(json.dumps(known, indent=1))
            print(
                f"{chosen}: {outcome['passed']} passed, {len(outcome['failed'])} failed",
                *outcome["failed"][:5],
                flush=True,
            )
            if name == "torch" and not options.keep:
                shutil.rmtree(CACHE / chosen, ignore_errors=True)
    write_table()


if __name__ == "__main__":
    main()
