"""``alto``: its commands, what it says about a wrong one, and what a dry run checks."""

import json
import os
import re
import sys

import pytest
import torch

from alto_distributed import __main__ as program
from alto_distributed.errors import refused
from alto_distributed.pretrain import cli
from alto_distributed.pretrain.checkpoint import manifest
from alto_distributed.pretrain.checkpoint.changes import Change, check_changes, differences
from alto_distributed.pretrain.checkpoint.manager import with_new_settings
from alto_distributed.pretrain.cli import main
from alto_distributed.pretrain.compare import jobs, settings
from alto_distributed.pretrain.config import settings as config
from alto_distributed.pretrain.data import files
from alto_distributed.pretrain.metrics import Log
from alto_distributed.pretrain.optimizers import build_optimizer
from alto_distributed.pretrain.schedule import learning_rate
from alto_distributed.version import __version__
from tests.helpers.launcher import REPO
from tests.helpers.pretrain_runs import prepare_bytes

TINY = str(REPO / "configs/gpt2-tiny.yaml")
ZERO = "and this run has ZeRO stage 2 in bf16, which hands optimizers pieces of them"
WHOLE = "deepspeed.config= training.precision=fp32"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_bytes(tmp_path_factory.mktemp("data"))


def alto(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["alto", *words])
    program.main()


def dry(*words):
    main(["pretrain", *words, "--dry-run"])


def test_help_and_version_end_well(monkeypatch, capsys):
    alto(monkeypatch, "--version")
    assert capsys.readouterr().out == f"alto_distributed {__version__}\n"
    alto(monkeypatch, "--help")
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in (*program.COMMANDS, "doctor"))
    for command in program.COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0
        assert f"{command} " in capsys.readouterr().out


