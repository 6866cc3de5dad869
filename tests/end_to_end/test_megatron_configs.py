"""The argument files in configs/megatron: their numbers are the paper's, Megatron takes every flag, and they train.

Megatron-LM is not a package: ALTO_MEGATRON_LM names a tree of it (release core_v0.16.1, or main of August 2026), whose
own parser then reads the files. Without one, what can be known without it is tested.
"""

import json
import math
import os
import re
import subprocess
import sys

import pytest

from alto_distributed import Hyperparameters, recipe
from tests.helpers.launcher import REPO, environment

CONFIGS = REPO / "configs" / "megatron"
FILES = sorted(CONFIGS.glob("*.args"))
LARGE = [path for path in FILES if path.stem.startswith("gpt2-345m")]
TINY = CONFIGS / "gpt2-tiny-cpu.args"
GPUS = {"gpt2-345m": 4, "gpt2-345m-tp2": 4, "gpt2-345m-pp2": 4, "gpt2-tiny-cpu": 2}
TREE = os.environ.get("ALTO_MEGATRON_LM")
# Stand-ins for a GPU come before Megatron, so it is not imported here. Tensor parallelism asks for the variable.
ENVIRONMENT = environment(CUDA_DEVICE_MAX_CONNECTIONS="1")

needs_a_tree = pytest.mark.skipif(not TREE, reason="ALTO_MEGATRON_LM names no tree of Megatron-LM")


def name_of(path):
    return path.stem


def words_in(path):
    return [word for line in path.read_text().splitlines() if not line.startswith("#") for word in line.split()]


def settings_in(path):
    """{flag: its values}; a number of Python's where there is just one."""
    settings = {}
    for word in words_in(path):
        if word.startswith("--"):
            assert word not in settings, f"{word} stands there twice"
            values = settings[word] = []
        else:
            values.append(word)
    return {flag: values[0] if len(values) == 1 else values for flag, values in settings.items()}


def numbers_in(path, *flags):
    settings = settings_in(path)
    return tuple(float(settings[flag]) for flag in flags)


