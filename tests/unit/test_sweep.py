"""``alto sweep``: the search, the trials as processes, and what is refused before anything trains."""

import json
import math
import os
import signal
import subprocess
import threading
from dataclasses import replace

import pytest

from alto_distributed.pretrain.cli import main
from alto_distributed.pretrain.config import settings as config
from alto_distributed.pretrain.sweep import results, trials
from alto_distributed.pretrain.sweep.halving import Found, Grid, Trial, first_grid, lengths, search
from alto_distributed.pretrain.sweep.trials import Outcome, Task, Trials, shares
from tests.helpers.launcher import REPO
from tests.helpers.pretrain_runs import prepare_bytes

TINY = str(REPO / "configs/gpt2-tiny.yaml")


class Landscape:
    """Losses by the distance of a rate from the best one, in octaves; the best falls as runs get longer."""

    def __init__(self, best, drift=0.0, ceiling=math.inf):
        self.best, self.drift, self.ceiling = best, drift, ceiling
        self.asked = []

    def __call__(self, wanted):
        self.asked += wanted
        return {trial: self.loss(trial) for trial in wanted}

    def loss(self, trial):
        if trial.rate > self.ceiling:
            return math.inf
        best = self.best[trial.optimizer] * 2 ** (-self.drift * math.log2(trial.steps))
        return 3 + math.log2(trial.rate / best) ** 2 + 10 / trial.steps


def nearest(grid, best):
    return min(grid, key=lambda rate: abs(math.log2(rate / best)))


def test_the_best_rate_is_found_with_half_of_the_trials_at_each_length():
    landscape = Landscape({"a": 0.011, "b": 5e-4})
    found = search({"a": 0.01, "b": 8e-4}, 7, [25, 50, 100], landscape)
    assert {name: about.is_inside for name, about in found.items()} == {"a": True, "b": True}
    for name, best in landscape.best.items():
        assert found[name].rate == nearest(found[name].rates, best)
        steps = [trial.steps for trial in set(landscape.asked) if trial.optimizer == name]
        assert [steps.count(length) for length in (25, 50, 100)] == [5, 3, 2]


@pytest.mark.parametrize("center", [1e-4, 1.0])
def test_a_grid_grows_until_the_best_rate_is_inside_and_all_grids_by_as_much(center):
    found = search({"a": center, "b": 0.01}, 40, [50, 100], Landscape({"a": 0.01, "b": 0.01}))
    assert found["a"].is_inside
    assert found["a"].rate == nearest(found["a"].rates, 0.01)
    assert len(found["a"].rates) == len(found["b"].rates) > first_grid(20)


def test_a_rate_that_is_best_at_full_length_alone_makes_the_grid_grow_too():
    landscape = Landscape({"a": 0.0099 * 2**3.5}, drift=0.5)
    found = search({"a": 0.01}, 4, [128, 256], landscape)
    assert found["a"].rates == (0.005, 0.007071, 0.01, 0.01414)
    assert found["a"].is_inside
    assert found["a"].rate == nearest(found["a"].rates, landscape.best["a"] / 16) == 0.007071


def test_a_budget_that_ends_at_the_edge_says_so():
    found = search({"a": 1.0}, 4, [10], Landscape({"a": 1e-4}))
    assert not found["a"].is_inside
    assert len(found["a"].rates) == 4


def test_rates_that_diverge_lose_and_if_all_do_the_grid_grows_downwards():
    found = search({"a": 1.0}, 12, [10, 20], Landscape({"a": 10.0}, ceiling=0.2))
    assert found["a"].rate == max(rate for rate in found["a"].rates if rate <= 0.2)
    nothing = search({"a": 1.0}, 6, [10], lambda wanted: dict.fromkeys(wanted, math.inf))
    assert not nothing["a"].is_inside


def test_a_grid_has_half_octaves_and_lengths_double():
    assert Grid.around(0.01, 5).rates == [0.005, 0.007071, 0.01, 0.01414, 0.02]
    assert lengths(100, 3) == [25, 50, 100]
    assert lengths(2, 3) == [1, 2]


