"""The JSONs in configs/deepspeed: DeepSpeed accepts them, their numbers are the paper's, and they train."""

import json
import math
import re
from types import SimpleNamespace

import pytest

from alto_distributed import Hyperparameters, recipe
from tests.helpers.deepspeed_runs import CONFIGS, PROGRAMS, report_in, unsharded
from tests.helpers.processes import RUNNER, TORCHRUN, run

LARGE = sorted(CONFIGS.glob("gpt2-345m-*.json"))
TINY = sorted(CONFIGS.glob("tiny-*.json"))
TRAINER = sorted(CONFIGS.glob("trainer-*.json"))
PRETRAIN = sorted(CONFIGS.glob("pretrain-*.json"))  # see test_pretrain_deepspeed.py


def name_of(path):
    return path.stem


def load(path):
    return json.loads(path.read_text())


def as_deepspeed_reads(config, world, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    import deepspeed.comm
    from deepspeed.runtime.config import DeepSpeedConfig

    monkeypatch.setattr(deepspeed.comm, "get_rank", lambda *_: 0)
    return DeepSpeedConfig(config, mpu=SimpleNamespace(get_data_parallel_world_size=lambda: world))


def test_the_readme_comments_every_file_and_no_other():
    told = re.findall(r"^\| `([\w-]+\.json)` \|", (CONFIGS / "README.md").read_text(), re.M)
    assert sorted(told) == sorted(path.name for path in CONFIGS.glob("*.json"))
    assert len(LARGE) + len(TINY) + len(TRAINER) + len(PRETRAIN) == len(told) == 13


@pytest.mark.parametrize("path", LARGE, ids=name_of)
def test_gpt2_345m_is_the_papers(path, monkeypatch):
    config = as_deepspeed_reads(load(path), 8, monkeypatch)
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (4096, 4)
    assert config.gradient_accumulation_steps == 128
    assert config.gradient_clipping == 1.0
    assert config.optimizer_name.lower() == "alto"
    assert Hyperparameters(**config.optimizer_params) == Hyperparameters(**recipe(4096))
    assert config.scheduler_params["total_num_steps"] == 5000
    # 128 micro-batches are summed: in bf16 the last of them would hardly count.
    assert config.grad_accum_dtype == "fp32"

    stage = int(re.search(r"stage(\d)", path.stem)[1])
    assert config.zero_config.stage == stage
    assert config.float16_config.enabled == ("fp16" in path.stem)
    assert config.bfloat16_config.enabled == ("fp16" not in path.stem)
    if "fp16" in path.stem:
        assert config.float16_config.loss_scale == 0  # dynamic
    offload = [config.zero_config.offload_optimizer, config.zero_config.offload_param]
    devices = [None if o is None else o.device for o in offload]
    assert devices == (["cpu", "cpu" if stage == 3 else None] if "offload" in path.stem else [None, None])


@pytest.mark.parametrize("path", TINY, ids=name_of)
def test_tiny_is_the_papers_small_batch(path, monkeypatch):
    config = as_deepspeed_reads(load(path), 2, monkeypatch)
    assert config.gradient_accumulation_steps == 2
    params = config.optimizer_params
    assert Hyperparameters(**params) == Hyperparameters(**recipe(config.train_batch_size), lr=params["lr"])


@pytest.mark.parametrize("path", TRAINER, ids=name_of)
def test_trainer_finds_nothing_to_refuse(path):
    """Trainer fills in "auto" and compares the rest with its own arguments, which are Adam's."""
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    arguments = SimpleNamespace(
        world_size=8, per_device_train_batch_size=4, gradient_accumulation_steps=128, max_grad_norm=1.0, fp16=False,
        learning_rate=1e-2, weight_decay=1e-4, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, bf16=True,
        fp16_full_eval=False, bf16_full_eval=False, save_on_each_node=False,
    )  # fmt: skip

    def filled(content):
        trainers = HfTrainerDeepSpeedConfig(content)
        trainers.trainer_config_process(arguments)
        return trainers

    trainers = filled(load(path))
    assert trainers.mismatches == []
    assert Hyperparameters(**trainers.config["optimizer"]["params"]) == Hyperparameters(**recipe(4096))
    # What the README tells people not to write.
    for betas, said in (([0.99, 0.9, 0.99], "adam_beta1"), ("auto", None)):
        content = load(path)
        content["optimizer"]["params"]["betas"] = betas
        trainers = filled(content)
        if said:
            assert said in trainers.mismatches[0]
        else:
            assert Hyperparameters(**trainers.config["optimizer"]["params"]).betas == (0.99, 0.9, 0.999)


STEPS = 12
WRAPPERS = {1: "BF16_Optimizer", 2: "DeepSpeedZeroOptimizer", 3: "DeepSpeedZeroOptimizer_Stage3"}


@pytest.mark.slow
def test_they_train_on_two_ranks(tmp_path):
    """The tiny ones as they are; the large ones with another batch size and length of schedule.

    fp16 is left out: DeepSpeed does not offer it on this CPU.
    """
    paths = {path: path for path in TINY}
    for path in LARGE:
        if "fp16" not in path.stem:
            content = load(path)
            content.update(train_batch_size=32, train_micro_batch_size_per_gpu=8)
            content["scheduler"]["params"].update(total_num_steps=STEPS, warmup_num_steps=2)
            paths[path] = tmp_path / path.name
            paths[path].write_text(json.dumps(content))
    job = [str(PROGRAMS / "train_deepspeed.py"), "--steps", str(STEPS), "--deepspeed_config", *map(str, paths.values())]
    reports = report_in(run([*TORCHRUN, *RUNNER, *job]))["reports"]

    for path in TINY:
        report = reports[str(path)]
        assert report["optimizer"] == "ALTO"
        assert report["losses"][-1] < 0.3 < 3.0 < report["losses"][0]
        assert report["losses"] == pytest.approx(unsharded(path, STEPS), rel=1e-5), path.stem
    for path in (path for path in LARGE if path in paths):
        report = reports[str(paths[path])]
        assert (report["optimizer"], report["wrapper"]) == ("ALTO", WRAPPERS[load(path)["zero_optimization"]["stage"]])
        assert all(map(math.isfinite, report["losses"]))
        assert report["losses"][-1] < report["losses"][0] - 0.1, path.stem
        assert report["losses"] == pytest.approx(reports[str(paths[LARGE[0]])]["losses"], abs=0.02), path.stem
