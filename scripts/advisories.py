"""Answer pip-audit from a copy of PyPA's advisories, where no vulnerability service can be reached.

    python scripts/advisories.py DIRECTORY COMMAND...

DIRECTORY is a checkout of the advisory database (``vulns/PACKAGE/*.yaml``, OSV format) or of a fork of it. COMMAND is
run with ``--vulnerability-service osv --osv-url`` and the address of a server on this machine's loopback, which answers
queries as OSV does. Ends as COMMAND does. The one that calls it is scripts/audit.sh.
"""

import argparse
import http.server
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import yaml
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version


def as_version(text):
    """A version, also where an advisory has one that Python does not know: "2.6.0-cu124" is 2.6.0."""
    try:
        return Version(text)
    except InvalidVersion:
        release = re.match(r"\d+(\.\d+)*", text)
        return Version(release[0]) if release else None


def is_in(version, events):
    """Whether a version lies in an OSV range: events that switch "affected" on and off, in the order of versions."""
    changes = [(as_version(at), kind) for event in events for kind, at in event.items()]
    if any(at is None for at, _ in changes):
        return True  # nobody can tell, so somebody must look
    affected = False
    for at, kind in sorted(changes, key=lambda change: change[0]):
        if kind == "introduced" and version >= at:
            affected = True
        elif (kind == "fixed" and version >= at) or (kind == "last_affected" and version > at):
            affected = False
    return affected


def concerns(advisory, package, version):
    """Whether an advisory is about a version of a package: it is listed, or in a range."""
    for affected in advisory.get("affected") or ():
        if canonicalize_name(affected["package"]["name"]) != package or affected["package"]["ecosystem"] != "PyPI":
            continue
        if version in (affected.get("versions") or ()):
            return True
        ranges = [r["events"] for r in affected.get("ranges") or () if r["type"] == "ECOSYSTEM"]
        if any(is_in(Version(version), events) for events in ranges):
            return True
    return False


class Advisories:
    """Those of a checkout, read package by package as they are asked for."""

    def __init__(self, directory):
        self.folders = {canonicalize_name(folder.name): folder for folder in Path(directory).glob("vulns/*")}
        if not self.folders:
            raise SystemExit(f"{directory} has no vulns/*: it should be a checkout of PyPA's advisory database")
        self.asked, self.read, self.newest = 0, 0, ""

    def about(self, package, version):
        folder = self.folders.get(canonicalize_name(package))
        files = sorted(folder.glob("*.y*ml")) if folder else []
        # BaseLoader leaves every scalar a string: version 1.10 is not the number 1.1.
        known = [yaml.load(path.read_text(), Loader=yaml.BaseLoader) for path in files]
        self.asked, self.read = self.asked + 1, self.read + len(known)
        self.newest = max([self.newest, *(advisory["modified"] for advisory in known)])
        return [advisory for advisory in known if concerns(advisory, canonicalize_name(package), version)]


def server(advisories):
    """An HTTP server on a free port of the loopback that answers OSV's queries."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found = advisories.about(query["package"]["name"], query["version"])
            body = json.dumps({"vulns": found} if found else {}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    return http.server.HTTPServer(("127.0.0.1", 0), Answer)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    advisories = Advisories(args.directory)
    with server(advisories) as service:
        threading.Thread(target=service.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{service.server_port}/v1/query"
        done = subprocess.run([*args.command, "--vulnerability-service", "osv", "--osv-url", url], check=False)
        service.shutdown()
    print(
        f"{advisories.asked} packages were asked about, of which {args.directory} has {advisories.read} advisories, "
        f"the newest of {advisories.newest or 'never'}",
        file=sys.stderr,
    )
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
