"""Megatron's own scripts with ``--optimizer alto``, unchanged, each in fresh processes on the CPU.

``programs/train_megatron.py`` needs megatron-core alone. The tests of Megatron-LM's command line run its real
``pretrain_gpt.py``, and want a tree of it:

    ALTO_MEGATRON_LM=/path/to/Megatron-LM pytest tests/end_to_end/test_megatron_command_line.py

That of Megatron-Bridge's ``setup_optimizer`` also wants ALTO_MEGATRON_BRIDGE=/path/to/Megatron-Bridge.
"""

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader

from tests.helpers.launcher import REPO, environment
from tests.helpers.processes import TORCHRUN, run

RUNNER = str(REPO / "scripts" / "megatron_on_cpu.py")
TREE = os.environ.get("ALTO_MEGATRON_LM")
real_tree = pytest.mark.skipif(not TREE, reason="ALTO_MEGATRON_LM does not name a Megatron-LM tree")
WORLD = "--nproc-per-node={}".format


# -- a script that knows nothing of ALTO -------------------------------------------------------------------


def trained(world, optimizer, steps=20):
    script = [RUNNER, str(REPO / "tests/end_to_end/programs/train_megatron.py"), "--optimizer", optimizer]
    output = run([*TORCHRUN[:-1], WORLD(world), *script, "--lr", "0.1", "--steps", str(steps)])
    *losses, report = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert [line["step"] for line in losses] == list(range(steps))
    return [line["loss"] for line in losses], report


def test_a_script_that_passes_its_optimizers_name_on_trains_with_alto():
    losses, report = trained(2, "alto")
    assert (report["optimizer"], report["wrapper"], report["world"]) == ("ALTO", "AltoDistributedOptimizer", 2)
    assert 0.4 < report["share"] < 0.6  # of the model's elements; each rank steps its own
    assert losses[-1] < 2.0 < 2.8 < losses[0]
    alone, report = trained(1, "alto")
    assert (report["world"], report["share"]) == (1, 1.0)
    assert losses == pytest.approx(alone, rel=1e-4)


# -- what of Megatron-LM is patched, and when --------------------------------------------------------------

#: As much of ``megatron.training`` as there is to patch, for what the real one cannot show.
MINIATURE = {
    "arguments": """
def add_megatron_arguments(parser):
    parser.add_argument("--optimizer", default="adam", choices=["adam", "sgd"])
    parser.add_argument("--use-precision-aware-optimizer", action="store_true", help="saves 50% of the memory")
    return parser

def validate_args(args, defaults={}):
    seen.append(("validated", args.optimizer))
    _print_args("arguments", args)
    if defaults:
        raise AssertionError("as Megatron does")

def _print_args(title, args):
    seen.append(("printed", args.optimizer))

seen = []
""",
    "initialize": "from megatron.training.arguments import validate_args",
    "training": """
from megatron.training.arguments import validate_args
from megatron.core.optimizer import OptimizerConfig

def get_megatron_optimizer_config(args):
    if args.optimizer not in ("adam", "sgd"):
        raise ValueError("Invalid optimizer type!")
    given = {"use_precision_aware_optimizer": args.use_precision_aware_optimizer}
    return OptimizerConfig(optimizer=args.optimizer, lr=0.25, clip_grad=0.75, **given), {"overrides": 1}
""",
    "elsewhere": "from megatron.training.training import get_megatron_optimizer_config",
}

