#!/usr/bin/env bash
# All checks: lint, format, types, who imports whom, tests. Arguments go to pytest: scripts/test.sh -k layout -m "not slow"
#
#   scripts/test.sh --device cuda      the tests over ranks on GPUs and NCCL instead, and a report to paste into an issue
#   scripts/test.sh --device pretend   the same on an accelerator that is not there (tests/helpers/pretend)
#
#   EXHAUSTIVE=1  also the variations that everyday runs leave out, such as every setting at four ranks
#   JOBS=3        test files that run at a time (one leaves a core idle now and then, so three keep two cores busy);
#                 0 runs them one after the other in this process
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
# Static checks run beside the tests. What they say is shown after the tests, if they fail.
static_checks() {
    "$PY" -m ruff check . && "$PY" -m ruff format --check --quiet . && "$PY" -m mypy || return
    # Who may import whom: the contracts in pyproject.toml. The tool needs Python 3.11.
    local linter
    linter=$(dirname "$PY")/lint-imports
    if [ -x "$linter" ]; then "$linter"; else echo "import contracts are not checked: $linter is missing"; fi
}
mkdir -p .cache
static_checks >.cache/static-checks 2>&1 &
checks=$!
# By file, and some by test function: a launch of ranks serves many tests. The longest first, as tests/conftest.py says.
status=0
"$PY" -m pytest -q -n "${JOBS:-3}" --dist loadfile --no-loadscope-reorder "$@" || status=$?
if ! wait "$checks"; then
    cat .cache/static-checks
    status=1
fi
grep "are not checked" .cache/static-checks || true
exit "$status"
