"""The built wheel, installed away from the repository: it is complete, and each extra does what it promises."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
import tomllib

from alto_distributed.extras import EXTRA_OF
from alto_distributed.pretrain import compare
from tests.helpers.launcher import EXHAUSTIVE, REPO
from tests.helpers.processes import MPI_AS_ROOT, free_port

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
TINY = str(REPO / "configs/gpt2-tiny.yaml")
#: A step with the kernel in C, which is compiled from the source in the wheel.
STEP = """
import torch
from alto_distributed import ALTO
weight = torch.ones(8, 8, requires_grad=True)
weight.sum().backward()
ALTO([weight], kernel="native").step()
assert weight.max() < 1
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, for setuptools leaves its own files beside the sources."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(
        REPO / "alto_distributed", source / "alto_distributed", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, source)
    _pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", output, source)
    (built,) = output.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def alto(wheel, tmp_path_factory):
    """Run the console script of the installed wheel, in an empty folder; returns the finished process."""
    target, cache = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("cache")
    _pip(sys.executable, "install", "--no-deps", "--no-index", "--target", target, wheel)

    def run(*command, cwd, program=(sys.executable, target / "bin/alto"), **variables):
        base = {**os.environ, "PYTHONPATH": str(target), "ALTO_CACHE_DIR": str(cache), **variables}
        return subprocess.run(
            [*map(str, [*program, *command])], cwd=cwd, env=base, capture_output=True, text=True, check=False
        )

    return run