USE_THE_MINIATURE = """
import argparse, contextlib, importlib, io, itertools, sys
from scripts.megatron_on_cpu import install
install()
import alto_distributed
from alto_distributed import import_hooks as registration

NAMES = ["arguments", "initialize", "training", "elsewhere"]

def load(names):
    return [importlib.import_module(f"megatron.training.{name}") for name in names]

def forget():
    for name in [name for name in sys.modules if name.startswith("megatron.training")]:
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, registration._Frameworks)]

def use(line):
    name = line.split()[1]
    arguments, initialize, training, elsewhere = load(NAMES)
    args = arguments.add_megatron_arguments(argparse.ArgumentParser()).parse_args(line.split())
    for validate in (arguments.validate_args, initialize.validate_args, training.validate_args):
        arguments.seen.clear()
        validate(args)
        assert arguments.seen == [("validated", "adam"), ("printed", name)], arguments.seen
        try:
            validate(args, {"some": "defaults"})
        except AssertionError as error:
            assert str(error) == "as Megatron does"
        assert args.optimizer == name
    for function in (training.get_megatron_optimizer_config, elsewhere.get_megatron_optimizer_config):
        config, overrides = function(args)
        assert type(config) is sys.modules["alto_distributed.megatron"].AltoOptimizerConfig
        assert (config.optimizer, config.lr, config.clip_grad, overrides) == (name, 0.25, 0.75, {"overrides": 1})
    return config

orders = 0
for order in itertools.permutations(NAMES):
    for before in range(len(NAMES) + 1):  # how many of them are imported before ALTO comes
        forget()
        load(order[:before])
        alto_distributed.register()
        load(order[before:])
        alto_distributed.register()
        config = use("--optimizer alto --alto-alpha -2 --alto-eps 1e-7 1e-8 1e-9 --no-alto-bias-correction")
        assert (config.alto_alpha, config.alto_eps, config.alto_bias_correction) == (-2.0, (1e-7, 1e-8, 1e-9), False)
        orders += 1
assert use("--optimizer alto --alto-eps 1e-7").alto_eps == 1e-7
from alto_distributed.megatron.config import check
assert check(use("--optimizer alto")).betas == (0.99, 0.9, 0.99)
assert check(use("--optimizer lamb --alto-betas 0.99 0.9 0.99")).betas == (0.99, 0.9, 0.99)
config = use("--optimizer lamb --alto-eps 1e-7")
found = check(config)
assert (config.optimizer, found.alpha, found.betas, found.eps) == ("lamb", 0.0, (0.99, 0.9, 0.999), (1e-7, 0.0, 0.0))

def refused(do, says):
    try:
        do()
    except ValueError as error:
        assert says in str(error), error
    else:
        raise SystemExit(f"not refused: {says}")

arguments, _, training, _ = load(NAMES)
def parse(line):
    return arguments.add_megatron_arguments(argparse.ArgumentParser()).parse_args(line.split())
for do in (arguments.validate_args, training.get_megatron_optimizer_config):
    line = "--optimizer sgd --alto-adopt --alto-kernel torch"
    refused(lambda: do(parse(line)), "--alto-kernel, --alto-adopt would have no effect with --optimizer sgd")
refused(lambda: arguments.validate_args(parse("--optimizer alto --alto-eps 1 2")), "three")
refused(lambda: arguments.validate_args(parse("--optimizer lamb --alto-alpha -2")), "no effect with --optimizer lamb")
refused(lambda: arguments.validate_args(parse("--optimizer alto --alto-alpha 100.5")), "alpha=100.5 is out of range")
for name, says in {"use_mup": "leave out --use-mup", "fp4_param_gather": "leave out --fp4-param-gather"}.items():
    args = parse("--optimizer alto")
    setattr(args, name, True)
    arguments.seen.clear()
    refused(lambda: arguments.validate_args(args), says)
    assert not arguments.seen, "before Megatron's own validation"
help = arguments.add_megatron_arguments(argparse.ArgumentParser()).format_help()
assert "saves 50% of the memory" in help and "--alto-alpha" in help
assert parse("--optimizer LAMB").optimizer == "lamb" and parse("--optimizer Alto").optimizer == "alto"

def ends(do, says):
    words = io.StringIO()
    try:
        with contextlib.redirect_stderr(words):
            do()
    except SystemExit:
        assert says in words.getvalue(), words.getvalue()
    else:
        raise SystemExit(f"not refused: {says}")

ends(lambda: parse("--optimizer Sgd"), "invalid choice: 'Sgd'")
ends(lambda: parse("--optimizer alto --alto-alhpa -5"), "--alto-alhpa; did you mean '--alto-alpha'?")
parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
ends(lambda: parser.parse_known_args(["--alto-layer-wise=all"]), "did you mean '--alto-layerwise'?")
assert parser.parse_known_args(["--another", "flag"])[1] == ["--another", "flag"]

import torch
aware = parse("--optimizer alto --use-precision-aware-optimizer")
aware.exp_avg_dtype = torch.bfloat16  # as Megatron's own validation leaves it
arguments.validate_args(aware)
config, _ = training.get_megatron_optimizer_config(aware)
assert (config.use_precision_aware_optimizer, config.exp_avg_dtype) == (True, torch.bfloat16)
aware.exp_avg_dtype = torch.uint8
refused(lambda: arguments.validate_args(aware), "exp_avg_dtype=fp8 is not supported; set it to fp32 or bf16")

# Another Megatron-LM: left as it is, and refused if the command line asks for ALTO.
LINE = sys.argv
for name, spoiled in {
    "_print_args": "megatron.training.arguments has no function _print_args",
    "validate_args": "megatron.training.arguments.validate_args does not take (args, defaults)",
}.items():
    forget()
    arguments, = load(["arguments"])
    if name == "_print_args":
        del arguments._print_args
    else:
        arguments.validate_args = lambda args: None
    before = dict(vars(arguments))
    sys.argv = [*LINE, "--optimizer", "adam", "--name", "alto"]
    alto_distributed.register()
    assert vars(arguments) == before
    registration._unregistered.clear()
    for asking in (["--optimizer", "alto"], ["--optimizer=ALTO"]):
        sys.argv = [*LINE, *asking]
        refused(alto_distributed.register, spoiled)
        registration._unregistered.clear()
    assert vars(arguments) == before
forget()
training = load(NAMES)[2]
training.get_megatron_optimizer_config = lambda args, more: None
refused(alto_distributed.register, "get_megatron_optimizer_config does not take (args)")
from alto_distributed.megatron import command_line
print("ORDERS", orders, "FLAGS", *command_line._FLAGS)
"""


