"""Run the fitting tests with other releases of torch, DeepSpeed and megatron-core, and write the table in
docs/versions.md.

    python scripts/matrix.py                        every combination that has no result yet
    python scripts/matrix.py deepspeed-0.18.9 ...   those, again
    python scripts/matrix.py --tree FOLDER          a tree of Megatron-LM, under the name of its folder

A release is installed beside the environment, not into it: ``pip install --target`` into .cache/matrix, first on the
Python path of the tests, unless it is the environment's own. Everything else is the environment's. Another Python needs
an environment of its own, made with ``PYTHON=python3.12 bash scripts/test.sh``; its rows stand beside the others. The
table itself keeps the results: each one is written as soon as it is there, and a run that is stopped goes on.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "matrix"
TABLE = ROOT / "docs" / "versions.md"
PYTHON = platform.python_version()

RELEASES = {
    "torch": ("2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"),
    "deepspeed": (
        *("0.16.9", "0.17.6"),
        *(f"0.18.{patch}" for patch in range(10)),
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
    "megatron-core": "release_megatron,megatron,megatron_precision,megatron_checkpoints,megatron_adoption,"
    "megatron_experts,megatron_fsdp,megatron_offload",
}
#: With all of their settings.
EXHAUSTIVE = ("deepspeed",)

#: Rows of what has no release.
TREE = "Megatron-LM"
CASES[TREE] = CASES["megatron-core"]


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


def run(name: str, version: str, tree: Path | None = None) -> dict[str, Any]:
    """How many tests of one combination pass, and which fail."""
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    torch = version if name == "torch" else _installed("torch")
    if tree is not None:
        variables.update(ALTO_MEGATRON_LM=str(tree), PYTHONPATH=os.pathsep.join([str(ROOT), str(tree)]))
    elif version != _installed(name):
        overlay = str(install(name, version))
        variables.update(ALTO_OVERLAY=overlay, PYTHONPATH=os.pathsep.join([overlay, str(ROOT)]))
    variables["ONEDNN_MAX_CPU_ISA"] = os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    if name == "torch":  # each has a Triton of its own
        path = [] if version == _installed(name) else [str(CACHE / f"{name}-{version}")]
        triton = _installed("triton", path) or "none"
        torch = f"{torch}, Triton {triton}"
    passed, failed = (run_cases if name in CASES else run_files)(name, version, variables)
    return {
        "passed": passed,
        "failed": failed,
        "python": PYTHON,
        "torch": torch,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def run_cases(name: str, version: str, variables: dict[str, str]) -> tuple[int, list[str]]:
    """The cases over two ranks: how many passed, and the names of the others."""
    sys.path.insert(0, str(ROOT))
    from tests.helpers import cases
    from tests.helpers.launcher import SKIPPED
    from tests.helpers.launcher import run as run_ranks

    cases.EXHAUSTIVE = name in EXHAUSTIVE  # here, and by the variable on the ranks
    variables = {**variables, "EXHAUSTIVE": "1" if cases.EXHAUSTIVE else ""}

    folder = CACHE / f"ranks-{name}-{version}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    launch = cases.Launch(CASES[name], 2, "cpu")
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


def _installed(name: str, path: Sequence[str] = ()) -> str:
    """The version of a distribution in a folder of ``path``, or else in the environment; "" if there is none."""
    import importlib.metadata

    found = importlib.metadata.distributions(name=name, path=[*path, *sys.path])
    return next((one.version.partition("+")[0] for one in found), "")


#: Around the table in docs/versions.md.
BEGIN, END = "<!-- matrix: begin -->\n", "<!-- matrix: end -->"
COLUMNS = ("release", "Python", "torch", "passed", "failed", "date")


def rows() -> dict[tuple[str, str], list[str]]:
    """The cells of the table, by release and Python's minor version."""
    _, _, rest = TABLE.read_text().partition(BEGIN)
    lines = rest.partition(END)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    return {(row[0], minor(row[1])): row for row in cells}


def minor(python: str) -> str:
    return ".".join(python.split(".")[:2])


def add_row(name: str, version: str, outcome: dict[str, Any]) -> None:
    """Put one result into the table, read again: another run may have added to it."""
    release = f"{name} {version}"
    counts = [outcome["passed"], len(outcome["failed"])]
    cells = [release, outcome["python"], outcome["torch"], *map(str, counts), outcome["date"]]
    known = {**rows(), (release, minor(PYTHON)): cells}
    order = {f"{name} {version}": place for place, (name, version) in enumerate(every().values())}

    def place(key: tuple[str, str]) -> tuple[int, int]:
        return order.get(key[0], len(order)), int(key[1].split(".")[1])

    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join(known[key])} |" for key in sorted(known, key=place)]
    before, _, rest = TABLE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    TABLE.write_text("".join([before, BEGIN, *(f"{line}\n" for line in lines), END, after]))


def every() -> dict[str, tuple[str, str]]:
    """All combinations, by the name that the command line has for them."""
    return {f"{name}-{version}": (name, version) for name, releases in RELEASES.items() for version in releases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("combinations", nargs="*", metavar="NAME-VERSION", help="like deepspeed-0.18.9")
    parser.add_argument("--tree", type=Path, metavar="FOLDER", help="a tree of Megatron-LM, such as Megatron-LM/main")
    parser.add_argument("--keep", action="store_true", help="keep the folders of torch, 3 GB each")
    options = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    unknown = [chosen for chosen in options.combinations if chosen not in every()]
    if unknown:
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(every())}")
    done = {release.replace(" ", "-") for release, python in rows() if python == minor(PYTHON)}
    chosen_or_missing = options.combinations or [key for key in every() if key not in done]
    trees = [options.tree.resolve()] if options.tree else []
    for chosen in [tree.name for tree in trees] or chosen_or_missing:
        name, version = (TREE, chosen) if trees else every()[chosen]
        outcome = run(name, version, *trees)
        add_row(name, version, outcome)
        failed = outcome["failed"]
        print(f"{chosen}: {outcome['passed']} passed, {len(failed)} failed", *failed[:5], flush=True)
        if name == "torch" and not options.keep:
            shutil.rmtree(CACHE / chosen, ignore_errors=True)


if __name__ == "__main__":
    main()
