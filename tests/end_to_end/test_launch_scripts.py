"""The shell scripts: clean by shellcheck, and whatever their variables and arguments hold is data, never a command."""

import os
import shutil
import subprocess

import pytest

from tests.helpers.launcher import REPO
from tests.helpers.processes import beside_python

SCRIPTS = [*sorted((REPO / "launch").glob("*.sh")), *sorted((REPO / "scripts").glob("*.sh")), REPO / ".ci/run"]


def test_shellcheck_has_nothing_to_say():
    done = subprocess.run(
        [beside_python("shellcheck"), "--external-sources", *map(str, SCRIPTS)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_script_writes_where_others_could_wait_for_it():
    """A name in /tmp that can be guessed may be somebody's link to somewhere else."""
    for script in SCRIPTS:
        assert "/tmp" not in script.read_text(), script
        assert "eval" not in script.read_text().split(), script


#: Stands for python, mpirun, srun and deepspeed: notes the arguments it gets, one a line, and makes environments.
STUB = """#!/usr/bin/env bash
{ printf '%q' "$(basename "$0")"; printf ' %q' "$@"; echo; } >>"$NOTES"
if [ "${1:-}" = -m ] && [ "${2:-}" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi
if [ "$(basename "$0")" = scontrol ]; then echo node0; fi
"""
HOSTILE = [
    "x; touch ran",
    "$(touch ran)",
    "`touch ran`",
    "PATH[$(touch ran)]",
    "' \" | touch ran #",
    "&& touch ran",
    "two words\n$(touch ran)",
    "*",
    "a=b",
]
#: Script -> the variables that it takes text from, and what else must be set for it to get to its end.
VARIABLES = {
    "torchrun": (
        ["GPUS", "NODES", "NODE", "MASTER", "RESTARTS"],
        {"GPUS": "2", "NODES": "2", "NODE": "0", "MASTER": "h:1"},
    ),
    "mpirun": (["RANKS", "HOSTS"], {}),
    "slurm": (
        ["GPUS", "PORT", "IMAGE", "MOUNTS", "SLURM_NNODES", "SLURM_JOB_ID", "SLURM_JOB_NODELIST"],
        {"SLURM_JOB_NODELIST": "n[0-1]", "IMAGE": "alto.sqsh"},
    ),
    "deepspeed": (["GPUS", "HOSTFILE"], {}),
    "tiny": (["RANKS", "RUN"], {}),
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the scripts, with commands that only note what they are given."""
    root = tmp_path_factory.mktemp("tree")
    for folder in ("launch", "scripts"):
        shutil.copytree(REPO / folder, root / folder)
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(REPO / name, root)
    (root / "bin").mkdir()
    for name in ("python", "mpirun", "srun", "deepspeed", "scontrol"):
        (root / "bin" / name).write_text(STUB)
        (root / "bin" / name).chmod(0o755)
    return root


def started(tree, script, argument, dry, **variables):
    """Run a script in the tree; what it called, and how it ended."""
    notes = tree / "notes"
    notes.unlink(missing_ok=True)
    (tree / "hosts").write_text("node0 slots=2\n")
    base = {
        "PATH": f"{tree}/bin:/usr/bin:/bin",
        "HOME": str(tree),
        "NOTES": str(notes),
        "PYTHON": str(tree / "bin/python"),
    }
    base |= {"PY": str(tree / "bin/python"), "DRY_RUN": "1"} if dry else {"PY": str(tree / "bin/python")}
    command = ["bash", f"launch/{script}.sh", "--config", argument]
    done = subprocess.run(
        command, cwd=tree, env=base | variables, capture_output=True, text=True, timeout=60, check=False
    )
    return notes.read_text() if notes.exists() else "", done


@pytest.mark.parametrize("script", VARIABLES)
def test_hostile_values_are_not_run(script, tree):
    names, needed = VARIABLES[script]
    cases = [(name, value, dry) for name in [*names, "argument"] for value in HOSTILE for dry in (True, False)]
    for name, value, dry in cases:
        where = tree / value if name == "HOSTFILE" and "/" not in value else None
        if where is not None:
            where.write_text("# two of them\nnode0 slots=2\n\n")
        variables = needed | ({} if name == "argument" else {name: value})
        notes, done = started(tree, script, value if name == "argument" else "configs/x.yaml", dry, **variables)
        assert not list(tree.rglob("ran")), (script, name, value, done.stderr)
        if name in ("GPUS", "NODES", "SLURM_NNODES", "RANKS") and script != "tiny":
            assert done.returncode == 2, (name, value, done.stderr)
            assert "whole number" in done.stderr
            continue
        # It has arrived as one argument, as it was.
        quoted = subprocess.run(
            ["bash", "-c", 'printf %q "$1"', "-", value], capture_output=True, text=True, check=True
        )
        arrived = {"MASTER": "endpoint", "SLURM_JOB_NODELIST": "hostnames", "PORT": "endpoint"}.get(name)
        assert quoted.stdout in notes + done.stdout or arrived, (script, name, value, dry, notes, done.stderr)
        assert name != "HOSTFILE" or not dry or "--dry-run --world 2" in notes, (value, notes)
    assert "pretrain" in notes


@pytest.mark.parametrize(
    "line", ["node1 slots=$(touch ran)", "$(touch ran) slots=2", "a;touch${IFS}ran slots=2", "node1"]
)
def test_names_of_hosts_that_a_shell_would_run_are_refused(line, tree):
    (tree / "machines").write_text(f"node0 slots=2\n{line}\n")
    for dry in (True, False):
        notes, done = started(tree, "deepspeed", "configs/x.yaml", dry, HOSTFILE="machines")
        assert (done.returncode, notes) == (2, "")
        assert done.stderr == f'machines has the line "{line}", and a line is "host slots=8"\n'
        assert not list(tree.rglob("ran"))


def test_the_stub_would_tell(tree):
    """A script that lets a value be run is found out by the test above."""
    script = tree / "launch" / "careless.sh"
    script.write_text('PY -m $(eval "echo $2")\n')
    started(tree, "careless", "$(touch ran)", dry=False)
    assert (tree / "ran").exists()
    for left in (tree / "ran", script):
        os.remove(left)


@pytest.mark.parametrize(("script", "extras"), [("mpirun", "mpi"), ("deepspeed", "deepspeed,pretrain")])
def test_a_launcher_that_is_missing_is_told_with_what_to_install(script, extras, tree):
    path = f"{tree}/empty:/usr/bin:/bin"
    if shutil.which(script, path=path):
        pytest.skip(f"the system has {script}")
    notes, done = started(tree, script, "configs/x.yaml", dry=False, PATH=path)
    assert (notes, done.returncode) == ("", 127)
    assert done.stderr == f"there is no {script}: pip install 'alto-distributed[{extras}]'\n"


@pytest.mark.parametrize(
    ("script", "variables", "ranks"),
    [
        ("torchrun", {"GPUS": "1"}, 1),
        ("torchrun", {"GPUS": "4096"}, 4096),
        ("slurm", {"GPUS": "2"}, 2),
        ("mpirun", {"RANKS": "4", "HOSTS": "a:2,b:2"}, 2),
        ("deepspeed", {"GPUS": "2"}, 2),
    ],
)
def test_each_rank_gets_its_share_of_the_cores(script, variables, ranks, tree):
    """torchrun gives a thread to each, with which steps of offloaded states take several times as long."""
    for name in ("python", "mpirun", "srun", "deepspeed"):
        (tree / "bin" / name).write_text(STUB + 'echo "threads $OMP_NUM_THREADS" >>"$NOTES"\n')
    cores = len(os.sched_getaffinity(0))
    for given, expected in (({}, -(-cores // ranks)), ({"OMP_NUM_THREADS": "3"}, 3)):
        notes, done = started(tree, script, "configs/x.yaml", dry=False, **variables, **given)
        assert f"threads {expected}\n" in notes, (notes, done.stderr)
