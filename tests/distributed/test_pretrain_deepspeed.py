"""The pretraining program's model, optimizers and DeepSpeed engine."""

import json
import math
import sys

import pytest
import torch

from alto_distributed import ALTO
from alto_distributed.pretrain import optimizers
from alto_distributed.pretrain.config.optimizer_options import WHOLE_NAMES
from alto_distributed.pretrain.config.settings import parse
from alto_distributed.pretrain.memory.usage import parameter_count as counted_by_hand
from alto_distributed.pretrain.model import (
    build_model,
    initial_weights,
    inputs_of,
    next_token_loss,
    parameter_count,
    seed_from,
)
from alto_distributed.states import STATE_DTYPES
from tests.helpers.cases import REPO, every_case
from tests.helpers.launcher import check

RANKS = "pretrain_deepspeed"
SHAPE = {"layers": 2, "hidden": 48, "heads": 4, "sequence": 10, "vocabulary": 130, "dropout": 0.0}


def run_of(seed=1, model=None, optimizer=None, training=None, **sections):
    training = {"seed": seed, "precision": "fp32", "global_batch": 16, "micro_batch": 4, **(training or {})}
    return parse({"model": {**SHAPE, **(model or {})}, "training": training, "optimizer": optimizer or {}, **sections})


# -- over ranks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", every_case(RANKS, 2))
def test_two_ranks(case, directory):
    check(case, directory)


@pytest.mark.parametrize("case", every_case(RANKS, 1))
def test_one_rank_after_two(case, directory):
    check(case, directory)


# -- model -----------------------------------------------------------------------------------------------


def test_initial_weights_follow_from_the_seed_alone():
    first = initial_weights(run_of(1))
    torch.manual_seed(99)
    state = torch.get_rng_state()
    second = initial_weights(run_of(1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = initial_weights(run_of(2))
    differ = {name for name in first if not torch.equal(first[name], other[name])}
    assert differ == {name for name in first if first[name].ndim >= 2}
    # A tensor's numbers do not depend on which others there are.
    deeper = initial_weights(run_of(1, model={"layers": 3}))
    assert torch.equal(deeper["transformer.h.1.mlp.c_fc.weight"], first["transformer.h.1.mlp.c_fc.weight"])


def test_initial_weights_are_gpt2s():
    weights = initial_weights(run_of(model={"hidden": 256, "init_std": 0.03}))
    for name, value in weights.items():
        if name.endswith("bias"):
            assert not value.any()
        elif value.ndim < 2:
            assert (value == 1).all()
        else:
            wanted = 0.03 / math.sqrt(2 * 2) if "c_proj" in name else 0.03
            assert value.std().item() == pytest.approx(wanted, rel=0.05), name
            assert abs(value.mean().item()) < wanted / 10


def test_model_is_the_one_that_was_asked_for():
    run = run_of(model={"dropout": 0.25})
    model = build_model(run)
    assert parameter_count(model) == counted_by_hand(run)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.config._attn_implementation == "sdpa"
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.25}
    assert "tanh" in repr(model.transformer.h[0].mlp.act).lower() or model.config.activation_function == "gelu_new"
    # The logits of a token do not see those after it.
    model.eval()
    tokens = torch.randint(0, 130, (2, 10))
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 130
    with torch.no_grad():
        before, after = model(tokens).logits, model(changed).logits
    assert torch.allclose(before[:, :6], after[:, :6], atol=1e-6)
    assert not torch.allclose(before[:, 6:], after[:, 6:], atol=1e-3)


def test_loss_is_the_mean_over_all_next_tokens_in_float32():
    tokens = torch.randint(0, 130, (3, 11))
    logits = torch.randn(3, 10, 130, dtype=torch.bfloat16)
    assert inputs_of(tokens)["input_ids"].shape == (3, 10)
    by_hand = 0.0
    for sample in range(3):
        for position in range(10):
            row = logits[sample, position].double()
            by_hand += (row.logsumexp(0) - row[tokens[sample, position + 1]]).item() / 30
    loss = next_token_loss(logits, tokens)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(by_hand, rel=1e-5)


def test_seeds_of_neighbours_differ():
    seeds = {seed_from(a, "x", b, c) for a in range(5) for b in range(20) for c in range(5)}
    assert len(seeds) == 500
    assert seed_from(1, 11) != seed_from(11, 1)
    assert all(0 <= seed < 2**63 for seed in seeds)


# -- optimizers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", optimizers.NAMES)
def test_every_optimizer_has_the_same_groups_and_its_defaults(name):
    run = run_of(optimizer={"name": name, "lr": 0.003, "weight_decay": 0.2})
    model = build_model(run)
    optimizer = optimizers.build_optimizer(run, optimizers.build_groups(run, model))
    decayed, *embedded, undecayed = optimizer.param_groups
    assert len(embedded) == (name == "muon")
    assert (decayed["lr"], decayed["weight_decay"], undecayed["weight_decay"]) == (0.003, 0.2, 0.0)
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in undecayed["params"]} == {1}
    for option, value in optimizers.default_options(name).items():
        of_the_optimizer = ("kernel", "embeddings", *STATE_DTYPES)  # not of its groups
        if option not in of_the_optimizer and not (name == "lamb" and option == "betas"):
            group = undecayed if name == "muon" and option in ("betas", "eps") else decayed
            assert group[option] == value, option


