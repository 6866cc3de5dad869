#!/usr/bin/env bash
# Make .venv with the pinned versions of constraints.txt, and leave its python's path in $PY. To be sourced with the
# extras of pyproject.toml that a command needs; "dev" has all of them. If they are installed, it takes no time.
#
#   source scripts/setup.sh deepspeed,pretrain
#
#   PYTHON=python3.11   interpreter to build .venv with
#
# uv installs if it is there, pip otherwise. What they say is in .venv/setup.log, and on the screen if they fail.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PY=$ROOT/.venv/bin/python
PYTHON=${PYTHON:-$(command -v python3.11 || command -v python3)}

# Whatever decides what is installed is part of the stamp: change it, and .venv is brought up to date.
stamp=$({ cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" "$ROOT/scripts/setup.sh"; "$PYTHON" --version; } | cksum)

is_installed() {
    [ "$(cat "$ROOT/.venv/.installed-$1" 2>/dev/null)" = "$stamp" ]
}

install_extras() {
    "$PYTHON" -m venv "$ROOT/.venv" || return
    local with=("$PY" -m pip install --disable-pip-version-check)
    # The certificates of the system, as pip has it: a proxy may have its own. Older versions of uv know the second name.
    if command -v uv; then
        with=(env UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-true}" UV_NATIVE_TLS="${UV_NATIVE_TLS:-true}" uv pip install --python "$PY")
    fi
    "${with[@]}" -c "$ROOT/constraints.txt" -e "${ROOT}[$1]"
}

if ! is_installed dev && ! is_installed "${1:?extras to install}"; then
    echo "setting up .venv with $1 (once; progress is in .venv/setup.log) ..." >&2
    mkdir -p "$ROOT/.venv"
    if ! install_extras "$1" >"$ROOT/.venv/setup.log" 2>&1; then
        cat "$ROOT/.venv/setup.log" >&2
        echo "set-up failed; the lines above say why, and are in .venv/setup.log" >&2
        exit 1
    fi
    echo "$stamp" >"$ROOT/.venv/.installed-$1"
fi
