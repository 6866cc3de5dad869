#!/usr/bin/env bash
# Make .venv with the pinned versions of constraints.txt, and leave its python's path in $PY.
# Sourced by the README's commands. The second call finds it made and takes no time.
#
#   PYTHON=python3.11   interpreter to build .venv with
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PY=$ROOT/.venv/bin/python
PYTHON=${PYTHON:-$(command -v python3.11 || command -v python3)}

# Whatever decides what is installed is part of the stamp: change it, and .venv is brought up to date.
stamp=$({ cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" "$ROOT/scripts/setup.sh"; "$PYTHON" --version; } | cksum)
if [ "$(cat "$ROOT/.venv/.stamp" 2>/dev/null)" != "$stamp" ]; then
    echo "setting up .venv (once) ..." >&2
    "$PYTHON" -m venv "$ROOT/.venv"
    "$PY" -m pip install --quiet --disable-pip-version-check -c "$ROOT/constraints.txt" -e "${ROOT}[dev]"
    echo "$stamp" >"$ROOT/.venv/.stamp"
fi
