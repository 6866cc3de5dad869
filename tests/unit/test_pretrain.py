"""Settings of the training program, what they come to, and the launch scripts' dry runs."""

import contextlib
import itertools
import json
import logging
import resource
import signal
import subprocess
import sys
import warnings

import pytest

from alto_distributed.pretrain import metrics as logs
from alto_distributed.pretrain.cli import plan
from alto_distributed.pretrain.config import settings as config
from alto_distributed.pretrain.console import log_lines
from alto_distributed.pretrain.schedule import learning_rate
from alto_distributed.pretrain.trainer import _asked_to_stop
from tests.helpers.launcher import REPO, environment
from tests.helpers.pretrain_runs import prepare_bytes

# -- settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((REPO / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_a_run(path):
    run = config.load(path)
    assert config.parse(run.as_dict()) == run
    if "345m" in path.stem:
        model, training = run.model, run.training
        assert (model.layers, model.hidden, model.heads, model.sequence) == (24, 1024, 16, 1024)
        assert (training.global_batch, training.micro_batch, training.iterations) == (4096, 4, 5000)
        assert (training.clip, training.seed, training.precision) == (1.0, 1234, "bf16")
        rates = {"alto": 1e-2, "lamb": 1e-2, "adamw": 8e-4, "adam": 6e-4, "adabelief": 5e-2, "lion": 1e-4}
        assert run.optimizer.lr == rates[run.optimizer.name]
    assert "= 4096 samples" in plan(run, 4, path) or "tiny" in path.stem


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainin.seed=1", "did you mean 'training'"),
        ("training.iteration=3", "did you mean 'iterations'"),
        ("training.iterations=many", "should be a whole number"),
        ("training.iterations=1.5", "should be a whole number"),
        ("training.clip=-1", "training.clip=-1.0 is out of range"),
        ("optimizer.lr=.nan", "optimizer.lr=nan is out of range"),
        ("model.heads=3", "must be a multiple of model.heads=3"),
        ("schedule.kind=cosin", "is not one of constant, cosine, poly, wsd"),
        ("logs.tensorboard=1", "should be true or false"),
        ("training=3", "should be a section"),
        ("iterations", "is not an override"),
        ("model.layers=[", "is not YAML"),
        ("schedule.warmup=1000", "longer than training.iterations"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(override, message):
    with pytest.raises(ValueError, match=message):
        config.load(REPO / "configs/gpt2-tiny.yaml", [override])


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_does():
    run = config.load(REPO / "configs/gpt2-345m.yaml")
    assert run.accumulation(8) == 128
    with pytest.raises(ValueError, match=r"4 x 3 = 12; the nearest that are: 4092, 4104"):
        run.accumulation(3)


def test_the_rate_rises_and_falls():
    run = config.load(REPO / "configs/gpt2-345m.yaml")
    rates = [learning_rate(run, step) for step in range(5000)]
    assert rates[0] == pytest.approx(1e-2 / 50)
    assert max(rates) == rates[49] == rates[50] == 1e-2
    assert rates[-1] == pytest.approx(1e-4)
    assert all(a >= b for a, b in itertools.pairwise(rates[50:]))
    constant = config.load(REPO / "configs/gpt2-345m.yaml", ["schedule.kind=constant"])
    assert learning_rate(constant, 4999) == 1e-2
    straight = config.load(REPO / "configs/gpt2-345m.yaml", ["schedule.kind=poly", "schedule.final=0"])
    assert learning_rate(straight, 50 + (4999 - 50) // 2) == pytest.approx(0.5e-2, rel=1e-3)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_is_noted_and_handlers_are_put_back(number, request):
    inherited = signal.getsignal(number)
    request.addfinalizer(lambda: signal.signal(number, inherited))
    if number == signal.SIGINT:
        signal.signal(number, signal.default_int_handler)  # a shell's background job would be born ignoring it
    before = signal.getsignal(number)
    with _asked_to_stop() as asked:
        signal.raise_signal(number)
        if number == signal.SIGINT:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
        else:
            signal.raise_signal(number)  # torchrun's copy of what a scheduler sent to all
        assert set(asked) == {number}
    assert signal.getsignal(number) is before


# -- logs --------------------------------------------------------------------------------------------------


def test_a_resumed_log_has_every_step_once(tmp_path):
    with logs.Log(tmp_path, 0, 9, tensorboard=False, speaks=True) as log:
        for step in range(1, 6):
            log.record(step, {"loss": float(step), "other": step})
    with logs.Log(tmp_path, 3, 9, tensorboard=False, speaks=True) as log:
        log.record(4, {"loss": 44.0})
    assert [(r["step"], r["loss"]) for r in logs.read(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 44.0)]
    assert [line.split(",")[:2] for line in (tmp_path / "metrics.csv").read_text().splitlines()[1:]] == [
        ["1", "1.0"],
        ["2", "2.0"],
        ["3", "3.0"],
        ["4", "44.0"],
    ]


def test_a_damaged_log_does_not_keep_a_run_from_going_on(tmp_path):
    """One flipped bit of it blocked every resume: a log is not what a run goes on from."""
    with logs.Log(tmp_path, 0, 9, tensorboard=False, speaks=True) as log:
        for step in range(1, 6):
            log.record(step, {"loss": 1.0 / step})
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[1].replace(b"{", b"[", 1), *lines[2:]]))
    with pytest.raises(ValueError, match="line 2 is not a record"):
        logs.read(tmp_path)  # a report says so
    with (
        pytest.warns(UserWarning, match=r"lines that are no records \(2\)"),
        logs.Log(tmp_path, 4, 9, tensorboard=False, speaks=True) as log,
    ):
        log.record(5, {"loss": 2.0})
    assert [(r["step"], r["loss"]) for r in logs.read(tmp_path)] == [(1, 1.0), (3, 1 / 3), (4, 0.25), (5, 2.0)]
    for place in range(0, len(whole) * 8, 7):  # any bit
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logs.Log(tmp_path, 4, 9, tensorboard=False, speaks=True).__exit__(None, None, None)