@pytest.mark.parametrize("name", optimizers.ALTO_NAMES)
def test_embeddings_may_go_without_the_ratio(name):
    run = run_of(optimizer={"name": name, "weight_decay": 0.2, "options": {"embeddings": "adam", "vector_lr": "3e-1"}})
    optimizer = optimizers.build_optimizer(run, optimizers.build_groups(run, build_model(run)))
    decayed, embedded, undecayed = optimizer.param_groups
    assert embedded["param_names"] == ["transformer.wte.weight", "transformer.wpe.weight"]  # the output layer is wte
    assert [group["layerwise"] for group in optimizer.param_groups] == ["decayed", "none", "decayed"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.2, 0.0]
    assert decayed["vector_lr"] == undecayed["vector_lr"] == 0.3
    wrong = run_of(optimizer={"name": name, "options": {"embeddings": "sgd"}})
    with pytest.raises(ValueError, match=r"optimizer\.options\.embeddings='sgd' is not one of 'ratio', 'adam'"):
        optimizers.arguments(wrong)


def test_lamb_is_alto_with_alpha_0():
    run = run_of(optimizer={"name": "lamb", "options": {"betas": [0.8, 0.95]}})
    optimizer = optimizers.build_optimizer(run, optimizers.build_groups(run, build_model(run)))
    assert isinstance(optimizer, ALTO)
    assert [(g["alpha"], g["betas"][1:]) for g in optimizer.param_groups] == [(0.0, (0.8, 0.95))] * 2


def test_adam_is_l2_and_adamw_is_not():
    model = build_model(run_of())
    for name, cls in {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}.items():
        run = run_of(optimizer={"name": name})
        assert type(optimizers.build_optimizer(run, optimizers.build_groups(run, model))) is cls