def test_trials_share_the_devices():
    cpus = shares(2, None, [], 8)
    assert cpus == [{"OMP_NUM_THREADS": "1"}] * 4
    assert shares(1, 2, [], 8) == [{"OMP_NUM_THREADS": "4"}] * 2
    gpus = shares(2, None, ["0", "3", "GPU-x", "5", "6"], 64)
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in gpus] == ["0,3", "GPU-x,5"]
    with pytest.raises(ValueError, match="--jobs 3 with --ranks 2 takes 6 GPUs, and there are 5: lower one"):
        shares(2, 3, ["0", "1", "2", "3", "4"], 64)


@pytest.mark.parametrize(("said", "devices"), [
    (None, ["0", "1"]),
    ("3, GPU-x", ["3", "GPU-x"]),
    ("3,GPU-x,-1,5", ["3", "GPU-x"]),
])  # fmt: skip
def test_gpus_have_the_names_of_the_environment(said, devices, monkeypatch):
    monkeypatch.setattr(trials.torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if said is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)
    assert trials.visible_devices() == devices


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_bytes(tmp_path_factory.mktemp("data"))


# A program that records what a run would: it stands in for the training program, which other tests start.
PROGRAM = """
import json, os, pathlib, signal, sys, time
into = pathlib.Path(sys.argv[sys.argv.index("--into") + 1])
set = dict(word.split("=", 1) for word in sys.argv if "=" in word)
with open(into / "starts", "a") as file:
    file.write(os.environ["OMP_NUM_THREADS"] + "\\n")
rate = float(set["optimizer.lr"])
if rate > 1:
    sys.exit(3)
if rate == 1:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    (into / "waits").touch()
    time.sleep(60)
(into / "checkpoints").mkdir(exist_ok=True)
records = [{"step": 4, "diverged": True}] if rate > 0.5 else [{"step": 4, "valid_loss": rate, "test_loss": 2 * rate}]
(into / "metrics.jsonl").write_text("".join(json.dumps(record) + "\\n" for record in records))
sys.exit(1 if rate > 0.5 else 0)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    monkeypatch.setattr(trials, "entry", lambda: [str(path)])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def task(rate, data, into):
    run = config.load(TINY, [f"data.directory={data}", "training.iterations=4", "schedule.warmup=1"])
    run = replace(run, optimizer=replace(run.optimizer, lr=rate))
    return Task(f"rate {rate}", into / str(rate), run, (f"optimizer.lr={rate}",))


def test_trials_run_once_and_what_diverged_is_no_failure(program, data, tmp_path):
    tasks = [task(rate, data, tmp_path) for rate in (0.25, 0.75, 0.125)]
    done = []
    environments = [{"OMP_NUM_THREADS": "3"}, {"OMP_NUM_THREADS": "4"}]
    outcomes = Trials(environments, 1).outcomes(tasks, lambda task, outcome: done.append(task.label))
    assert [outcome.valid_loss for outcome in outcomes] == [0.25, math.inf, 0.125]
    assert outcomes[0].test_loss == 0.5
    assert sorted(done) == ["rate 0.125", "rate 0.25", "rate 0.75"]
    assert not (tmp_path / "0.25/checkpoints").exists()
    assert Trials(environments, 1).outcomes(tasks[::-1], lambda *_: pytest.fail("it ran again"))[2] == outcomes[0]
    starts = [(tmp_path / str(rate) / "starts").read_text() for rate in (0.25, 0.75, 0.125)]
    assert sorted({*starts}) in (["3\n"], ["3\n", "4\n"], ["4\n"])

    other = replace(tasks[0], run=replace(tasks[0].run, training=replace(tasks[0].run.training, clip=2.0)))
    with pytest.raises(ValueError, match=r"has a trial with other settings: training.clip was 1.0, is 2.0"):
        Trials(environments, 1).outcomes([other], print)
    about = json.loads((tmp_path / "0.25/trial.json").read_text())
    (tmp_path / "0.25/trial.json").write_text(json.dumps({**about, "data": {}}))
    with pytest.raises(ValueError, match="the data in .* were others"):
        Trials(environments, 1).outcomes(tasks, print)


def test_a_trial_that_fails_ends_the_sweep_and_the_others_with_it(program, data, tmp_path):
    slow, broken = task(1.0, data, tmp_path), task(2.0, data, tmp_path)
    with pytest.raises(RuntimeError, match=r"rate 2.0 ended with status 3 before its last step; .*log.txt says why"):
        Trials([{"OMP_NUM_THREADS": "1"}] * 2, 1).outcomes([slow, broken], print)
    assert not (tmp_path / "1.0/trial.json").exists()


def test_an_interrupted_sweep_ends_its_trials(program, data, tmp_path):
    waits = tmp_path / "1.0/waits"

    def interrupt():
        while not waits.exists():
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    sweep = Trials([{"OMP_NUM_THREADS": "1"}], 1)
    with pytest.raises(KeyboardInterrupt):
        sweep.outcomes([task(1.0, data, tmp_path), task(0.25, data, tmp_path)], print)
    assert not sweep._running
    assert not (tmp_path / "0.25").exists()


@pytest.mark.parametrize(("words", "message"), [
    (["--optimizers", "alto", "admw", "--budget", "9"], "did you mean 'adamw'?"),
    (["--optimizers", "alto", "alto", "--budget", "9"], "--optimizers names alto twice"),
    (["--optimizers", "alto", "lamb", "--budget", "5"], "--budget 5 leaves 2 rates for each of 2 optimizers"),
    (["--optimizers", "alto:lr=0", "--budget", "5"], "alto:lr=0 has the rate 0"),
    (["--optimizers", "alto", "--budget", "5", "--seeds", "0"], "--seeds 0 must be at least 1"),
    (["--optimizers", "alto", "--budget", "5", "--jobs", "0"], "--jobs 0 must be at least 1"),
    (["--optimizers", "alto", "--budget", "5", "training.global_batch=7"], "training.global_batch=7"),
    (["--optimizers", "adamw=1e-3", "--budget", "5"], "--optimizers adamw=1e-3: there is no name"),
    (["--optimizers", "alto", "--budget", "5", "--ranks", "0"], "0 ranks (--world, --ranks): there must be between"),
    (["--optimizers", "alto", "--budget", "5", "--engine", "megatron", "megatron.tensor_parallel=2"],
     "1 ranks are not a multiple of tensor_parallel x pipeline_parallel = 2"),
])  # fmt: skip
def test_what_is_wrong_is_refused_before_anything_trains(words, message, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("something was started"))
    with pytest.raises(SystemExit) as ended:
        main(["sweep", "--config", TINY, f"data.directory={data}", *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_dry_run_states_the_plan(data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--optimizers", "alto", "adamw:lr=0.002", "--budget", "9", "--dry-run", "--jobs", "3"]
    main(["sweep", "--config", TINY, f"data.directory={data}", *words])
    said = capsys.readouterr().out
    assert "grid of alto: 0.04243, 0.06, 0.08485\n" in said
    assert "grid of adamw:lr=0.002: 0.001414, 0.002, 0.002828\n" in said
    assert "3 of 4 rates each at first" in said
    assert "runs of 50, 100, 200 steps" in said
    assert not list(tmp_path.iterdir())


def test_the_table_has_mean_and_spread_and_names_a_rate_at_the_edge(tmp_path):
    inside, edge = Found(0.01, True, (0.005, 0.01, 0.02)), Found(0.02, False, (0.005, 0.01, 0.02))
    winners = [
        results.Winner("b", edge, {1: Outcome(3.0, 3.5), 2: Outcome(math.inf)}, []),
        results.Winner("a", inside, {1: Outcome(2.0, 2.5), 2: Outcome(2.2, 2.5)}, []),
    ]
    losses = {Trial("a", 0.01, 5): 4.0, Trial("a", 0.02, 5): math.inf, Trial("b", 0.02, 10): 3.0}
    text, figure = results.write(winners, losses, tmp_path)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert rows[2] == ["a", "0.01", "3", "2.1000", "0.1414", "2.5000", "0.0000", "2"]
    assert rows[3] == ["b", "0.02", "3", "diverged", "-", "-", "-", "2"]
    assert "The rate of b, 0.02, is at the edge of its grid" in text
    assert "of a, " not in text
    assert "diverged" in (tmp_path / "sweep.md").read_text().split("by rate", 1)[1]
    assert figure.stat().st_size > 10_000
    assert figure.with_suffix(".svg").is_file()
    assert json.loads((tmp_path / "sweep.json").read_text())["winners"][1]["seeds"] == {"1": 3.0, "2": None}