@pytest.mark.parametrize(("word", "hint"), [
    ("pretrian", "; did you mean 'pretrain'?"),
    ("docter", "; did you mean 'doctor'?"),
    ("xyz", "; see alto --help"),
])  # fmt: skip
def test_a_misspelt_command_is_told_with_the_nearest(word, hint, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        alto(monkeypatch, word, "--config", TINY)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"alto_distributed: there is no command or script {word}{hint}\n"


@pytest.mark.parametrize("order", [
    ["training.iterations=7", "--config", TINY, "training.seed=3", "--world", "2", "model.dropout=0.5", "{data}"],
    ["--world", "2", "{data}", "training.iterations=7", "--config", TINY],
])  # fmt: skip
def test_overrides_stand_anywhere(order, data, capsys):
    dry(*[word.format(data=f"data.directory={data}") for word in order], "schedule.warmup=1")
    said = capsys.readouterr().out
    assert "64 samples, 4,096 tokens a step, 7 steps" in said
    assert "the run takes 28,672, " in said
    assert "enough" in said.split("device", 1)[1]
    assert "at most 3 at a time" in said


@pytest.mark.parametrize(("words", "message"), [
    (["optimizer.options.alpha=-500"], "alpha=-500 is out of range"),
    (["--optimizer", "admw"], "did you mean 'adamw'?"),
    (["optimizer.options.kernel=foo"], "optimizer.options.kernel='foo' is not one of auto, torch, "),
    (["--optimizer", "lion", "--engine", "megatron"], "Megatron has no optimizer 'lion'"),
    (["--optimizer", "muon"], f"muon looks at whole parameters, {ZERO}. Add to the command: {WHOLE}"),
    (["--optimizer", "mars", "optimizer.lr=0", *WHOLE.split()], "optimizer.lr=0 is not possible with mars"),
    (["data.directory=/absent"], "/absent holds no prepared data; prepare some with"),
    (["model.sequence=400000"], "model.sequence=400000 needs 400001 tokens"),
    (["model.vocabulary=128"], "has token ids up to 256, and model.vocabulary=128"),
    (["deepspeed.config=/absent.json"], "deepspeed.config: /absent.json"),
    (["--world", "0"], "0 ranks (--world, --ranks): there must be between 1 and "),
    (["--word", "2"], "there is no option '--word'; did you mean '--world'?"),
    (["--world", "x"], "argument --world: invalid int value: 'x'; see python -m alto_distributed pretrain --help"),
])  # fmt: skip
def test_a_dry_run_refuses_what_the_run_would(words, message, data, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        dry("--config", TINY, f"data.directory={data}", *words)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("alto_distributed pretrain: ")
    assert message in line
    assert ended.value.code == 2
    assert not list(tmp_path.iterdir())


def test_a_dry_run_of_whole_parameters_takes_the_line_that_its_refusal_names(data, capsys):
    """An empty override was null, so the line could not be typed."""
    dry("--config", TINY, f"data.directory={data}", "--optimizer", "muon", *WHOLE.split())
    assert "muon, lr 0.0008, decay 0.01\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        dry("--config", TINY, "training.iterations=")
    assert "training.iterations='' should be a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(("what", "words"), [
    ("memory", ["model.hidden=65536"]),
    ("disk", ["checkpoints.keep=1000000000"]),
])  # fmt: skip
def test_a_dry_run_of_what_this_machine_cannot_hold_ends_with_1(what, words, data, capsys):
    words = ["--config", TINY, f"data.directory={data}", *words]
    with pytest.raises(SystemExit) as ended:
        dry(*words)
    said = capsys.readouterr()
    assert ended.value.code == 1
    assert "NOT ENOUGH" in said.out
    assert re.search(f"^alto_distributed pretrain: this machine has not enough .*{what}", said.err)
    assert len(said.err.splitlines()) == 1
    main(["pretrain", *words, "--check"])  # the run itself may be started
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("module", "words", "extra"), [
    ("wandb", ["logs.wandb=project"], "loggers"),
    ("pytorch_optimizer", ["--optimizer", "lion"], "pretrain"),
])  # fmt: skip
def test_a_dry_run_asks_for_packages_that_the_run_needs(module, words, extra, data, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit) as ended:
        dry("--config", TINY, f"data.directory={data}", *words)
    assert ended.value.code == 1
    assert f"{module} is not installed: pip install 'alto-distributed[{extra}]'" in capsys.readouterr().err


