#!/usr/bin/env bash
# Known vulnerabilities of the pinned versions (constraints.txt), by pip-audit. Needs the network: it asks PyPI about
# each of them. A version that nobody could be asked about is an error (--strict), not a pass. Arguments go to pip-audit:
# scripts/audit.sh --vulnerability-service osv
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$(command -v python3.11 || command -v python3)}
# In an environment of its own: what it needs is no part of the pinned set.
[ -x "$ROOT/.cache/audit/bin/pip-audit" ] || {
    "$PYTHON" -m venv "$ROOT/.cache/audit"
    "$ROOT/.cache/audit/bin/python" -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1
}
exec "$ROOT/.cache/audit/bin/pip-audit" --strict --no-deps --disable-pip --requirement "$ROOT/constraints.txt" "$@"
