"""Other programs that records go to.

Those of W&B and MLflow run where these are installed. They are not among the requirements of the tests: they bring 40
packages, five of them pre-releases, and what finds them installed (transformers' Trainer, DeepSpeed's monitor) logs to
them. Exhaustive runs install them into an environment of their own.
"""

import json
import re
import subprocess
import sys
import sysconfig

import pytest
import tomllib

from alto_distributed.pretrain import loggers
from alto_distributed.pretrain.config import settings as config
from alto_distributed.pretrain.metrics import Log
from tests.helpers.launcher import EXHAUSTIVE, REPO

TINY = str(REPO / "configs/gpt2-tiny.yaml")
RECORDS = [(5, {"loss": 2.5, "lr": 0.01}), (5, {"valid_loss": 2.25}), (10, {"loss": 2.0, "lr": 0.02})]


def log_all(run, directory, start=0, records=RECORDS):
    with Log(directory, start, 10, False, True, loggers.of_run(run, directory)) as log:
        for step, values in records:
            log.record(step, values)


class Remembers:
    def __init__(self, broken):
        self.broken, self.records, self.is_closed = broken, [], False

    def record(self, step, values):
        if self.broken and step == 5:
            raise RuntimeError("no network")
        self.records.append((step, dict(values)))

    def close(self):
        self.is_closed = True


def test_a_logger_that_fails_does_not_end_the_run_and_is_opened_again(tmp_path):
    made = {"good": [], "bad": []}

    def opener(name):
        return lambda: made[name].append(Remembers(name == "bad")) or made[name][-1]

    log = Log(tmp_path, 0, 10, False, True, {name: opener(name) for name in made})
    with pytest.warns(UserWarning, match="records for bad of this run cannot be written .no network") as warned, log:
        for step, values in [*RECORDS, (10, {"note": "text", "more": 1})]:
            log.record(step, values)
    assert len(warned) == 1
    (good,), bad = made["good"], made["bad"]
    assert good.records == [*RECORDS, (10, {"more": 1})]
    assert good.is_closed
    assert [one.records for one in bad] == [[], [], [RECORDS[2], (10, {"more": 1})]]
    assert bad[-1].is_closed


def test_no_logger_is_opened_unless_a_setting_names_it(tmp_path):
    assert loggers.of_run(config.load(TINY), tmp_path) == {}
    both = config.load(TINY, ["logs.wandb=project", "logs.mlflow=experiment"])
    assert list(loggers.of_run(both, tmp_path)) == ["wandb", "mlflow"]


def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = config.load(TINY, ["logs.wandb=project"])
    log_all(run, tmp_path)
    first = (tmp_path / ".wandb-run").read_text()
    (written,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    content = written.read_bytes()
    assert b"valid_loss" in content
    assert b"project" in content
    log_all(run, tmp_path, 10, [(11, {"loss": 1.0})])
    assert (tmp_path / ".wandb-run").read_text() == first


def test_mlflow_in_a_local_file(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = config.load(TINY, ["logs.mlflow=experiment"])
    log_all(run, tmp_path)
    log_all(run, tmp_path, 10, [(11, {"loss": 1.0})])
    client, name = mlflow.MlflowClient(), (tmp_path / ".mlflow-run").read_text().strip()
    assert [(m.step, m.value) for m in client.get_metric_history(name, "loss")] == [(5, 2.5), (10, 2.0), (11, 1.0)]
    assert client.get_run(name).data.params["training.seed"] == "1234"
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0]) == {"step": 5, "loss": 2.5, "lr": 0.01}


@pytest.mark.skipif(not EXHAUSTIVE, reason="it downloads 100 MB; EXHAUSTIVE=1 runs it")
def test_both_in_an_environment_of_their_own(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv/bin/python")
    extra = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]["loggers"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", "-c", REPO / "constraints.txt", *extra], check=True)
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    (site / "of_the_tests.pth").write_text(sysconfig.get_path("purelib"))  # behind its own
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "offline or local_file"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert re.search(r"^2 passed, \d+ deselected", done.stdout, re.M), done.stdout[-3000:] + done.stderr[-1000:]