def test_every_order_of_imports_is_patched_whole_or_not_at_all(tmp_path):
    folder = tmp_path / "megatron" / "training"
    folder.mkdir(parents=True)
    for name, source in MINIATURE.items():
        (folder / f"{name}.py").write_text(source)
    output = run([sys.executable, "-c", USE_THE_MINIATURE], PYTHONPATH=f"{REPO}{os.pathsep}{tmp_path}")
    orders, flags = re.search("ORDERS (.*) FLAGS (.*)", output).groups()
    assert orders == "120"
    assert flags.split() == FLAGS, "the tests with a tree compare --help with these"
    page = (REPO / "configs" / "megatron" / "README.md").read_text()
    assert sorted(re.findall(r"^\| `(--[\w-]+)` \| `alto_", page, re.M)) == sorted(FLAGS)


# -- Megatron-LM's command line ----------------------------------------------------------------------------

ITERATIONS, SAVED_AT = 24, 12
VOCABULARY = 16
MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16"
DATA = f"--mock-data --tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1} --make-vocab-size-divisible-by 16"
BATCH = f"--micro-batch-size 16 --global-batch-size 32 --train-iters {ITERATIONS} --seed 1"
RATE = "--lr 0.1 --min-lr 0.01 --lr-decay-iters 100 --weight-decay 0.01 --clip-grad 1.0"
LOG = "--log-interval 1 --eval-iters 0 --eval-interval 1000"
# On the CPU: no kernels of GPUs, and no dropout, whose numbers would come from the generator that data loaders use.
CPU = "--distributed-backend gloo --transformer-impl local --use-cpu-initialization --num-workers 0"
CPU += " --no-bias-gelu-fusion --no-bias-dropout-fusion --no-masked-softmax-fusion --no-rope-fusion"
CPU += " --no-gradient-accumulation-fusion --no-persist-layer-norm --attention-dropout 0 --hidden-dropout 0"
JOB = " ".join([MODEL, DATA, BATCH, RATE, LOG, CPU, "--use-distributed-optimizer"])
ALTO = "--optimizer alto --alto-alpha -5 --alto-betas 0.99 0.9 0.99 --alto-eps 1e-6 --alto-layerwise decayed"


