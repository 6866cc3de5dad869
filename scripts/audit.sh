#!/usr/bin/env bash
# Known vulnerabilities of the pinned versions (constraints.txt), by pip-audit. A version that nobody could be asked
# about is an error (--strict), not a pass. Arguments go to pip-audit: scripts/audit.sh --vulnerability-service osv
#
#   ADVISORIES=DIR  ask a checkout of PyPA's advisory database instead of PyPI, where there is no network
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$(command -v python3.11 || command -v python3)}
# In an environment of its own: what it needs is no part of the pinned set.
bin=$ROOT/.cache/audit/bin
"$bin/python" -c "import pip_audit, yaml" 2>/dev/null || {
    "$PYTHON" -m venv "$ROOT/.cache/audit"
    "$bin/python" -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1 pyyaml==6.0.3
}
audit=("$bin/pip-audit" --strict --no-deps --disable-pip --requirement "$ROOT/constraints.txt" "$@")
[ -z "${ADVISORIES:-}" ] || exec "$bin/python" "$ROOT/scripts/advisories.py" "$ADVISORIES" "${audit[@]}"
exec "${audit[@]}"