def test_numbers_that_yaml_reads_as_text():
    run = run_of(optimizer={"name": "adamw", "options": {"eps": "1e-7", "betas": ["9e-1", 0.95]}})
    assert optimizers.arguments(run)["eps"] == 1e-7
    assert optimizers.arguments(run)["betas"] == (0.9, 0.95)
    run = run_of(optimizer={"name": "alto", "options": {"eps": "1e-7", "alpha": "-1e0"}})
    assert optimizers.arguments(run)["eps"][0] == 1e-7
    assert optimizers.arguments(run)["alpha"] == -1.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("altoo", {}, "is not one of alto, lamb, .*did you mean 'alto'"),
        ("alto", {"beta": [0.9, 0.9, 0.9]}, "options.beta does not exist for alto; did you mean 'betas'.*alpha"),
        ("adamw", {"alpha": 1.0}, r"options.alpha does not exist for adamw.* \(it has: betas, eps\)"),
        ("adamw", {"amsgrad": True}, "options.amsgrad does not exist for adamw"),
        ("lion", {"eps": 1e-8}, "options.eps does not exist for lion"),
        ("lamb", {"alpha": -5}, "lamb is ALTO with alpha 0"),
        ("lamb", {"betas": [0.99, 0.9, 0.99]}, "must be 2 numbers for lamb .*ALTO's beta2 and beta3"),
        ("alto", {"betas": [0.9, 0.99]}, "must be 3 numbers for alto"),
        ("alto", {"lr": 0.1}, "set optimizer.lr"),
        ("alto", {"alpha": 500}, "alpha=500 is out of range"),
        ("alto", {"layerwise": "decay"}, "layerwise='decay' is not one of .*did you mean 'decayed'"),
        ("adam", {"betas": [0.9, 1.5]}, r"betas\[1\].* is out of range"),
        ("adam", {"eps": "small"}, "options.eps='small' must be a number"),
        ("adam", {"eps": [1e-8, 1e-8, 1e-8]}, "must be one number for adam"),
        ("adabelief", {"eps": -1.0}, "eps.* is out of range"),
        ("muon", {"momentum": 1.5}, "options.momentum.* is out of range"),
        ("mars", {"gamma": -1}, "options.gamma=-1 must be a number from 0 on for mars"),
        ("soap", {"precondition_frequency": 0}, "precondition_frequency=0 must be a whole number from 1 on"),
    ],
)  # fmt: skip
def test_options_that_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        optimizers.arguments(run_of(optimizer={"name": name, "options": options}))


def test_a_library_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    run = run_of(optimizer={"name": "lion"})
    with pytest.raises(ValueError, match=r"pytorch_optimizer is not installed: pip install '.*\[pretrain\]'"):
        optimizers.build_optimizer(run, optimizers.build_groups(run, build_model(run)))


# -- the DeepSpeed config --------------------------------------------------------------------------------


