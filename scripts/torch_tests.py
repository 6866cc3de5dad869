"""Run PyTorch's own tests of optimizers and schedulers with ours, and compare with the list of what cannot pass.

    python scripts/torch_tests.py CHECKOUT            a checkout of PyTorch, near the installed release
    python scripts/torch_tests.py CHECKOUT --write    keep what fails now, for new reasons to be filled in

It runs TestOptimRenewed of test/test_optim.py and TestLRScheduler of test/optim/test_lrscheduler.py, neither of which
is in torch's wheel, nor here. The former are driven through tests/helpers/optimizer_infos.py. The latter make SGDs and
Adams by name: each of our optimizers stands for both, and what fails with the base of E as well is not E's.

scripts/torch_tests.csv has the tests that fail, each with its reason. The exit code is 1 if another one fails, or if
one of them passes.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import io
import re
import sys
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "scripts" / "torch_tests.csv"
COLUMNS = ["suite", "optimizer", "test", "reason"]
TO_DO = "TO BE FILLED IN"

Failures = dict[tuple[str, str, str], str]


def main() -> None:
    parser = argparse.ArgumentParser(description="PyTorch's tests of optimizers and schedulers with ours")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    folder = arguments.checkout / "test"
    for file in ("test_optim.py", "optim/test_lrscheduler.py"):
        if not (folder / file).is_file():
            parser.error(f"{folder / file} does not exist: give a checkout of github.com/pytorch/pytorch")
    sys.path[:0] = [str(ROOT), str(folder)]

    failures = {**optimizers(), **schedulers()}
    known = read() if TABLE.exists() else {}
    if arguments.write:
        write({test: known.get(test, TO_DO) for test in failures})
    for test in sorted(failures.keys() - known.keys()):
        print(f"fails: {' '.join(test)}: {failures[test]}")
    for test in sorted(known.keys() - failures.keys()):
        print(f"passes, but is listed: {' '.join(test)}")
    sys.exit(failures.keys() != known.keys())


def optimizers() -> Failures:
    """What fails of TestOptimRenewed."""
    from torch.testing._internal.common_optimizers import optim_db

    from alto_distributed import E
    from tests.helpers.optimizer_infos import INFOS

    names = {}
    for info in INFOS:
        name = info.optim_cls.__name__
        if issubclass(info.optim_cls, E):  # PyTorch's tests know by the name what an optimizer takes
            info.optim_cls.__name__ = info.optim_cls.base_class.__name__
        names[info.optim_cls.__name__] = name
        info.optim_inputs_func = functools.partial(inputs_for_any_group, info.optim_inputs_func)
    optim_db[:] = INFOS  # read where the tests are defined
    import test_optim  # type: ignore[import-not-found]

    failures = {}
    for test, message in run("TestOptimRenewed", [test_optim.TestOptimRenewedCPU]).items():
        match = re.search(rf"_({'|'.join(names)})_cpu", test)
        optimizer, name = (names[match[1]], test.replace(match[0], "")) if match else ("", test)
        failures["TestOptimRenewed", optimizer, name] = message
    return failures


def inputs_for_any_group(inputs: Callable[..., list[Any]], *args: Any, **options: Any) -> list[Any]:
    """Without options that all groups must share: PyTorch's tests write an input's into one of two groups.

    Nor foreach and fused, which these tests add themselves.
    """
    from alto_distributed.options import OPTIONS, WITHOUT_MEANING

    return [given for given in inputs(*args, **options) if not given.kwargs.keys() & {*OPTIONS, *WITHOUT_MEANING}]


def schedulers() -> Failures:
    """What fails of TestLRScheduler, but for E what fails with its base as well."""
    import torch
    from optim import test_lrscheduler  # type: ignore[import-not-found]

    from alto_distributed import ALTO, LAMB, E

    failures: Failures = {}

    def run_with(cls: Any, name: str) -> dict[str, str]:
        test_lrscheduler.SGD = test_lrscheduler.Adam = cls
        return run(f"TestLRScheduler with {name}", [test_lrscheduler.TestLRScheduler])

    for cls, base in (
        (ALTO, None),
        (LAMB, None),
        *((E.of(base), base) for base in (torch.optim.SGD, torch.optim.AdamW)),
    ):
        name = cls.__name__ if base is None else f"E{base.__name__}"
        found = run_with(cls, name)
        bases = {} if base is None else run_with(base, base.__name__)
        failures.update({("TestLRScheduler", name, test): text for test, text in found.items() if test not in bases})
    return failures


def run(what: str, cases: list[type[unittest.TestCase]]) -> dict[str, str]:
    """The last lines of what failed, by the tests' names."""
    loader = unittest.defaultTestLoader
    result = unittest.TestResult()
    with contextlib.redirect_stderr(io.StringIO()):  # tests count warnings, so that none can be turned off
        unittest.TestSuite(loader.loadTestsFromTestCase(case) for case in cases).run(result)
    wrong = [*result.failures, *result.errors]
    skipped = len(result.skipped)
    print(f"{what}: {result.testsRun - len(wrong) - skipped} passed, {skipped} skipped, {len(wrong)} failed")
    for test in result.unexpectedSuccesses:
        wrong.append((test, "it was expected to fail"))
    return {test.id().rpartition(".")[2]: last_line(text) for test, text in wrong}


def last_line(text: str) -> str:
    """What an exception said. PyTorch's tests add how to run them."""
    lines = [line for line in text.splitlines() if re.match(r"[\w.]*(Error|Exception|Warning)\b", line)]
    return lines[-1][:300] if lines else text.strip().splitlines()[-1]


def read() -> Failures:
    with TABLE.open(newline="") as file:
        return {(row["suite"], row["optimizer"], row["test"]): row["reason"] for row in csv.DictReader(file)}


def write(failures: Failures) -> None:
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([*test, reason] for test, reason in sorted(failures.items()))


if __name__ == "__main__":
    main()