def _pip(python, command, *arguments, env=None):
    options = ["--quiet", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(
        [str(python), "-m", "pip", command, *options], capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 0, done.stderr


def test_the_wheel_has_everything_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        about = {name.rpartition("/")[2]: archive.read(name).decode() for name in names if ".dist-info/" in name}
    here = (
        path for path in (REPO / "alto_distributed").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
    assert {name for name in names if ".dist-info/" not in name} == {str(path.relative_to(REPO)) for path in here}
    assert {"alto_distributed/py.typed", "alto_distributed/kernels/cpu/alto.c"} <= names
    assert "alto = alto_distributed.__main__:main" in about["entry_points.txt"]
    assert set(re.findall("^Provides-Extra: (.*)$", about["METADATA"], re.M)) == set(PROJECT["optional-dependencies"])


def test_the_c_kernel_is_compiled_from_the_wheel(alto, tmp_path):
    where = f"import alto_distributed; assert not alto_distributed.__file__.startswith({str(REPO)!r})"
    done = alto("-c", STEP + where, cwd=tmp_path, program=[sys.executable])
    assert done.returncode == 0, done.stderr


def test_the_console_script_is_python_m_alto_distributed(alto, tmp_path):
    said = alto("--help", cwd=tmp_path)
    assert said.returncode == 0
    assert said.stdout.startswith("usage: alto SCRIPT")
    said = alto("prepare", "--help", cwd=tmp_path)
    assert said.stdout.startswith("usage: alto prepare ")
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    (tmp_path / "script.py").write_text("import beside, sys\nprint(beside.NAME, sys.argv, __name__)\nsys.exit(3)\n")
    said = alto("script.py", "--flag", cwd=tmp_path)
    assert (said.returncode, said.stdout) == (3, "beside ['script.py', '--flag'] __main__\n")
    said = alto("absent.py", cwd=tmp_path)
    assert (said.returncode, said.stderr) == (2, "alto_distributed: there is no script absent.py; see alto --help\n")


def test_the_console_script_prepares_data(alto, tmp_path):
    (tmp_path / "a.txt").write_text("some words " * 50)
    said = alto("prepare", "a.txt", "--output", "data", "--split", "1,0,0", "--tokenizer", "bytes", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert (tmp_path / "data/train.idx").exists()


@pytest.mark.parametrize(("name", "spec", "expected"), [
    ("/environment/bin/alto", None, ["-m", "alto_distributed"]),
    ("/repository/alto_distributed/__main__.py", "spec", ["-m", "alto_distributed"]),
    ("/repository/scripts/megatron_on_cpu.py", None, ["/repository/scripts/megatron_on_cpu.py"]),
])  # fmt: skip
def test_ranks_are_started_as_the_program_was(name, spec, expected, monkeypatch):
    main = type(sys)("__main__")
    main.__file__, main.__spec__ = name, spec
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert compare.entry() == expected


# -- what is missing ---------------------------------------------------------------------------------------

PRETRAIN = ["pretrain", "--config", TINY]
#: Modules that are not installed -> a command, and the end of the one line that it says. No command: a bare import.
MISSING = {
    "yaml": (["prepare", "--output", "x"], "prepare: yaml is not installed: pip install 'alto-distributed[pretrain]'"),
    "tokenizers": (
        ["prepare", "a.txt", "--output", "x", "--split", "1,0,0", "--quiet"],
        "tokenizers is not installed: pip install 'alto-distributed[pretrain]', or use --tokenizer bytes",
    ),
    "matplotlib": (["report", "run"], "matplotlib is not installed: pip install 'alto-distributed[pretrain]'"),
    "transformers": (
        ["compare", "--config", TINY, "--optimizers", "alto"],
        "compare: transformers is not installed: pip install 'alto-distributed[pretrain]'",
    ),
    "deepspeed": (PRETRAIN, "pretrain: deepspeed is not installed: pip install 'alto-distributed[deepspeed]'"),
    "megatron": (
        [*PRETRAIN, "--engine", "megatron"],
        "pretrain: megatron.core is not installed: pip install 'alto-distributed[megatron]'",
    ),
    "tensorboard,deepspeed": (
        PRETRAIN,
        "deepspeed and tensorboard are not installed: pip install 'alto-distributed[deepspeed,pretrain]'",
    ),
    "mpi4py": (
        PRETRAIN,
        "mpirun started this process, and mpi4py is not installed: pip install 'alto-distributed[mpi]', or start it "
        "with torchrun",
    ),
    "megatron.core": ([], "MissingExtra: megatron.core is not installed: pip install 'alto-distributed[megatron]'"),
}


#: Imports torch once, then forks for each case: blocks its modules and runs its command.
FORKS = """
import json, os, sys
import alto_distributed
from alto_distributed.__main__ import main

for modules, command in json.load(sys.stdin):
    child = os.fork()
    if not child:
        sys.modules.update(dict.fromkeys(modules.split(",")))
        sys.argv = ["alto", *command]
        if modules == "mpi4py":
            os.environ["OMPI_COMM_WORLD_SIZE"] = "1"
        os.dup2(os.open(modules, os.O_CREAT | os.O_WRONLY), 2)
        main() if command else __import__("alto_distributed.megatron")
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 1:
        sys.exit(modules + " was not missed")
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Missing modules -> the lines that the command says."""
    where = tmp_path_factory.mktemp("missing")
    (where / "run").mkdir()
    (where / "run/metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 1.0}) + "\n")
    (where / "a.txt").write_text("words\n" * 1000)
    cases = [(modules, command) for modules, (command, _) in MISSING.items()]
    variables = {**os.environ, "PYTHONPATH": str(REPO)}
    subprocess.run(
        [sys.executable, "-c", FORKS], cwd=where, env=variables, input=json.dumps(cases), text=True, check=True
    )
    return {modules: (where / modules).read_text().splitlines() for modules in MISSING}


@pytest.mark.parametrize("modules", MISSING)
def test_a_missing_extra_is_told_in_one_line(modules, said):
    command, expected = MISSING[modules]
    assert said[modules][-1].endswith(expected)
    assert len(said[modules]) == 1 or not command, said[modules]


def test_every_module_is_in_the_extra_that_is_named_for_it():
    distributions = {"yaml": "pyyaml", "megatron": "megatron-core", "mlflow": "mlflow-skinny"}
    for module, extra in EXTRA_OF.items():
        listed = [re.split("[^a-z0-9_-]", line)[0] for line in PROJECT["optional-dependencies"][extra]]
        assert distributions.get(module, module) in listed


# -- each extra alone, in an environment of its own --------------------------------------------------------

ZERO = """
import deepspeed, torch
import alto_distributed
alto_distributed.register()
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a minute of compiling
settings = {"train_batch_size": 1, "zero_optimization": {"stage": 2}, "optimizer": {"type": "ALTO", "params": {}}}
model = torch.nn.Linear(8, 8)
before = model.weight.detach().clone()
engine, *_ = deepspeed.initialize(model=model, config=settings)
assert type(engine.basic_optimizer).__name__ == "ALTO"
engine.backward(engine(torch.ones(1, 8)).sum())
engine.step()
assert not torch.equal(before, model.weight.detach())
from alto_distributed.sharding.shutdown import leave
del engine, model
leave()
"""
RANKS = "from mpi4py import MPI; print(MPI.COMM_WORLD.Get_size())"
TRAIN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "alto_distributed", *PRETRAIN]
PREPARE = ["bin/alto", "prepare", "--output", "data/stdlib", "--quiet"]
#: Extras -> commands, the first word of each from the environment.
PROMISES = {
    "": [["bin/python", "-c", STEP]],
    "deepspeed": [["bin/python", "-c", ZERO]],
    "megatron": [
        ["bin/python", "megatron_on_cpu.py", "train_megatron.py", "--optimizer", "alto", "--lr", "0.1", "--steps", "2"]
    ],
    "mpi": [["bin/mpirun", "--oversubscribe", "-n", "2", "bin/python", "-c", RANKS]],
    "gpu": [["bin/python", "-c", "import alto_distributed.kernels.triton.kernel"]],
    "pretrain": [PREPARE, ["bin/alto", "estimate", "--config", TINY]],
    "deepspeed,pretrain": [
        PREPARE,
        ["bin/alto", *PRETRAIN, "--dry-run"],
        ["bin/python", *TRAIN, "training.iterations=2", "schedule.warmup=1"],
    ],
}


@pytest.mark.skipif(not EXHAUSTIVE, reason="a variation: EXHAUSTIVE=1 runs it")
@pytest.mark.parametrize("extras", PROMISES)
def test_an_extra_alone_does_what_it_promises(extras, wheel, tmp_path):
    """Downloads as pip is set up to; the versions are the pinned ones."""
    home = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    wanted = f"{wheel}[{extras}]" if extras else wheel
    _pip(home / "bin/python", "install", "-c", REPO / "constraints.txt", wanted, env=outside)
    for name in ("scripts/megatron_on_cpu.py", "tests/end_to_end/programs/train_megatron.py"):
        shutil.copy(REPO / name, tmp_path)
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    variables = {**outside, **one, **MPI_AS_ROOT, "DS_ACCELERATOR": "cpu", "ALTO_CACHE_DIR": str(tmp_path / "cache")}
    variables["PATH"] = f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"
    try:
        for command in PROMISES[extras]:
            words = [str(home / word) if word.startswith("bin/") else word for word in command]
            done = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
        if "pretrain" not in extras:
            said = subprocess.run(
                [home / "bin/alto", "prepare"], env=variables, capture_output=True, text=True, check=False
            )
            assert "Traceback" not in said.stderr
            # The last line, for without numpy torch warns at its import.
            assert said.stderr.splitlines()[-1].endswith("is not installed: pip install 'alto-distributed[pretrain]'")
    finally:
        shutil.rmtree(home)  # gigabytes