def test_a_dry_run_looks_at_the_checkpoint_that_the_run_would_go_on_from(data, tmp_path, capsys):
    words = ["--config", TINY, f"data.directory={data}", "--into", str(tmp_path)]
    run = config.load(TINY, [f"data.directory={data}"])
    step = tmp_path / "checkpoints" / "step-00000100"
    step.mkdir(parents=True)
    (step / "run.json").write_text(
        json.dumps({"step": 100, "settings": run.as_dict(), "data": files.fingerprint(data)})
    )
    entry = manifest.entry_of(step / "run.json", 0, {})
    manifest.write(step, manifest.Manifest(100, 1, manifest.versions(), {"run.json": entry}))
    dry(*words)
    assert f"goes on     from {step}\n" in capsys.readouterr().out
    dry(*words, "--resume-with", "training.iterations=300", "--resume-with", "optimizer.lr=0.01")
    assert (
        f"from {step}; optimizer.lr was 0.06, is 0.01; training.iterations was 200, is 300\n" in capsys.readouterr().out
    )
    for more, message in (
        (["training.seed=3"], "was written by a run with other settings: training.seed was 1234, is 3"),
        (["damaged"], "is damaged: run.json"),
    ):
        if more == ["damaged"]:
            (step / "run.json").write_text("")
        with pytest.raises(SystemExit) as ended:
            dry(*words, *[word for word in more if "=" in word])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(("words", "message"), [
    (["training.seed=3"], "--resume-with training.seed: a run does not change that on its way"),
    (["model.layers=3", "--world", "1"], "--resume-with model.layers: "),
    (["training.iteration=3"], "did you mean 'training.iterations'? (it may change: training.iterations, "),
    (["training.iterations=300"], "--resume-with: run has no checkpoint to go on from"),
])  # fmt: skip
def test_what_a_run_cannot_change_is_refused_by_name(words, message, data, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["pretrain", "--config", TINY, f"data.directory={data}", "--into", "run", "--resume-with", *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_changes_that_make_no_sense_are_refused():
    run = config.load(TINY, ["training.iterations=50", "optimizer.weight_decay=0"])
    with pytest.raises(ValueError, match="training.iterations=50: the run has done 60 steps already"):
        check_changes(run, [Change("training.iterations", 200, 50)], 60)
    with pytest.raises(ValueError, match="decay cannot be turned on or off on the way"):
        check_changes(run, [Change("optimizer.weight_decay", 1e-4, 0.0)], 10)
    check_changes(run, [Change("training.iterations", 200, 50)], 50)


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_RANK", "RANK"])
def test_a_message_is_said_once_under_other_launchers_than_torchrun(variable, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for rank, error in enumerate(["the same", "the same", "another"]):
        monkeypatch.setenv(variable, str(rank))
        refused("pretrain", ValueError(error))
    said = ["alto_distributed pretrain: the same", "alto_distributed pretrain: another"]
    assert capsys.readouterr().err.splitlines() == said
    monkeypatch.setenv(variable, "0")  # the next start by the same shell
    refused("pretrain", ValueError("the same"))
    assert capsys.readouterr().err.splitlines() == said[:1]
    monkeypatch.delenv(variable)
    refused("pretrain", ValueError("the same"))
    assert capsys.readouterr().err.splitlines() == said[:1]


def test_a_message_of_all_ranks_is_said_once(tmp_path, monkeypatch, capsys):
    for rank, error in enumerate(["the same", "the same", "another"]):
        (tmp_path / str(rank)).mkdir()
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank) / "error.json"))
        monkeypatch.setenv("RANK", str(rank))
        assert refused("pretrain", ValueError(error)).code == 2
    assert capsys.readouterr().err == "alto_distributed pretrain: the same\nalto_distributed pretrain: another\n"
    assert refused("pretrain", OSError("no space")).code == 1


def test_the_loss_is_shown_without_a_terminal(tmp_path, caplog):
    caplog.set_level("INFO", logger="alto_distributed")
    with Log(tmp_path, 0, 10, tensorboard=False, speaks=True) as log:
        log.record(5, {"loss": 2.5, "lr": 0.01, "tokens_per_second": 12345.6})
        log.record(5, {"valid_loss": 2.0})
    assert [record.message for record in caplog.records] == ["step 5: loss 2.5000, lr 0.01, 12,346 tokens/s"]


