#!/usr/bin/env bash
# Build the pages in docs/ into .cache/site, with warnings as errors: a dead link or anchor fails. Arguments go to mkdocs.
# It makes an environment of its own in .cache/docs: what it needs is no part of the pinned set, and torch is not needed.
#
#   scripts/docs.sh               build; search needs a server: python3 -m http.server -d .cache/site
#   PYTHON=python3.12             interpreter to build the environment with
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$(command -v python3.11 || command -v python3)}
bin=$ROOT/.cache/docs/bin
cd "$ROOT"
"$bin/python" -c "import material, mkdocstrings_handlers.python, ruff" 2>/dev/null || {
    "$PYTHON" -m venv "$ROOT/.cache/docs"
    # The extra's own list, so that it is written once.
    "$bin/python" - pyproject.toml <<'PYTHON' >"$ROOT/.cache/docs/requirements.txt"
import re, sys
text = open(sys.argv[1]).read()
print("\n".join(re.findall(r'"([^"]+)"', re.search(r"^docs = \[(.*?)\]$", text, re.M | re.S)[1])))
PYTHON
    "$bin/python" -m pip install -qq --disable-pip-version-check -r "$ROOT/.cache/docs/requirements.txt"
}
export NO_MKDOCS_2_WARNING=1 # about the next major version of mkdocs, which is not used
exec "$bin/python" -m mkdocs build --strict --clean "$@"
