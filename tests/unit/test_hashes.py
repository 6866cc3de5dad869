"""constraints-hashes.txt has the versions of constraints.txt; the script that writes it reads both kinds of index."""

import http.server
import json
import re
import threading

import pytest

from scripts import hashes

ONE, TWO = "1" * 64, "2" * 64
FILES = {"a_b-1.0-py3-none-any.whl": ONE, "a_b-1.0.tar.gz": TWO, "a_b-1.1.tar.gz": "3" * 64, "a_b-1.0.egg": "4" * 64}


def test_the_file_has_every_version_and_a_hash_of_each():
    text = hashes.TARGET.read_text()
    blocks = re.split(r"(?<!\\)\n", text.strip())[1:]
    found = {}
    for block in blocks:
        pin, *digests = block.replace("\\\n", "").split()
        assert digests, pin
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", digest) for digest in digests), pin
        found.update([pin.split("==")])
    assert found == hashes.pins(), "run python scripts/hashes.py"
    assert "://" not in text  # no registry


class Index(http.server.BaseHTTPRequestHandler):
    kind = "application/vnd.pypi.simple.v1+json"

    def do_GET(self):
        entries = {name: digest for name, digest in FILES.items() if self.path == "/simple/a-b/"}
        body = json.dumps({"files": [{"filename": n, "hashes": {"sha256": d}} for n, d in entries.items()]})
        if self.kind == "text/html":
            body = "".join(f'<a href="../x/{name}#sha256={digest}">{name}</a>\n' for name, digest in entries.items())
        if self.path == "/simple/bare/":
            body = '<a href="../x/bare-1.0.tar.gz">bare</a>'
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if self.path == "/simple/bare/" else self.kind)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("kind", [Index.kind, "text/html"])
def test_an_index_is_read_in_both_forms(kind, monkeypatch):
    monkeypatch.setattr(Index, "kind", kind)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        index = f"http://127.0.0.1:{server.server_port}/simple/"
        assert hashes.hashes_of("A_b", "1.0", index) == [ONE, TWO]
        with pytest.raises(ValueError, match="a_b==2.0: the index has 0 files"):
            hashes.hashes_of("a_b", "2.0", index)
        with pytest.raises(ValueError, match="not a hash of each"):
            hashes.hashes_of("bare", "1.0", index)
        server.shutdown()
    assert hashes.text({"a==1": [ONE, TWO]}).splitlines()[1:] == [
        "a==1 \\",
        f"    --hash=sha256:{ONE} \\",
        f"    --hash=sha256:{TWO}",
    ]
