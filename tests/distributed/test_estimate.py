"""``python -m alto_distributed estimate``: held against real runs, and against what a dry run prints."""

import contextlib

import ALTO as official
import pytest
import torch

from alto_distributed.pretrain import cli as commands
from alto_distributed.pretrain.config import settings as config
from alto_distributed.pretrain.memory import usage as memory
from alto_distributed.pretrain.memory.footprint import STATES, Setting, checkpoint, footprint
from alto_distributed.pretrain.memory.shapes import count, of_count, of_model
from tests.helpers.cases import REPO, every_case
from tests.helpers.launcher import check
from tests.helpers.pretrain_runs import prepare_bytes

RANKS = "memory"
MEDIUM = str(REPO / "configs" / "gpt2-345m.yaml")


@pytest.mark.parametrize("case", every_case(RANKS, 2))
def test_real_runs_keep_what_was_estimated(case, directory):
    check(case, directory)


def table_of(capsys, *arguments):
    """Optimizer -> part -> GiB, and all that was printed."""
    commands.main(["estimate", *arguments])
    text = capsys.readouterr().out
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line
    ]
    return {name: dict(zip(head[1:], map(float, cells), strict=True)) for name, *cells in rows}, text


def test_the_official_code_keeps_six_tensors():
    weight = torch.nn.Parameter(torch.randn(64, 32))
    optimizer = official.ALTO([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    kept = [value for value in optimizer.state[weight].values() if torch.is_tensor(value) and value.numel() > 1]
    assert sum(t.numel() * t.element_size() for t in kept) == sum(STATES["official"].values()) * weight.numel()


def test_a_billion_parameters_in_round_figures(capsys):
    gib = 2**30
    rows, text = table_of(capsys, "--parameters", str(gib), "--stage", "2", "--world", "8", "--precision", "bf16")
    alto, lamb = rows["ALTO"], rows["LAMB (ALTO, alpha 0)"]
    assert "1,073,741,824 parameters, deepspeed, bf16, 8 ranks" in text
    # Gradients: bf16 ones of the partition and a float32 copy in the step. A bucket has 5e8 elements.
    assert alto["weights"] == 2
    assert alto["gradients"] == 0.75
    assert alto["buffers"] == round(1e9 / gib, 3)
    assert alto["master"] == alto["m"] == alto["v"] == alto["grad_ema"] == 0.5
    assert alto["checkpoint"] == 2 + 4 + 12
    assert alto["total"] - lamb["total"] == pytest.approx(0.5)
    assert rows["AdamW"] == lamb
    whole = rows["official ALTO, unsharded"]
    assert whole["m"] + whole["v"] + whole["more states"] == 24
    small, _ = table_of(
        capsys, "--parameters", str(gib), "--stage", "2", "--world", "8", "--grad-ema-dtype", "bfloat16"
    )
    assert small["ALTO"]["grad_ema"] == 0.25
    assert small["ALTO"]["checkpoint"] == 2 + 4 + 10


def test_plain_torch_has_no_masters_and_adamw_follows_the_parameters(capsys):
    rows, _ = table_of(capsys, "--parameters", str(2**30), "--engine", "plain", "--precision", "bf16")
    assert rows["ALTO"]["m"] == 4
    assert rows["AdamW"]["m"] == 2
    assert rows["ALTO"]["total"] == 2 + 2 + 12
    assert "master" not in rows["ALTO"]


@pytest.mark.parametrize("engine", ["deepspeed", "megatron"])
def test_a_dry_run_prints_the_same_figures(engine, capsys, tmp_path):
    rows, _ = table_of(capsys, "--config", MEDIUM, "--engine", engine, "--world", "8")
    data = f"data.directory={prepare_bytes(tmp_path)}"
    with contextlib.suppress(SystemExit):  # this machine is none for eight ranks
        commands.main(["pretrain", "--config", MEDIUM, "--engine", engine, "--world", "8", "--dry-run", data])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("memory")]
    parts = dict(part.removesuffix(" GiB").rsplit(" ", 1) for part in line.split(": ")[1].split(", "))
    names = {"exp_avg": "m", "exp_avg_sq": "v"}
    activations = float(parts.pop("activations"))
    assert {"weights", "gradients", "master", "exp_avg", "exp_avg_sq", "grad_ema"} <= set(parts)
    for name, figure in parts.items():
        assert float(figure) == pytest.approx(rows["ALTO"][names.get(name, name)], abs=0.006), name
    total = float(line.split("about ")[1].split(" GiB")[0])
    assert total == pytest.approx(rows["ALTO"]["total"] + activations, abs=0.011)


def test_tensor_and_pipeline_parallel_cut_the_model_as_megatron_does():
    model = config.load(MEDIUM).model
    whole, cut = of_model(model), of_model(model, tensor_parallel=2)
    replicated = model.sequence * model.hidden + model.layers * 6 * model.hidden + 2 * model.hidden
    assert count(cut) == (count(whole) - replicated) // 2 + replicated
    first = of_model(model, pipeline_parallel=4)
    assert count(first) == (model.vocabulary + model.sequence) * model.hidden + 6 * (
        12 * model.hidden**2 + 13 * model.hidden
    )


def test_stage_2_keeps_whole_gradients_of_parameters_that_it_has_pieces_of():
    """DeepSpeed's grads_in_partition: the 51M elements of GPT-2's embedding are there in full at 64 ranks, too."""
    groups = of_model(config.load(MEDIUM).model)
    few, many = (footprint(Setting("deepspeed", ranks, "bf16", stage=2), groups) for ranks in (1, 64))
    assert many.gradients > 2 * groups[0][0] > few.gradients / 64
    in_float32 = footprint(Setting("deepspeed", 64, "bf16", stage=2, accumulate_in="fp32"), groups)
    assert in_float32.gradients < 4 * count(groups) / 64 * 1.001  # which has a partition alone


def test_a_run_says_what_its_optimizer_keeps():
    assert memory.states_of("lion", {}) == {"exp_avg": 4}
    assert memory.states_of("alto", {"alpha": 0}) == memory.states_of("lamb", {})
    assert memory.states_of("alto", {"exp_avg_dtype": "bfloat16"})["exp_avg"] == 2
    assert memory.states_of("adamw", {"exp_avg_dtype": "bfloat16"})["exp_avg"] == 4
    assert checkpoint(Setting("deepspeed", 8, "bf16", stage=3), of_count(10)) == 160  # masters and states alone


def test_megatron_keeps_the_matrices_of_attention():
    """cases/megatron_program.py holds them to what autograd keeps. 24 layers, 16 heads, 1024 tokens, dropout."""
    options = ["training.micro_batch=4", "training.precision=bf16", "model.dropout=0.1"]
    deepspeed, megatron, again = (
        memory.activations(config.load(MEDIUM, [*options, *more]))
        for more in (["engine=deepspeed"], ["engine=megatron"], ["engine=megatron", "training.recompute=true"])
    )
    matrices = 4 * 16 * 1024**2 * (4 + 1 + 2) + 1024**2
    assert megatron - deepspeed == 24 * matrices
    assert matrices < again < 2 * matrices + deepspeed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parameters", "7e9", "--engine", "megatron", "--world", "6", "--tensor-parallel", "4"], "not a multiple"),
        (["--parameters", "7e9", "--world", "4", "--tensor-parallel", "2"], "add --engine megatron"),
        (["--parameters", "-1"], "a number like 7e9"),
        (["--parameters", "7e9", "--world", "0"], "one rank at least"),
        (["--parameters", "7e9", "model.layers=3"], "none without --config"),
        (["--parameters", "7e9", "--stage", "0", "--grad-accum-dtype", "fp32"], "leave out grad_accum_dtype"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments, message):
    with pytest.raises(SystemExit, match=message):
        commands.main(["estimate", *arguments])
