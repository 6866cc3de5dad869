#!/usr/bin/env bash
# All checks: lint, format, types, tests. Arguments go to pytest: scripts/test.sh -k layout -m "not slow"
#
#   EXHAUSTIVE=1  also the variations that everyday runs leave out, such as every setting at four ranks
#   JOBS=2        test files that run at a time; 0 runs them one after the other in this process
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=setup.sh
source "$(dirname "$0")/setup.sh"
cd "$ROOT"
"$PY" -m ruff check .
"$PY" -m ruff format --check --quiet .
"$PY" -m mypy
# By file: the ranks that a file starts serve all of its tests. In the order of tests/conftest.py, the longest first.
"$PY" -m pytest -q -n "${JOBS:-2}" --dist loadfile --no-loadscope-reorder "$@"