def test_a_run_that_ends_while_it_rewrites_its_log_loses_nothing(tmp_path, monkeypatch):
    """The log was emptied first and filled again: a kill in between lost all of it, though no checkpoint."""
    with logs.Log(tmp_path, 0, 9, tensorboard=False, speaks=True) as log:
        for step in range(1, 6):
            log.record(step, {"loss": float(step)})
    dumps, calls = json.dumps, itertools.count()

    def ended(*args, **kwargs):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return dumps(*args, **kwargs)

    monkeypatch.setattr(json, "dumps", ended)
    with pytest.raises(KeyboardInterrupt):
        logs.Log(tmp_path, 4, 9, tensorboard=False, speaks=True)
    assert [record["step"] for record in logs.read(tmp_path)] == [1, 2, 3, 4, 5]


@contextlib.contextmanager
def no_more_than(size):
    """Files of this process do not grow beyond ``size`` bytes, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_does_not_end_a_run_at_the_next_log_line(tmp_path):
    """It did, and a part of a line was left behind, which no later run could read."""
    with logs.Log(tmp_path, 0, 9, tensorboard=False, speaks=True) as log:
        for step in range(1, 3):
            log.record(step, {"loss": float(step), "grad_norm": 0.1})
        sizes = {name: (tmp_path / name).stat().st_size for name in ("metrics.jsonl", "metrics.csv")}
        with no_more_than(min(sizes.values()) + 7), pytest.warns(UserWarning, match="training goes on") as warned:
            log.record(3, {"loss": 3.0, "grad_norm": 0.1})
            log.record(4, {"loss": 4.0, "grad_norm": 0.1})
            log.say("a line")
            log.progress(4.0)
        assert len(warned) == 1
        assert {name: (tmp_path / name).stat().st_size for name in sizes} == sizes
        log.record(5, {"loss": 5.0, "grad_norm": 0.1})  # there is space again
    assert [record["step"] for record in logs.read(tmp_path)] == [1, 2, 5]
    assert [line.split(",")[0] for line in (tmp_path / "metrics.csv").read_text().splitlines()] == [
        "step", "1", "2", "5",
    ]  # fmt: skip


def test_a_run_begins_and_goes_on_with_a_full_disk(tmp_path):
    with no_more_than(0), pytest.warns(UserWarning, match="the records of this run cannot be written"):
        log = logs.Log(tmp_path, 0, 9, tensorboard=False, speaks=True)
        log.record(1, {"loss": 1.0})
    log.record(2, {"loss": 2.0})
    log.__exit__(None, None, None)
    assert [record["step"] for record in logs.read(tmp_path)] == [2]
    with no_more_than(3), pytest.warns(UserWarning, match="the records of this run cannot be written"):
        log = logs.Log(tmp_path, 2, 9, tensorboard=False, speaks=True)
    assert [record["step"] for record in logs.read(tmp_path)] == [2]  # what it had
    log.record(3, {"loss": 3.0})
    assert [record["step"] for record in logs.read(tmp_path)] == [2, 3]


def test_tensorboard_goes_on_after_a_full_disk(tmp_path):
    """Its writer does not live through one."""
    from torch.utils.tensorboard import SummaryWriter

    with logs.Log(tmp_path, 0, 9, tensorboard=True, speaks=True) as log:
        with pytest.MonkeyPatch.context() as patch, pytest.warns(UserWarning, match="training goes on"):
            patch.setattr(SummaryWriter, "add_scalar", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
            log.record(1, {"loss": 1.0})
        log.record(2, {"loss": 2.0})
    assert [record["step"] for record in logs.read(tmp_path)] == [1, 2]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


def test_a_terminal_that_is_gone_does_not_end_a_run(tmp_path, monkeypatch):
    with pytest.warns(UserWarning, match="messages of this run cannot be written"), open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        log = logs.Log(tmp_path, 0, 9, tensorboard=False, speaks=True)
        with log_lines():
            log.say("a line")
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()


def test_messages_are_records_of_a_logger_that_only_a_command_shows(tmp_path, capsys, caplog):
    caplog.set_level("INFO", "alto_distributed")
    with logs.Log(tmp_path, 0, 9, tensorboard=False, speaks=True) as log:
        log.say("in a program of one's own")
        assert [record.getMessage() for record in caplog.records] == ["in a program of one's own"]
        with log_lines(), log_lines():
            log.say("in a command")
            logging.getLogger("alto_distributed.pretrain.cli").warning("a warning")
    with logs.Log(tmp_path, 0, 9, tensorboard=False, speaks=False) as log, log_lines():
        log.say("on another rank")
    said = capsys.readouterr()
    assert said.out == "in a command\n"
    assert "a warning\n" in said.err
    assert "a warning" not in said.out
    assert len(caplog.records) == 1  # a command's lines do not go to handlers of the root as well
    assert logging.getLogger("alto_distributed").handlers == []


# -- launch scripts ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_bytes(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("script", ["torchrun", "mpirun", "slurm", "deepspeed"])
def test_every_launch_script_has_a_dry_run(script, data):
    more = {"DRY_RUN": "1", "PY": sys.executable, "GPUS": "8", "RANKS": "8"}
    launch = ["bash", f"launch/{script}.sh", "--config", "configs/gpt2-345m.yaml", f"data.directory={data}"]
    done = subprocess.run(launch, cwd=REPO, env=environment(**more), capture_output=True, text=True, check=False)
    assert done.returncode == ("NOT ENOUGH" in done.stdout), done.stderr  # 1: this machine is none for eight ranks
    first, *rest = done.stdout.splitlines()
    assert "alto_distributed pretrain --config configs/gpt2-345m.yaml" in first
    assert "4 micro x 128 accumulated x 8 data-parallel = 4096 samples" in "\n".join(rest)
    assert "the run takes 20,971,520,000" in "\n".join(rest)
    launch.append("training.global_batch=4095")
    done = subprocess.run(launch, cwd=REPO, env=environment(**more), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "training.global_batch=4095 is not a multiple" in done.stderr