def python(source, *arguments):
    """The last line of a script's output, as JSON."""
    command = [sys.executable, "-c", source, *map(str, arguments)]
    done = subprocess.run(command, cwd=REPO, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


# -- the files by themselves -----------------------------------------------------------------------------


def test_the_readme_comments_every_file_and_no_other():
    told = re.findall(r"^\| `([\w-]+\.args)` \|", (CONFIGS / "README.md").read_text(), re.M)
    assert sorted(told) == [path.name for path in FILES]
    assert set(GPUS) == {path.stem for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_shell_makes_the_same_words_of_it(path):
    """``$(grep -v '^#' FILE)`` is the README's way; nothing in a file means anything else to a shell."""
    assert "$(grep -v '^#' configs/megatron/" in (CONFIGS / "README.md").read_text()
    words = words_in(path)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", word) for word in words), "and no path of any machine"
    said = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' $(grep -v '^#' {path.name})"],
        cwd=CONFIGS, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert said.stdout.split("\n") == [*words, ""]


def test_the_layouts_differ_in_nothing_else():
    """The tables in the README may say "the same"."""
    base = settings_in(CONFIGS / "gpt2-345m.args")
    for name, expected in {
        "gpt2-345m-tp2": {
            "--tensor-model-parallel-size": "2",
            "--sequence-parallel": [],
            "--make-vocab-size-divisible-by": "64",
        },
        "gpt2-345m-pp2": {"--pipeline-model-parallel-size": "2"},
    }.items():
        settings = settings_in(CONFIGS / f"{name}.args")
        assert base.keys() <= settings.keys()
        assert {k: v for k, v in settings.items() if base.get(k) != v} == expected


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_batch_divides_and_the_vocabulary_does_not_depend_on_the_layout(path):
    micro, batch = numbers_in(path, "--micro-batch-size", "--global-batch-size")
    tensor, pipeline = numbers_in(path, "--tensor-model-parallel-size", "--pipeline-model-parallel-size")
    data = GPUS[path.stem] / tensor / pipeline
    assert data >= 2, "the distributed optimizer has something to distribute"
    accumulated = batch / (micro * data)
    assert accumulated == int(accumulated) > 0
    comment = re.search(r"batch (\d+) = (\d+) .*?x (\d+) x (\d+) accumulated", path.read_text().replace("\n# ", " "))
    assert tuple(map(int, comment.groups())) == (batch, data, micro, accumulated), "the file's first lines say so"

    divisor = numbers_in(path, "--make-vocab-size-divisible-by")[0] * tensor
    tokens, rows = (128, 128) if path == TINY else (50257, 50304)
    assert math.ceil(tokens / divisor) * divisor == rows
    if path == TINY:
        (divisor,) = numbers_in(path, "--make-vocab-size-divisible-by")
        assert rows % (2 * divisor) == 0, "also with TP 2, as its comment says"


@pytest.mark.parametrize("path", LARGE, ids=name_of)
def test_gpt2_345m_is_the_papers(path):
    """Appendix on GPT: layers, widths, batches, clipping, iterations, seed and rate; "mixed precision"."""
    shape = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--max-position-embeddings")
    assert numbers_in(path, *shape) == (24, 1024, 16, 1024, 1024)
    run = ("--micro-batch-size", "--global-batch-size", "--train-iters", "--seed", "--clip-grad")
    assert numbers_in(path, *run) == (4, 4096, 5000, 1234, 1.0)
    assert hyperparameters(path) == Hyperparameters(**recipe(4096))
    settings = settings_in(path)
    assert "--bf16" in settings
    assert "--accumulate-allreduce-grads-in-fp32" in settings  # by itself with bf16, not with fp16
    assert settings["--lr-decay-iters"] == settings["--train-iters"]


@pytest.mark.parametrize("path", LARGE, ids=name_of)
def test_gpt2_345m_has_no_padding_between_its_buckets(path):
    """So that megatron-core 0.16.1 does not corrupt its fully reshardable checkpoints (see megatron/formats.py).

    It fills buckets up to a multiple of 128 and of the number of data-parallel ranks.
    """
    assert "--dist-ckpt-optim-fully-reshardable" in settings_in(path)
    hidden, length, tensor = map(int, numbers_in(path, "--hidden-size", "--seq-length", "--tensor-model-parallel-size"))
    divided = [50304 * hidden, 3 * hidden * hidden, 3 * hidden, hidden * hidden, 4 * hidden * hidden, 4 * hidden]
    sizes = [size // tensor for size in divided] + [hidden, length * hidden]
    for ranks in (2, 4, 8, 128):
        assert all(size % math.lcm(ranks, 128) == 0 for size in sizes)


def test_tiny_is_the_papers_small_batch():
    ours = hyperparameters(TINY)
    assert ours == Hyperparameters(**recipe(32), lr=ours.lr)


def hyperparameters(path):
    settings = settings_in(path)
    assert settings["--optimizer"] == "alto"
    lr, decay, alpha = numbers_in(path, "--lr", "--weight-decay", "--alto-alpha")
    betas = tuple(map(float, settings["--alto-betas"]))
    ours = {flag for flag in settings if "alto-" in flag}
    assert ours == {"--alto-alpha", "--alto-betas"}, "a flag this test does not know"
    return Hyperparameters(lr=lr, weight_decay=decay, alpha=alpha, betas=betas)


# -- our flags, by our parser ----------------------------------------------------------------------------

OUR_FLAGS = """
import argparse, dataclasses, json, sys
from scripts.megatron_on_cpu import install
install()
from alto_distributed.megatron import AltoOptimizerConfig, command_line

def megatrons(parser):
    parser.add_argument("--optimizer", choices=["adam"])
    return parser

def parsed(words):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    args, rest = command_line._add_megatron_arguments(megatrons, parser).parse_known_args(words)
    config = AltoOptimizerConfig(optimizer=args.optimizer, **command_line._given(args))
    return [rest, {name: value for name, value in dataclasses.asdict(config).items() if name.startswith("alto_")}]

print(json.dumps([parsed(words) for words in json.loads(sys.argv[1])]))
"""


def test_our_flags_make_a_config():
    outcomes = python(OUR_FLAGS, json.dumps([words_in(path) for path in FILES]))
    for path, (rest, config) in zip(FILES, outcomes, strict=True):
        assert not [word for word in rest if "alto" in word], "flags that we do not have"
        meant = hyperparameters(path)
        assert (config["alto_alpha"], tuple(config["alto_betas"])) == (meant.alpha, meant.betas)
        assert (config["alto_layerwise"], config["alto_adopt"]) == ("decayed", False)


# -- all flags, by Megatron's ----------------------------------------------------------------------------

ALL_FLAGS = """
import json, os, sys
tree, given = sys.argv[1], json.loads(sys.argv[2])
sys.path.insert(0, tree)
from scripts.megatron_on_cpu import install_for_pretraining
install_for_pretraining()
import alto_distributed
alto_distributed.register()
from megatron.training import arguments
from megatron.training.training import get_megatron_optimizer_config

assert arguments.__file__.startswith(tree), arguments.__file__

def parsed(world, words):
    os.environ["WORLD_SIZE"] = str(world)
    sys.argv = ["pretrain_gpt.py", *words]
    args = arguments.parse_args()
    arguments.validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
    config = get_megatron_optimizer_config(args)[0]
    ours = [config.lr, config.weight_decay, config.alto_alpha, list(config.alto_betas), type(config).__name__]
    plain = {name: value for name, value in vars(args).items() if isinstance(value, (bool, int, str))}
    return {**plain, "config": ours}

outcomes = {name: parsed(world, words) for name, (world, words) in given.items()}
try:
    parsed(4, [*given["gpt2-345m"][1], "--alto-alhpa", "-5"])
except SystemExit as refused:
    outcomes["a slip"] = refused.code
print()
print(json.dumps(outcomes))
"""


@needs_a_tree
def test_megatron_takes_every_flag():
    """Parsed, validated and made into a config by the tree's own functions."""
    user = ["--data-path", "data", "--vocab-file", "vocab.json", "--merge-file", "merges.txt", "--save", "checkpoints"]
    given = {path.stem: (GPUS[path.stem], words_in(path) + ([] if path == TINY else user)) for path in FILES}
    outcomes = python(ALL_FLAGS, TREE, json.dumps(given))
    assert outcomes["a slip"] == 2, "argparse's own exit"
    for path in FILES:
        args, meant = outcomes[path.stem], hyperparameters(path)
        ours = [meant.lr, meant.weight_decay, meant.alpha, list(meant.betas), "AltoOptimizerConfig"]
        assert args["config"] == ours
        assert args["optimizer"] == "alto"
        assert args["use_distributed_optimizer"] is True  # main makes another one of it for names it does not know
        assert args["use_precision_aware_optimizer"] is False
        assert args["dist_ckpt_optim_fully_reshardable"] is True
        assert args["ckpt_format"] == "torch_dist"
        assert args["untie_embeddings_and_output_weights"] is False
        assert args["check_for_nan_in_loss_and_grad"] is True  # bf16 has no scaler that would skip the step
        assert args["bf16"] is (path != TINY)
        assert args["accumulate_allreduce_grads_in_fp32"] is (path != TINY)
        tensor, pipeline = args["tensor_model_parallel_size"], args["pipeline_model_parallel_size"]
        assert (f"-tp{tensor}" in path.stem, f"-pp{pipeline}" in path.stem) == (tensor > 1, pipeline > 1)
        assert args["sequence_parallel"] is (tensor > 1)
        assert args["data_parallel_size"] == GPUS[path.stem] // tensor // pipeline


# -- and they train --------------------------------------------------------------------------------------


def train(path, directory, *more):
    """Two CPU ranks; returns the losses by iteration and the log."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(REPO / "scripts" / "megatron_on_cpu.py"), f"{TREE}/pretrain_gpt.py", *words_in(path)]
    command += ["--save", str(directory / "saved"), "--load", str(directory / "saved"), "--log-interval", "1", *more]
    done = subprocess.run(command, cwd=directory, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-4000:]
    found = re.findall(r"iteration +(\d+)/ .*? lm loss: ([\d.E+-]+)", log)
    return {int(iteration): float(loss) for iteration, loss in found}, log


@needs_a_tree
@pytest.mark.slow
def test_the_tiny_one_trains(tmp_path):
    losses, log = train(TINY, tmp_path)
    assert sorted(losses) == list(range(1, 41))
    assert losses[1] == pytest.approx(math.log(128), abs=0.1)
    assert losses[40] < 3.7
    assert "saved checkpoint from iteration      40" in log


@needs_a_tree
@pytest.mark.slow
def test_a_run_of_the_large_ones_moves_from_layout_to_layout(tmp_path):
    """With a small model: trained data parallel, gone on with tensor parallel, then as a pipeline; and never moved.

    Everything the files say about precision, overlap, vocabulary and checkpoints is kept.
    """
    tiny = settings_in(TINY)
    smaller = {flag: tiny[flag] for flag in (
        "--num-layers", "--num-attention-heads", "--seq-length", "--max-position-embeddings", "--hidden-dropout",
        "--attention-dropout", "--mock-data", "--tokenizer-type", "--vocab-size", "--micro-batch-size",
        "--global-batch-size", "--distributed-backend", "--transformer-impl", "--use-cpu-initialization",
        "--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-bias-gelu-fusion",
        "--no-bias-dropout-fusion", "--no-persist-layer-norm",
    )}  # fmt: skip
    # As in the large model, every size is a multiple of 128: see the padding between buckets above.
    smaller |= {"--hidden-size": "128", "--train-iters": "12", "--lr-decay-iters": "12", "--lr-warmup-iters": "2"}
    smaller |= {"--eval-iters": "0"}
    more = [word for flag, value in smaller.items() for word in (flag, *([value] if isinstance(value, str) else value))]

    moved, stayed = {}, {}
    for directory, losses, names in (
        (tmp_path / "moved", moved, ("gpt2-345m", "gpt2-345m-tp2", "gpt2-345m-pp2")),
        (tmp_path / "stayed", stayed, ("gpt2-345m",)),
    ):
        directory.mkdir()
        for i, name in enumerate(names):
            end = "4" if len(names) > 1 else "12"
            found, log = train(CONFIGS / f"{name}.args", directory, *more, "--exit-interval", end)
            losses.update(found)
            assert (i > 0) == ("successfully loaded checkpoint" in log)
    assert sorted(moved) == sorted(stayed) == list(range(1, 13))
    assert stayed[12] < stayed[1] - 0.05
    for first in (5, 9):  # Megatron's log does not start afresh after the first line of a process: it shows the mean
        stayed[first + 1] = (stayed[first] + stayed[first + 1]) / 2
    for iteration in moved:  # bf16 rounds what each layout adds in another order
        assert moved[iteration] == pytest.approx(stayed[iteration], abs=5e-3), iteration
