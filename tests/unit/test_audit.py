"""scripts/advisories.py: which advisories are about a version, and what pip-audit would be told of it."""

import json
import threading
import urllib.request

import pytest

pytest.importorskip("yaml")

from packaging.version import Version

from scripts.advisories import Advisories, concerns, is_in, server

EVENTS = [{"introduced": "1.2"}, {"fixed": "1.4"}, {"introduced": "2.0"}, {"last_affected": "2.1"}]


@pytest.mark.parametrize("version", ["1.2", "1.3.9", "1.4rc1", "2.0", "2.0.5", "2.1"])
def test_a_version_in_a_range(version):
    assert is_in(Version(version), EVENTS)
    assert is_in(Version(version), EVENTS[::-1])  # they come in any order


@pytest.mark.parametrize("version", ["1.1.9", "1.4", "1.9", "1.10", "2.1.1", "3"])
def test_a_version_outside(version):
    assert not is_in(Version(version), EVENTS)


def test_odd_versions_of_advisories():
    events = [{"introduced": "0"}, {"last_affected": "2.6.0-cu124"}]
    assert is_in(Version("2.6.0"), events)
    assert not is_in(Version("2.6.1"), events)
    assert is_in(Version("9"), [{"introduced": "0"}, {"fixed": "unknown"}])  # nobody can tell: somebody must look


def advisory(identity, name="Some_Package", **affected):
    about = {"package": {"name": name, "ecosystem": "PyPI"}, **affected}
    return {"id": identity, "modified": "2026-07-01T00:00:00Z", "details": "a hole", "affected": [about]}


def test_an_advisory_names_versions_or_a_range_of_the_package():
    assert concerns(advisory("A", versions=["1.10"]), "some-package", "1.10")
    assert not concerns(advisory("A", versions=["1.10"]), "some-package", "1.1")
    assert not concerns(advisory("A", versions=["1.10"]), "another", "1.10")
    ranges = [{"type": "GIT", "events": [{"introduced": "0"}]}, {"type": "ECOSYSTEM", "events": EVENTS}]
    assert concerns(advisory("A", ranges=ranges), "some-package", "1.3")
    assert not concerns(advisory("A", ranges=ranges), "some-package", "1.5")


def test_pip_audits_questions_are_answered(tmp_path):
    folder = tmp_path / "vulns" / "some-package"
    folder.mkdir(parents=True)
    # JSON is YAML. Unquoted, 1.10 is a number to most readers of YAML, and the version 1.1.
    (folder / "A.yaml").write_text(json.dumps(advisory("A", versions=["1.10"])).replace('"1.10"', "1.10"))
    (folder / "B.yaml").write_text(json.dumps(advisory("B", ranges=[{"type": "ECOSYSTEM", "events": EVENTS}])))
    advisories = Advisories(tmp_path)

    def ask(name, version):
        query = {"package": {"name": name, "ecosystem": "PyPI"}, "version": version}
        with urllib.request.urlopen(url, json.dumps(query).encode(), timeout=10) as answer:
            return [found["id"] for found in json.load(answer).get("vulns", [])]

    with server(advisories) as service:
        url = f"http://127.0.0.1:{service.server_port}/v1/query"
        threading.Thread(target=service.serve_forever, daemon=True).start()
        assert ask("some-package", "1.10") == ["A"]
        assert ask("some-package", "1.1") == []
        assert ask("some.package", "1.3") == ["B"]
        assert ask("another", "1.3") == []
        service.shutdown()
    assert (advisories.asked, advisories.read, advisories.newest) == (4, 6, "2026-07-01T00:00:00Z")


def test_a_directory_without_advisories_is_no_clean_bill(tmp_path):
    (tmp_path / "vulns").mkdir()
    with pytest.raises(SystemExit, match="should be a checkout of PyPA's advisory database"):
        Advisories(tmp_path)
    with pytest.raises(SystemExit, match="should be a checkout of PyPA's advisory database"):
        Advisories(tmp_path / "nowhere")
