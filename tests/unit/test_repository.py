"""Promises about the repository itself: the README's commands, what importing needs, what tests import of tests."""

import ast
import os
import re
import subprocess
import sys

import pytest
import tomllib
from packaging.utils import canonicalize_name

from tests.helpers.launcher import REPO
from tests.helpers.requirements import required

PACKAGE = REPO / "alto_distributed"
MODULES = sorted(PACKAGE.glob("**/*.py"))


def command(mark):
    """The one line of the README's shell blocks that ends in ``# mark``."""
    blocks = re.findall(r"```sh\n(.*?)```", (REPO / "README.md").read_text(), re.S)
    (line,) = [line for block in blocks for line in block.splitlines() if line.rstrip().endswith(f"# {mark}")]
    return line.split("#")[0].split()


def test_the_readme_has_its_two_commands_and_ci_runs_the_second():
    for mark in ("run", "test"):
        shell, script = command(mark)
        assert shell == "bash"
        assert (REPO / script).exists()
    assert " ".join(command("test")) in (REPO / ".ci/run").read_text()


def test_the_run_command_has_a_dry_run():
    environment = {**os.environ, "DRY_RUN": "1", "PYTHON": sys.executable}
    done = subprocess.run(command("run"), cwd=REPO, env=environment, capture_output=True, text=True, check=True)
    prepare, train, *plan = done.stdout.splitlines()
    assert "alto_distributed prepare" in prepare
    assert "--nproc-per-node 2 -m alto_distributed pretrain --config configs/gpt2-tiny.yaml" in train
    assert "2 data-parallel = 64 samples" in "\n".join(plan)


def test_importing_needs_torch_alone():
    others = ["deepspeed", "megatron", "mpi4py", "triton", "transformers", "tokenizers", "apex", "ALTO", "E"]
    blocked = f"import sys; sys.modules.update(dict.fromkeys({others}))"
    use = "from alto_distributed import ALTO, E, param_groups, recipe"
    heavy = "sys.exit('torch.distributed.tensor' in sys.modules and 'DTensor was imported in vain')"
    subprocess.run([sys.executable, "-c", f"{blocked}; {use}; {heavy}"], cwd=REPO, check=True)


def test_the_only_dependency_is_torch_and_nobody_lists_apex():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert [re.split(r"[^\w-]", d)[0] for d in project["dependencies"]] == ["torch"]
    extras = project["optional-dependencies"]
    assert {"deepspeed", "megatron", "mpi", "gpu", "pretrain", "dev"} <= set(extras)
    pinned = (REPO / "constraints.txt").read_text()
    listed = [requirement for extra in extras.values() for requirement in extra]
    assert not re.search(r"^apex", "\n".join([pinned, *listed]), re.M)
    assert "torch==2.13.0" in pinned


def test_whatever_the_readmes_commands_install_is_pinned_and_nothing_else():
    """What is not pinned is not audited, and another one tomorrow."""
    pins = (line.partition("==") for line in (REPO / "constraints.txt").read_text().splitlines() if line[:1] != "#")
    pinned = {canonicalize_name(name) for name, _, version in pins if version}
    needed = set(required(["dev"]))
    # Builds of torch for GPUs bring these.
    assert {name for name in needed - pinned if not name.startswith(("nvidia-", "cuda-"))} == set()
    assert pinned - needed == set()


#: Test files, and modules of cases, which are tests too.
TESTS = [*REPO.glob("tests/**/test_*.py"), *REPO.glob("tests/distributed/cases/*.py")]


@pytest.mark.parametrize("path", sorted(TESTS), ids=lambda p: p.stem)
def test_a_test_file_imports_no_other_one(path):
    """What several of them need is in tests/helpers; what they start is in programs/."""
    folder = ".".join(path.relative_to(REPO).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        imported = []
        if isinstance(node, ast.ImportFrom):
            level = folder.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(filter(None, (level, node.module)))
            imported = [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        for name in imported:
            ours = name.split(".")[0] == "tests"
            assert not ours or name.startswith("tests.helpers.") or ".programs." in name, f"line {node.lineno}: {name}"


#: What makes a tensor out of nothing, on torch's default device and in its default dtype unless it is told.
FACTORIES = {
    *("arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones"),
    *("rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_new_tensor_names_its_device_and_dtype(path):
    """A program may have set torch's defaults to others: a buffer on "meta" ended in a crash of the C kernel."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in FACTORIES}:
            missing = {"device", "dtype"} - {keyword.arg for keyword in node.keywords}
            assert not missing, f"line {node.lineno}: {ast.unparse(node)} does not name its {' and '.join(missing)}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_module_has_an_assert(path):
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, ast.Assert), f"line {node.lineno}: an assert vanishes under python -O"