def command(*more, job=JOB):
    """Megatron-LM's own script on two ranks."""
    return [*TORCHRUN, RUNNER, str(Path(TREE) / "pretrain_gpt.py"), *job.split(), *ALTO.split(), *more]


def losses_in(log):
    """By iteration."""
    found = re.findall(r"iteration +(\d+)/ +\d+ \|.*?lm loss: (\S+) \|", log)
    return {int(iteration): float(loss) for iteration, loss in found}


def pretrain(*more, **options):
    """Losses by iteration, and the log."""
    log = run(command(*more, **options), timeout=900)
    return losses_in(log), log


def numbers_in(log, name):
    """What the lines of iterations say under some name."""
    return [float(value) for value in re.findall(rf"\| +{name}: +(\S+) \|", log)]


@pytest.mark.slow
@real_tree
def test_pretrain_gpt_trains_saves_and_resumes(tmp_path):
    shown = ["--alto-diagnostics-every", "8", "--tensorboard-dir", str(tmp_path / "tensorboard")]
    whole, log = pretrain("--save", str(tmp_path), "--save-interval", str(SAVED_AT), *shown)
    readings = re.findall(r"\[ALTO\] iteration +(\d+) \| trust_ratio min: \S+ \| trust_ratio median", log)
    assert readings == ["8", "16", "24"]  # by one rank, and by the others not at all
    written = b"".join(file.read_bytes() for file in (tmp_path / "tensorboard").iterdir())
    assert written.count(b"alto/trust_ratio_median") >= 3
    assert re.search(r"^ +optimizer \.+ alto$", log, re.M)  # and not what Megatron checks it as
    assert re.search(r"^ +use_distributed_optimizer \.+ True$", log, re.M)
    assert list(whole) == list(range(1, ITERATIONS + 1))
    assert whole[1] == pytest.approx(math.log(VOCABULARY), abs=0.1)
    assert whole[ITERATIONS] < 1.5

    saved = FileSystemReader(tmp_path / f"iter_{SAVED_AT:07}").read_metadata().state_dict_metadata
    states = [[name for name in saved if name.endswith(state)] for state in ("grad_ema", "exp_avg", "exp_avg_sq")]
    assert len({len(names) for names in states}) == 1
    assert states[0]

    resumed, _ = pretrain("--load", str(tmp_path), "--ckpt-step", str(SAVED_AT))
    assert list(resumed) == list(range(SAVED_AT + 1, ITERATIONS + 1))
    # The second loss that Megatron logs is its mean with the first: it does not clear the sum after the first.
    first = SAVED_AT + 1
    resumed[first + 1] = 2 * resumed[first + 1] - resumed[first]
    assert resumed == pytest.approx({step: whole[step] for step in resumed}, rel=1e-6)


#: Without biases: those of experts do not fit another expert parallelism in Megatron itself, with any optimizer.
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none --disable-bias-linear"
EXPERTS += " --dist-ckpt-optim-fully-reshardable"


