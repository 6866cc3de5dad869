"""Write constraints-hashes.txt: the versions of constraints.txt with the SHA-256 of every file that the index has.

    python scripts/hashes.py            # from pip's default index; PIP_INDEX_URL or --index-url names another
    python -m pip install --require-hashes --no-deps -r constraints-hashes.txt

pip then refuses a file that is not one of these, also from a mirror. A version whose files are gone or have no hashes
is an error. The name of the index is not written down.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import ssl
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "constraints-hashes.txt"
_JSON = "application/vnd.pypi.simple.v1+json"


def pins() -> dict[str, str]:
    """Name -> version, as constraints.txt has them."""
    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return dict(line.split("==", 1) for line in lines if line)


def default_index() -> str:
    if os.environ.get("PIP_INDEX_URL"):
        return os.environ["PIP_INDEX_URL"]
    from pip._internal.models.index import PyPI  # what pip asks without a setting

    return str(PyPI.simple_url)


def hashes_of(name: str, version: str, index: str) -> list[str]:
    """The SHA-256 of each file of a release.

    Raises:
        ValueError: there is none, or a file has no hash.
    """
    request = urllib.request.Request(f"{index.rstrip('/')}/{canonicalize_name(name)}/", headers={"Accept": _JSON})
    with urllib.request.urlopen(request, timeout=120, context=_certificates()) as answer:
        content, kind = answer.read().decode(), answer.headers.get_content_type()
    if kind == _JSON:
        files = {file["filename"]: file["hashes"].get("sha256") for file in json.loads(content)["files"]}
    else:
        links = re.findall(r'href="[^"]*/([^"/#]+)(?:#sha256=([0-9a-f]{64}))?[^"]*"', content)
        files = {file: found or None for file, found in links}
    wanted = {file: found for file, found in files.items() if _version_of(file) == version}
    if not wanted or None in wanted.values():
        raise ValueError(f"{name}=={version}: the index has {len(wanted)} files of it, and not a hash of each")
    return sorted(set(map(str, wanted.values())))


def _version_of(file: str) -> str | None:
    try:
        parsed = parse_wheel_filename(file) if file.endswith(".whl") else parse_sdist_filename(file)
    except ValueError:  # an egg or an installer
        return None
    return str(parsed[1])


def _certificates() -> ssl.SSLContext:
    """Those of the system, or what pip is told to use."""
    return ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))


def text(found: dict[str, list[str]]) -> str:
    """What the file holds."""
    lines = ["# Made by scripts/hashes.py from constraints.txt. For pip install --require-hashes --no-deps -r."]
    for pin, digests in found.items():
        lines += [f"{pin} \\", *(f"    --hash=sha256:{digest} \\" for digest in digests[:-1])]
        lines.append(f"    --hash=sha256:{digests[-1]}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index-url", default=default_index(), help="of the index to ask")
    options = parser.parse_args()
    known = pins()
    with ThreadPoolExecutor(8) as pool:
        try:
            every = list(pool.map(lambda pin: hashes_of(*pin, options.index_url), known.items()))
        except (ValueError, OSError) as error:
            sys.exit(f"hashes: {error}")
    TARGET.write_text(
        text({f"{name}=={version}": one for (name, version), one in zip(known.items(), every, strict=True)})
    )
    print(f"{TARGET.name}: {len(known)} versions, {sum(map(len, every))} files")


if __name__ == "__main__":
    main()