def test_a_comparison_states_each_rate_and_refuses_before_anything_trains(data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr("subprocess.run", lambda command, env, **_: started.append(env) or Ended())
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    compare = ["compare", "--config", TINY, f"data.directory={data}", "--ranks", "1", "--optimizers"]
    for wrong, message in (
        ("admw", "did you mean 'adamw'?"),
        ("adamw:betas=3", "optimizer.betas"),
        ("adam:lr=x", "lr"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*compare, "alto", wrong])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
        assert not started
    with pytest.raises(SystemExit, match="alto ended with status 9"):
        main([*compare, "alto", "adamw", "ademamix", "lion:lr=3e-4"])
    said = capsys.readouterr()
    assert re.search(r"^alto, lr 0.06, decay 0.0001, .* \(rate: gpt2-tiny.yaml\)$", said.out, re.M)
    assert "adamw, lr 0.0008, decay 0.01 (rate: a default)\n" in said.out
    assert "ademamix, lr 0.001, decay 0.01 (rate: a default)\n" in said.out
    assert "lion, lr 0.0003, decay 0.01 (rate: as set)\n" in said.out
    assert (
        "NOT A FAIR COMPARISON: the rate of alto, lion:lr=3e-4 was chosen for these settings, that of adamw, ademamix "
        "is a default: the paper's for GPT-2 at global batch 4096 (here: 64), or a library's."
    ) in said.err
    assert [env["OMP_NUM_THREADS"] for env in started] == [str(len(os.sched_getaffinity(0)))]  # one rank has all cores
    with pytest.raises(SystemExit):
        main([*compare, "adamw", "--optimizers", "lamb"])  # neither of them has a rate of its own
    assert "FAIR" not in capsys.readouterr().err


def test_what_is_said_of_one_optimizer_wins_over_what_is_said_of_all(data):
    both = ["--optimizers", "adamw:lr=1e-3,options.betas=[0.8,0.95]", "lamb", "optimizer.lr=5e-3"]
    command = cli._parser("alto")
    options = cli._parse(
        command, ["compare", "--config", TINY, *both, "optimizer.weight_decay=0.3", f"data.directory={data}"]
    )
    adamw, lamb = jobs(options)
    assert (adamw.run.optimizer.lr, lamb.run.optimizer.lr) == (1e-3, 5e-3)
    assert adamw.run.optimizer.options == {"betas": [0.8, 0.95]}
    assert adamw.run.optimizer.weight_decay == lamb.run.optimizer.weight_decay == 0.3
    assert adamw.directory == "adamw-lr=1e-3-options.betas=-0.8-0.95"
    # Its process reads the same words.
    again = cli._parse(command, ["pretrain", *adamw.words])
    assert settings(again) == adamw.run


class Ended:
    returncode = 9


def test_wsd_is_flat_and_then_falls_in_a_line(tmp_path):
    run = config.load(TINY, ["schedule={kind: wsd, warmup: 4, decay: 0.1, final: 0}", "training.iterations=100"])
    rates = [learning_rate(run, step) / run.optimizer.lr for step in range(100)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1, 1]
    assert set(rates[3:90]) == {1.0}
    assert rates[89:] == pytest.approx([1 - step / 10 for step in range(11)], abs=1e-12)
    # That it ends at 0 is its default, with the files of configs/ too; what a checkpoint recorded is something else.
    assert config.load(TINY, ["schedule.kind=wsd"]).schedule.final == 0
    assert config.load(TINY, ["schedule.kind=wsd", "schedule.final=0.1"]).schedule.final == 0.1
    assert config.load(TINY).schedule.final == 0.01
    recorded = {"schedule": {"kind": "wsd", "warmup": 4, "decay": 0.2}}
    assert with_new_settings(recorded)["schedule"]["final"] == 0.01


def test_ademamix_is_the_same_on_pieces_of_its_parameters():
    """What ZeRO cuts must not matter."""
    run = config.load(TINY, ["optimizer={name: ademamix, weight_decay: 0.1}"])
    generator = torch.Generator().manual_seed(0)
    start, grads = torch.randn(12, generator=generator), torch.randn(5, 12, generator=generator)
    results = []
    for size in (12, 5):
        params = [torch.nn.Parameter(piece.clone()) for piece in start.split(size)]
        optimizer = build_optimizer(run, [{"params": params, "weight_decay": 0.1}])
        for grad in grads:
            for param, piece in zip(params, grad.split(size), strict=True):
                param.grad = piece.clone()
            optimizer.step()
        results.append(torch.cat([param.detach() for param in params]))
    assert torch.equal(*results)
    assert not torch.equal(results[0], start)


def test_a_checkpoint_from_before_a_setting_existed_is_gone_on_from():
    saved, here = (config.load(TINY).as_dict() for _ in range(2))
    del saved["schedule"]["decay"]
    assert not list(differences(with_new_settings(saved), here))
    here["schedule"]["decay"] = 0.5
    assert list(differences(with_new_settings(saved), here)) == ["schedule.decay was 0.2, is 0.5"]