@pytest.fixture
def completed(monkeypatch, tmp_path):
    """The config of a run on two ranks with a JSON of this content."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from alto_distributed.pretrain.engines.deepspeed.config import deepspeed_config

    def complete(content, **run):
        path = tmp_path / "deepspeed.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return deepspeed_config(run_of(deepspeed={"config": str(path)}, **run), 2)

    return complete


def test_the_run_fills_in_what_the_json_leaves_out(completed):
    config = completed({"zero_optimization": {"stage": 1}, "train_batch_size": "auto"})
    assert config["train_batch_size"] == 16
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert config["gradient_accumulation_steps"] == 2
    assert config["gradient_clipping"] == 1.0
    assert config["bf16"]["enabled"] is config["fp16"]["enabled"] is False
    assert "optimizer" not in config  # DeepSpeed is given the run's
    assert json.loads(json.dumps(config)) == config
    assert "zero_allow_untested_optimizer" not in config

    bf16 = completed({"bf16": {"immediate_grad_update": True}}, training={"precision": "bf16"})
    assert bf16["bf16"] == {"immediate_grad_update": True, "enabled": True}
    for name in {*optimizers.NAMES} - {*WHOLE_NAMES}:
        untested = completed({}, optimizer={"name": name}).get("zero_allow_untested_optimizer", False)
        assert untested == (name in optimizers.THIRD_PARTY)


def test_a_json_may_say_the_same_as_the_run(completed):
    params = {"lr": 0.01, "betas": [0.99, 0.9, 0.99], "alpha": -5.0, "eps": 1e-6, "weight_decay": 1e-4}
    same = {"train_batch_size": 16, "gradient_clipping": 1, "bf16": {"enabled": False}, "scheduler": None}
    assert "optimizer" not in completed({**same, "optimizer": {"type": "alto", "params": params}})
    assert "optimizer" not in completed({"optimizer": {"type": "AdamW"}}, optimizer={"name": "adamw"})


@pytest.mark.parametrize(
    ("content", "run", "message"),
    [
        ({"train_batch_size": 32}, {}, r'"train_batch_size": 32, and the run has 16 \(training.global_batch\)'),
        ({"train_micro_batch_size_per_gpu": 1}, {}, '"train_micro_batch_size_per_gpu": 1, and the run has 4'),
        ({"gradient_accumulation_steps": 7}, {}, r'"gradient_accumulation_steps": 7, .* has 2 .*16 / \(4 x 2\)'),
        ({"gradient_clipping": 0.5}, {}, '"gradient_clipping": 0.5, and the run has 1.0'),
        ({"managed_gradient_accumulation": False}, {}, "managed_gradient_accumulation"),
        ({"bf16": {"enabled": True}}, {}, '"bf16.enabled": true, and the run has false .training.precision=fp32'),
        ({"bfloat16": {"enabled": True}}, {}, '"bf16.enabled": true, and the run has false'),
        ({"fp16": {"enabled": False}}, {"training": {"precision": "fp16"}}, '"fp16.enabled": false, .* has true'),
        ({"fp16": True}, {}, '"fp16" should be an object'),
        ({}, {"training": {"precision": "fp16"}}, "fp16 needs ZeRO"),
        ({"scheduler": {"type": "WarmupLR"}}, {}, 'remove "scheduler".*schedule section'),
        ({"torch_autocast": {"enabled": True}}, {}, 'remove "torch_autocast"'),
        ({"tensor_parallel": {"autotp_size": 2}}, {}, "engine: megatron"),
        ({"checkpoint": {"load_universal": True}}, {}, "load_universal"),
        ({"optimizer": {"type": "Adam"}}, {}, 'of type "Adam", and the run has ALTO'),
        ({"optimizer": {"type": "ALTO", "params": {"lr": 0.2}}}, {}, '"optimizer.params.lr": 0.2, .* has 0.01'),
        ({"optimizer": {"type": "ALTO", "params": {"eps": 1e-3}}}, {}, "optimizer.params.eps"),
        ({"optimizer": {"type": "ALTO", "params": {"alpha": -5}}}, {"optimizer": {"name": "lamb"}}, "alpha.*has 0.0"),
        ({"optimizer": {"type": "AdamW", "params": {"foreach": 1}}}, {"optimizer": {"name": "adamw"}}, "foreach"),
        ({"zero_optimization": {"stage": 1}}, {"optimizer": {"name": "muon"}}, "muon looks at whole .* 1 in fp32"),
        ({}, {"optimizer": {"name": "soap"}, "training": {"precision": "bf16"}}, "soap looks at whole .* 0 in bf16"),
        ({}, {"training": {"global_batch": 20}}, "not a multiple of micro_batch x data-parallel ranks"),
        ("{", {}, "cannot be read"),
        ("[1]", {}, "holds a list, and should hold an object"),
    ],
)  # fmt: skip
def test_a_json_that_says_something_else_is_refused(completed, content, run, message):
    with pytest.raises(ValueError, match=message):
        completed(content, **run)


def test_a_json_that_is_not_there(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from alto_distributed.pretrain.engines.deepspeed.config import deepspeed_config

    with pytest.raises(ValueError, match="nowhere.json cannot be read"):
        deepspeed_config(run_of(deepspeed={"config": "nowhere.json"}), 2)
    assert "zero_optimization" not in deepspeed_config(run_of(), 2)


def test_the_jsons_leave_to_the_run_what_is_the_runs():
    paths = sorted((REPO / "configs" / "deepspeed").glob("pretrain-*.json"))
    assert [json.loads(path.read_text())["zero_optimization"]["stage"] for path in paths] == [1, 2, 3]
    for path in paths:
        config = json.loads(path.read_text())
        assert config.keys() == {"data_types", "zero_optimization"}
        # Many micro-batches are summed: in bf16 the last of them would hardly count.
        assert config["data_types"] == {"grad_accum_dtype": "fp32"}
