"""The versions that are supported: pyproject.toml, README.md, docs/versions.md and the code say the same."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from alto_distributed.errors import UnsupportedVersion
from alto_distributed.torch_version import OLDEST, OLDEST_THAT_LOADS_SAFELY, check_torch
from tests.helpers.launcher import REPO, environment
from tests.helpers.private_names import names_in_table, names_touched
from tests.helpers.releases import supported

README = " ".join((REPO / "README.md").read_text().split())


def test_code_packaging_and_readme_name_the_same_versions():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    extras, pins = project["optional-dependencies"], (REPO / "constraints.txt").read_text().splitlines()
    oldest = ".".join(map(str, OLDEST))
    assert project["dependencies"] == [f"torch>={oldest}"]
    assert f"torch {oldest} or newer" in README
    (tested,) = [pin.partition("==")[2] for pin in pins if pin.startswith("torch==")]
    assert f"with torch {tested}" in README

    safe = ".".join(map(str, OLDEST_THAT_LOADS_SAFELY))
    assert f"torch>={safe}" in extras["pretrain"]
    assert f"pretraining program needs torch {safe}" in README

    deepspeed = supported("deepspeed")
    assert f"Supported is DeepSpeed {deepspeed[0]} to {deepspeed[-1]}" in README
    *core, main = supported("megatron")
    assert f"Supported is megatron-core {core[0]} to {core[-1]}" in README
    assert f"Megatron-LM's main of August 2026 ({main})" in README
    for extra, name, versions in (("deepspeed", "deepspeed", deepspeed), ("megatron", "megatron-core", core)):
        (wanted,) = map(Requirement, extras[extra])
        assert wanted.name == name
        assert str(wanted.specifier) == f">={versions[0]}"
        assert name in extras["dev"]
        assert any(f"{name}=={version}" in pins for version in versions)


def test_the_table_of_releases_has_those_that_are_supported():
    """A release is called supported only when its tests have run without a failure."""
    table = (REPO / "docs" / "versions.md").read_text()
    for name, folder in (("deepspeed", "deepspeed"), ("megatron-core", "megatron")):
        for version in supported(folder):
            found = re.search(rf"^\| {name} {re.escape(version)} \|.*\| (\d+) \| (\d+) \| [\d-]+ \|$", table, re.M)
            assert version == "0.20.0" or found, f"{name} {version} is not in the table"
            assert version == "0.20.0" or (int(found[1]) > 0 and int(found[2]) == 0), found[0]


def test_the_pins_fit_the_torch_that_a_plain_machine_gets(tmp_path):
    """PyPI's torch for Linux, with CUDA, requires one version of triton, and ours was another: pip gave up.

    pip asks the index for the requirements of that build, a few KB, as it does without any settings of its own.
    """
    pins = {pin.name: pin for pin in map(Requirement, constraints())}
    command = [sys.executable, "-m", "pip", "install", "--isolated", "--dry-run", "--ignore-installed", "--no-deps"]
    command += ["--quiet", "--disable-pip-version-check", "--report", str(tmp_path / "report.json"), str(pins["torch"])]
    bare = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
    done = subprocess.run(command, env=bare, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot ask an index here: {done.stderr.strip()[-300:]}")
    (found,) = json.loads((tmp_path / "report.json").read_text())["install"]
    required = [Requirement(line) for line in found["metadata"]["requires_dist"]]
    required = [r for r in required if r.marker is None or r.marker.evaluate({"extra": ""})]
    if sys.platform == "linux":
        assert "triton" in {r.name for r in required}, "this is not the build that users get"
    for requirement in required:
        for pin in (
            pin for name, pin in pins.items() if canonicalize_name(name) == canonicalize_name(requirement.name)
        ):
            (version,) = (exact.version for exact in pin.specifier)
            assert requirement.specifier.contains(version, prereleases=True), f"torch requires {requirement}"


def constraints():
    """The lines of constraints.txt that pin something."""
    lines = (REPO / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("version", ["2.5.1", "2.0.0+cu118", "1.13.1", "0.4", "unknown"])
def test_an_older_torch_is_refused(version):
    with pytest.raises(UnsupportedVersion, match=rf"needs torch 2\.6 or newer, and {re.escape(version)} is installed"):
        check_torch(version)


@pytest.mark.parametrize(
    "version",
    [
        *("2.6.0", "2.6.0+cpu", "2.10.1", "2.13.0a0+gitabcdef", "3.0.0"),
        *("2.9.0a0+50eac811a6.nv25.09", "2.9.0a0+145a3a7bda.nv25.10", "2.8.0+rocm6.4", "2.10.0+cu130", "2.7.0+xpu"),
        *("2.6.0a0+ecf3bae40a.nv25.01", "2.11.0.dev20260101+cu130", "2.12.0rc1"),
    ],
)
def test_a_newer_torch_is_not(version):
    check_torch(version)


@pytest.mark.parametrize(
    ("version", "module", "said"),
    [
        ("2.5.1", "alto_distributed", "alto_distributed needs torch 2.6 or newer, and 2.5.1 is installed"),
        # Where a crafted checkpoint could still corrupt memory, there is no promise about checkpoints to be made.
        (
            "2.9.1",
            "alto_distributed.pretrain.checkpoint.safe_load",
            "the pretraining program needs torch 2.10 or newer, and 2.9.1 is",
        ),
    ],
)
def test_an_older_torch_is_refused_at_import_before_anything_else(version, module, said):
    program = f"import torch; torch.__version__ = {version!r}; import {module}"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPO, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"UnsupportedVersion: {said}" in done.stderr
    assert issubclass(UnsupportedVersion, ImportError)
    assert issubclass(UnsupportedVersion, ValueError)


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("0.19.8", True),
        ("0.19.8+local", True),
        ("0.19.80", False),
        ("0.20.0", False),
        ("0.15.4", False),
        ("dev", False),
    ],
)
def test_another_deepspeed_warns(version, tested, monkeypatch, recwarn):
    pytest.importorskip("deepspeed")
    from alto_distributed.deepspeed import versions

    monkeypatch.setattr("deepspeed.__version__", version)
    versions.check_version()
    assert versions.is_tested() == tested
    versions.warn_if_untested()
    said = [str(w.message) for w in recwarn if "DeepSpeed" in str(w.message)]
    assert len(said) == (0 if tested else 1)
    assert all(f"and {version} is installed" in line for line in said)


def test_a_deepspeed_that_lacks_a_method_is_refused(monkeypatch):
    pytest.importorskip("deepspeed")
    from alto_distributed.deepspeed import versions

    for owner, names in versions._METHODS.items():
        for name in names:
            with monkeypatch.context() as patch:
                for base in owner.__mro__[:-1]:
                    if name in vars(base):
                        patch.delattr(base, name)
                with pytest.raises(UnsupportedVersion, match=f"{owner.__name__} has no method {name}"):
                    versions.check_version()
    versions.check_version()


#: Variables of the DeepSpeed plugin that hold DeepSpeed's objects, and what is torch's or our own on them.
DEEPSPEEDS = {"engine", "wrapper", "w", "config", "p", "param", "params", "mapping", "scheduler", "self.wrapper"}
#: The same of the training program's engine, where a config is a dict.
DEEPSPEEDS_OF_RUNS = {"engine", "self._engine", "wrapper"}
NOT_DEEPSPEEDS = {
    *("numel", "shape", "requires_grad", "element_size", "device", "parameters", "param_groups", "state"),
    *("values", "items", "get", "knows_alto", "_rounds", "logits"),
}


def test_every_name_of_deepspeed_that_we_touch_is_in_the_table_and_in_deepspeed():
    plugin, engine = REPO / "alto_distributed" / "deepspeed", REPO / "alto_distributed/pretrain/engines/deepspeed"
    touched = names_touched(plugin, "deepspeed", DEEPSPEEDS, NOT_DEEPSPEEDS)
    touched |= names_touched(engine, "deepspeed", DEEPSPEEDS_OF_RUNS, NOT_DEEPSPEEDS)
    listed = names_in_table(REPO / "docs" / "versions.md", "Private names of DeepSpeed")
    assert {"_configure_optimizer", "DEEPSPEED_OPTIMIZERS", "ds_tensor", "zenflow", "write_events"} <= touched
    assert touched - listed.keys() == set()
    assert listed.keys() - touched == set()  # what is no longer touched
    package = Path(importlib.util.find_spec("deepspeed").submodule_search_locations[0])
    sources = " ".join(
        [*(path.read_text() for path in package.rglob("*.py")), *(p.stem for p in package.rglob("*.py"))]
    )
    assert touched - set(re.findall(r"\w+", sources)) - {"comm"} == set()