@pytest.mark.slow
@real_tree
@pytest.mark.parametrize(("saved", "resumed"), [(2, 1), (1, 2)])
def test_pretrain_gpt_goes_to_another_expert_parallelism(tmp_path, saved, resumed):
    """EP 2 has two optimizers, EP 1 one; the losses are those of the run that never stopped."""

    def job(parallelism):
        return f"{JOB} {EXPERTS} --expert-model-parallel-size {parallelism}"

    whole, _ = pretrain("--save", str(tmp_path), "--save-interval", str(SAVED_AT), job=job(saved))
    assert list(whole) == list(range(1, ITERATIONS + 1))
    assert whole[ITERATIONS] < whole[SAVED_AT] - 0.1
    # core_v0.16.1 has random states for one expert parallelism alone; nothing here draws from them.
    found, _ = pretrain("--load", str(tmp_path), "--ckpt-step", str(SAVED_AT), "--no-load-rng", job=job(resumed))
    assert list(found) == list(range(SAVED_AT + 1, ITERATIONS + 1))
    found[SAVED_AT + 2] = 2 * found[SAVED_AT + 2] - found[SAVED_AT + 1]  # as above
    assert found == pytest.approx({step: whole[step] for step in found}, rel=5e-6)


LOOK_AT_ARGUMENTS = """
import argparse, contextlib, io, sys
from scripts.megatron_on_cpu import install_for_pretraining
install_for_pretraining()
import alto_distributed
alto_distributed.register()
sys.path.insert(0, {tree!r})
from megatron.training import arguments, initialize, training
from alto_distributed.megatron import AltoOptimizerConfig
JOB = {job!r}

def parse(line):
    sys.argv = ["pretrain_gpt.py", *line.split()]
    return arguments.parse_args()

def validated(line):
    args = parse(JOB + " " + line)
    with contextlib.redirect_stdout(io.StringIO()):
        arguments.validate_args(args)
    return args

def config_of(line):
    args = validated(line)
    assert args.use_distributed_optimizer and not getattr(args, "use_layer_wise_distributed_optimizer", False)
    return args, training.get_megatron_optimizer_config(args)

args, (config, overrides) = config_of({alto!r} + " --alto-diagnostics-every 3")
assert args.optimizer == config.optimizer == "alto"
assert type(config) is AltoOptimizerConfig
assert (config.alto_alpha, config.alto_betas, config.alto_eps) == (-5.0, (0.99, 0.9, 0.99), 1e-6)
assert (config.alto_layerwise, config.alto_diagnostics_every) == ("decayed", 3)
assert (config.lr, config.weight_decay, config.clip_grad, config.use_distributed_optimizer) == (0.1, 0.01, 1.0, True)
args, (adam, adams_overrides) = config_of("--optimizer adam")
assert not isinstance(adam, AltoOptimizerConfig)
assert not [name for name in vars(args) if name.startswith("alto")]
assert overrides == adams_overrides

def refused(line, error, says):
    words = io.StringIO()
    try:
        with contextlib.redirect_stderr(words):
            validated(line)
    except error as problem:
        assert says in str(problem) + words.getvalue(), (says, str(problem), words.getvalue())
    else:
        raise AssertionError(f"not refused: {{line}}")

refused("--alto-alpha -5", ValueError, "--alto-alpha would have no effect with --optimizer adam")
refused("--optimizer sgd --no-alto-bias-correction", ValueError, "--no-alto-bias-correction would have no effect")
refused("--optimizer alto --alto-alpha -500", ValueError, "alpha=-500 is out of range")
refused("--optimizer alto --alto-betas 0.9 0.99 1", ValueError, "beta3")
refused("--optimizer alto --alto-eps 1e-6 1e-6", ValueError, "one number")
refused("--optimizer alto --alto-layerwise decaid", SystemExit, "argument --alto-layerwise: invalid choice: 'decaid'")
refused("--optimizer alto --alto-betas 0.9 0.99", SystemExit, "argument --alto-betas: expected 3 arguments")
refused("--optimizer alto --alto-alhpa 1", SystemExit, "arguments: --alto-alhpa; did you mean '--alto-alpha'?")
refused("--optimizer altoo", SystemExit, "argument --optimizer: invalid choice: 'altoo'")
args = parse(JOB + " --optimizer alto --num-attention-heads 5")
try:
    arguments.validate_args(args)
except AssertionError:
    assert args.optimizer == "alto", "the mask stayed on"
else:
    raise AssertionError("Megatron accepts 5 heads for 32 numbers")

parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
assert "usage:" in parser.format_help()  # also where one of Megatron's own texts has a bare %
assert parse(JOB + " --optimizer ALTO").optimizer == "alto"
(group,) = [group for group in parser._action_groups if group.title == "ALTO"]
assert [action.option_strings[0] for action in group._group_actions] == {flags!r}
assert "(default: 0.99 0.9 0.99)" in group._group_actions[1].help
print("AS IT SHOULD BE")
"""
FLAGS = ["--alto-alpha", "--alto-betas", "--alto-eps", "--alto-layerwise", "--alto-trust-clip"]
FLAGS += ["--alto-vector-lr", "--alto-embeddings"]
FLAGS += ["--no-alto-bias-correction", "--alto-kernel", "--alto-diagnostics-every", "--alto-skip-nonfinite"]
FLAGS += ["--alto-grad-ema-dtype", "--alto-exp-avg-dtype", "--alto-adopt"]


