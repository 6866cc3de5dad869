"""Commands that tests start as a user would, in processes of their own."""

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from .launcher import REPO, environment

#: Start two ranks, or register ALTO and run what follows.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
RUNNER = ["-m", "alto_distributed"]
#: Root is who runs a container.
MPI_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def beside_python(name):
    """A command of the environment that runs the tests, or whatever the PATH has."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def renumbered(package, directory, file, pattern, replacement):
    """The installed package once more in ``directory``, with one of its files changed: another release's number, say.

    Args:
        package: its name, with dots.
        directory: to be put on PYTHONPATH.
        file: name of the file in the package.
        pattern: a regular expression for what is replaced in it, with something to find.
        replacement: what it is replaced by.
    """
    source = Path(importlib.util.find_spec(package.partition(".")[0]).submodule_search_locations[0]).parent
    parts = package.split(".")
    target = Path(directory, *parts)
    target.mkdir(parents=True)
    for entry in source.joinpath(*parts).iterdir():
        if entry.name not in (file, "__pycache__"):
            (target / entry.name).symlink_to(entry)
    changed, found = re.subn(pattern, replacement, source.joinpath(*parts, file).read_text())
    assert found, f"{file} of {package} has no {pattern}"
    (target / file).write_text(changed)


def run(command, cwd=REPO, timeout=300, **variables):
    """Run a command to its end and return what it printed; if it does not end, stop its ranks as well."""
    variables = environment(HF_HUB_OFFLINE="1", **variables)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=cwd, env=variables, start_new_session=True, **pipes) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            pytest.fail(f"not done after {timeout} s: {command}\n{output[-4000:]}")
    assert process.returncode == 0, f"{command}\n{output[-6000:]}"
    return output
