#!/usr/bin/env bash
# All checks: lint, format, types, tests. Arguments go to pytest: scripts/test.sh -k layout -m "not slow"
set -euo pipefail
source "$(dirname "$0")/setup.sh"
cd "$ROOT"
"$PY" -m ruff check .
"$PY" -m ruff format --check --quiet .
"$PY" -m mypy
"$PY" -m pytest -q "$@"
