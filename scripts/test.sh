#!/usr/bin/env bash
# All checks: lint, format, types, tests. Arguments go to pytest: scripts/test.sh -k layout -m "not slow"
#
#   scripts/test.sh --device cuda      the tests over ranks on GPUs and NCCL instead, and a report to paste into an issue
#   scripts/test.sh --device pretend   the same on an accelerator that is not there (tests/helpers/pretend)
#
#   EXHAUSTIVE=1  also the variations that everyday runs leave out, such as every setting at four ranks
#   JOBS=2        test files that run at a time; 0 runs them one after the other in this process
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=setup.sh
source "$(dirname "$0")/setup.sh" dev
cd "$ROOT"
if [ "${1:-}" = --device ]; then
    export DEVICE=${2:?cpu, pretend or cuda}
    shift 2
    files=(tests/distributed/test_sharded.py tests/distributed/test_deepspeed_zero.py tests/distributed/test_deepspeed_checkpoints.py
        tests/distributed/test_pretrain_deepspeed.py tests/unit/test_triton.py)
    status=0
    mkdir -p .cache
    "$PY" -m pytest -q -n 0 "${files[@]}" "$@" | tee .cache/device-report || status=$?
    printf '\n%s\n' "-- report on $DEVICE; paste it into an issue --"
    "$PY" -m tests.helpers.devices
    sed -n '/short test summary info/,$p' .cache/device-report
    tail -n 1 .cache/device-report
    exit "$status"
fi
"$PY" -m ruff check .
"$PY" -m ruff format --check --quiet .
"$PY" -m mypy
# Who may import whom: the contracts in pyproject.toml. The tool needs Python 3.11.
linter=$(dirname "$PY")/lint-imports
if [ -x "$linter" ]; then
    contracts=$("$linter" 2>&1) || { printf '%s\n' "$contracts" && exit 1; }
fi
# By file, and some by test function: a launch of ranks serves many tests. The longest first, as tests/conftest.py says.
"$PY" -m pytest -q -n "${JOBS:-2}" --dist loadfile --no-loadscope-reorder "$@"
