"""Settings that are nonsense: YAML files, overrides, the command line, DeepSpeed JSONs. Only refusals come out."""

import contextlib
import io
import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("deepspeed")

from alto_distributed.pretrain import optimizers
from alto_distributed.pretrain.cli import main, plan
from alto_distributed.pretrain.config import settings as config
from alto_distributed.pretrain.engines.deepspeed.config import deepspeed_config, refuse_what_deepspeed_refuses
from tests.helpers.fuzz import cases, damaged, documented, json_values, message_of, mutated, words, yaml_values
from tests.helpers.launcher import REPO
from tests.helpers.pretrain_runs import prepare_bytes

TINY = REPO / "configs/gpt2-tiny.yaml"
WHOLE = config.load(TINY).as_dict()
NAMES = sorted({".".join(where) for where in [(s, k) for s, v in WHOLE.items() if isinstance(v, dict) for k in v]})
JSONS = [json.loads(path.read_text()) for path in sorted((REPO / "configs/deepspeed").glob("pretrain-*.json"))]

#: YAML that is worth more than random letters: anchors, tags, merges, odd scalars.
PIECES = [
    *(
        "&a ",
        "*a",
        "!!int ",
        "!!timestamp ",
        "!!bool ",
        "!!float ",
        "!!binary ",
        "!!set ",
        "!!omap ",
        "!!python/object:x ",
    ),
    *(
        "<<: ",
        "- ",
        "? ",
        ": ",
        "{",
        "}",
        "[",
        "]",
        ", ",
        "\n",
        "\n  ",
        "|\n",
        ">\n",
        "---\n",
        "...\n",
        "%YAML 1.1\n",
        "#",
    ),
    *(
        "training",
        "model",
        "iterations",
        "extends",
        "deepspeed",
        "config",
        "1:1:1.5",
        "2001-99-99",
        "0x",
        "0b",
        "~",
        "''",
    ),
]
yaml_texts = st.one_of(
    st.lists(st.sampled_from(PIECES) | words, max_size=14).map("".join),
    st.text(max_size=60),
    yaml_values.map(lambda value: yaml.dump(value, allow_unicode=True)),
)


def used(run):
    """What the program does with settings before ranks come in."""
    optimizers.arguments(run)
    assert config.parse(run.as_dict()) == run
    json.dumps(run.as_dict())
    return plan(run, 2, TINY)


def loads(path, overrides=()):
    run, refusal = documented(lambda: config.load(path, overrides))
    if refusal is None:
        documented(lambda: used(run))
    return refusal


@cases(400)
@given(settings=mutated(WHOLE, yaml_values))
def test_settings_of_any_type_and_range(settings, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.dump(settings, allow_unicode=True), errors="surrogatepass")
    loads(path)


@cases(400)
@given(
    content=st.one_of(
        damaged(TINY.read_bytes()), st.binary(max_size=60), yaml_texts.map(lambda t: t.encode("utf-8", "replace"))
    )
)
def test_files_of_any_content(content, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    loads(path)


def slip(name, letter, at):
    """A name with one letter changed."""
    return name[: at % len(name)] + letter + name[at % len(name) + 1 :]


names = st.one_of(
    st.sampled_from(NAMES),
    st.builds(slip, st.sampled_from(NAMES), st.characters(), st.integers(0, 30)),
    st.lists(words, max_size=4).map(".".join),
    st.sampled_from(["optimizer.options" + ".a" * 400, "training", "." * 50]),
)
overrides = st.one_of(st.builds("{}={}".format, names, yaml_texts), words)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_bytes(tmp_path_factory.mktemp("data"))


@cases(400)
@given(
    overrides=st.lists(overrides, max_size=3), world=st.sampled_from(["1", "2", "0", "-3", "x", str(10**30), "1e3", ""])
)
def test_a_command_line_of_any_words(data, overrides, world):
    """It ends with 0, or with a message of one line: 2, or 1 where this machine is too small."""
    said, end = io.StringIO(), None
    overrides = [f"data.directory={data}", *overrides]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main(["pretrain", "--config", str(TINY), "--dry-run", "--world", world, *overrides])
        except SystemExit as ended:
            end = ended
    if end is None:
        assert "data-parallel" in said.getvalue()
    elif end.code == 0:
        assert "usage:" in said.getvalue()
    else:
        assert end.code == (1 if "this machine has not enough" in str(end) else 2)
        assert said.getvalue().endswith(f"{end}\n")
        assert len(str(end).splitlines()) == 1
        if end.__cause__ is not None:
            assert str(end) == f"alto_distributed pretrain: {message_of(end.__cause__)}"


#: Sections of a DeepSpeed JSON that DeepSpeed reads; they may hold anything.
SECTIONS = [
    *("optimizer", "zero_optimization", "bf16", "fp16", "checkpoint", "scheduler", "data_types", "train_batch_size"),
    *("gradient_clipping", "communication_data_type", "activation_checkpointing", "comet", "wandb", "tensorboard"),
    *("flops_profiler", "steps_per_print", "sparse_attention", "pipeline", "aio", "compile", "autotuning"),
]
json_texts = st.one_of(
    st.sampled_from(JSONS).flatmap(mutated).map(json.dumps),
    st.builds(lambda key, value: json.dumps({**JSONS[0], key: value}), st.sampled_from(SECTIONS), json_values),
    st.sampled_from(JSONS)
    .flatmap(lambda whole: damaged(json.dumps(whole).encode()))
    .map(lambda b: b.decode("latin-1")),
    json_values.map(json.dumps),
    st.text(max_size=30),
)


@cases(250)
@given(content=json_texts)
def test_a_deepspeed_json_of_any_content(content, tmp_path):
    path = tmp_path / "ds.json"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    run = config.load(TINY, [f"deepspeed.config={path}"])
    settings, refusal = documented(lambda: deepspeed_config(run, 1))
    if refusal is None:
        documented(lambda: refuse_what_deepspeed_refuses(settings, str(path)))
    documented(lambda: plan(run, 2, path))