@pytest.mark.slow
@real_tree
def test_the_flags_of_the_real_megatron_lm_are_what_they_should_be():
    program = LOOK_AT_ARGUMENTS.format(tree=TREE, job=JOB, alto=ALTO, flags=FLAGS)
    assert "AS IT SHOULD BE" in run([sys.executable, "-c", program])


@pytest.mark.slow
@real_tree
def test_help_goes_to_the_script_and_shows_the_flags():
    command = [sys.executable, RUNNER, str(Path(TREE) / "pretrain_gpt.py"), "--help"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    ours = done.stdout.split("\nALTO:\n")[1]
    assert re.findall(r"^  (--\S+)", ours, re.M)[: len(FLAGS)] == FLAGS
    assert re.search(r"--optimizer \{[^}]*,alto,lamb\}", done.stdout)


@pytest.mark.slow
@real_tree
def test_yaml_cfg_fails_alike_with_adam(tmp_path):
    """It replaces all flags by another set, which Megatron-LM itself no longer takes."""
    example = Path(TREE) / "examples" / "gpt3" / "gpt_config.yaml"
    if not example.exists():
        pytest.skip("main has no example of it")
    settings = re.sub(r"(?m)^optimizer:.*$", "", example.read_text())
    ends = []
    for name in ("adam", "alto"):
        file = tmp_path / f"{name}.yaml"
        file.write_text(f"{settings}\noptimizer: {name}\n")
        command = [sys.executable, RUNNER, str(Path(TREE) / "pretrain_gpt.py"), "--yaml-cfg", str(file)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode != 0
        ends.append(re.findall(r"^\w*(?:Error|Exception)\b.*", done.stderr, re.M)[-1])
    assert ends[0] == ends[1]


# -- flags of Megatron-LM's that have nothing to do with the optimizer, and read it or its schedule -----------------

#: By samples: the batch grows from 16 to 32 in the first 64 samples, the rate over the first 128.
SAMPLES = "--micro-batch-size 8 --global-batch-size 32 --rampup-batch-size 16 16 64 --train-samples 384 --seed 1"
RATE_BY_SAMPLES = "--lr 0.1 --min-lr 0.1 --lr-warmup-samples 128 --lr-decay-samples 384"
RATE_BY_SAMPLES += " --weight-decay 0.01 --clip-grad 1"
BY_SAMPLES = JOB.replace(BATCH, SAMPLES).replace(RATE, RATE_BY_SAMPLES)


@pytest.mark.slow
@real_tree
def test_flags_that_look_at_the_optimizer():
    """--rampup-batch-size, --lr-warmup-samples, --log-params-norm, --log-num-zeros-in-grad and --rerun-mode.

    The last computes gradients of an iteration twice; a state that had moved in between would change the losses.
    """
    flags = ["--log-params-norm", "--log-num-zeros-in-grad"]
    losses, log = pretrain(*flags, "--rerun-mode", "validate_results", job=BY_SAMPLES)
    grows = "rampup_batch_size" in (Path(TREE) / "megatron/training/global_vars.py").read_text()
    batches = [16] * 4 + [32] * 10 if grows else [32] * 12  # from 0.19 on the flag is accepted, and nothing reads it
    assert numbers_in(log, "global batch size") == batches
    assert list(losses) == list(range(1, len(batches) + 1))
    assert losses[len(batches)] < losses[1] - 0.1
    seen = [0, *itertools.accumulate(batches)]
    grown = [min(1.0, samples / 128) * 0.1 for samples in seen]
    rates = numbers_in(log, "learning rate")
    assert rates in (pytest.approx(grown[:-1], rel=1e-4), pytest.approx(grown[1:], rel=1e-4))
    norms, zeros = numbers_in(log, "params norm"), numbers_in(log, "num zeros")
    assert len(norms) == len(zeros) == len(batches)
    assert 5 < norms[0] < 100  # of 30 thousand weights that begin at 0.02, and of norms, which are 1
    assert len(set(norms)) > 10
    assert zeros[0] >= 0
    plain, _ = pretrain("--rerun-mode", "disabled", job=BY_SAMPLES)
    assert losses == pytest.approx(plain, rel=1e-6)


@pytest.mark.slow
@real_tree
def test_a_signal_ends_a_run_with_a_checkpoint(tmp_path):
    """--exit-signal-handler, and on from there."""
    job = JOB.replace(f"--train-iters {ITERATIONS}", "--train-iters 100000")
    start = command("--exit-signal-handler", "--save", str(tmp_path), "--save-interval", "100000", job=job)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(start, cwd=REPO, env=environment(), start_new_session=True, **pipes) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if re.search(r"iteration +3/", line):
                ranks = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
                for rank in ranks.stdout.split():
                    os.kill(int(rank), signal.SIGTERM)
    log = "".join(lines)
    assert process.returncode == 0, log[-4000:]
    assert "exiting program after receiving SIGTERM" in log
    saved = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert 3 <= saved < 100000
    job = JOB.replace(f"--train-iters {ITERATIONS}", f"--train-iters {saved + 3}")
    resumed, _ = pretrain("--load", str(tmp_path), "--override-opt_param-scheduler", job=job)
    assert list(resumed) == [saved + 1, saved + 2, saved + 3]
    assert max(resumed.values()) < losses_in(log)[1]


# -- Megatron-Bridge ---------------------------------------------------------------------------------------

BRIDGE = os.environ.get("ALTO_MEGATRON_BRIDGE")


@pytest.mark.slow
@real_tree
@pytest.mark.skipif(not BRIDGE, reason="ALTO_MEGATRON_BRIDGE does not name a tree of Megatron-Bridge")
def test_bridges_own_setup_builds_alto():
    """Its ``setup_optimizer`` gives what megatron-core gives, bit for bit, over two ranks."""

    def lines(door):
        program = str(REPO / "tests" / "end_to_end" / "programs" / "train_bridge.py")
        output = run([*TORCHRUN, RUNNER, program, BRIDGE, door])
        return [json.loads(line) for line in output.splitlines() if line.startswith("{")]

    *expected, core = lines("core")
    *found, report = lines("bridge")
    assert [line["step"] for line in found] == list(range(12))
    assert found == expected
    assert found[0]["rates"] == [0.025]
    assert found[-1]["loss"] < found[0]["loss"] - 0.02
    assert core["asked"] == []
    assert report["asked"] == [["config_overrides", "model_chunks", "pg_collection", "use_gloo_process_groups"]]
    built = {"wrapper": "AltoDistributedOptimizer", "optimizer": "ALTO", "alphas": [-3.0]}
    assert {name: report[name] for name in built} == {name: core[name] for name in built} == built
