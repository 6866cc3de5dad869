"""Bugs that fuzzing found, each as the one case that showed it. All of them ended in something else than a message."""

import copy
import json
import pickle
import re
import tracemalloc

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml

pytest.importorskip("deepspeed")
pytest.importorskip("megatron.core")

from alto_distributed import ALTO
from alto_distributed.pretrain import metrics as logs
from alto_distributed.pretrain import optimizers, report
from alto_distributed.pretrain.checkpoint import manager as checkpoints
from alto_distributed.pretrain.checkpoint import manifest, safe_load
from alto_distributed.pretrain.cli import plan
from alto_distributed.pretrain.config import settings as config
from alto_distributed.pretrain.data import Samples, files
from alto_distributed.pretrain.engines.deepspeed.config import deepspeed_config, refuse_what_deepspeed_refuses
from tests.helpers.fuzz import CONTENTS, documented, encoded, trained
from tests.helpers.launcher import REPO

TINY = REPO / "configs/gpt2-tiny.yaml"

# -- settings ----------------------------------------------------------------------------------------------

#: Each level stands for nine of the one before: the last for four hundred million words, in a few lines.
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
SETTINGS = {
    "an alias bomb, whose repr in the message took all memory": (BOMB + "training: *i", "more than 10,000 values"),
    "a value that contains itself": ("optimizer: &o {options: {a: *o}}", "nested too deeply"),
    "a key that is there twice, of which the second won": ("training: {seed: 1, seed: 2}", "the key 'seed' twice"),
    "brackets without end: RecursionError": ("model: " + "[" * 3000, "nested too deeply"),
    "a number of 5,000 digits": (f"training: {{seed: {'9' * 5000}}}", "is not YAML: Exceeds the limit"),
    "a month 99, of which only the message of datetime was left": ("data: 2001-99-99", "run.yaml is not YAML: month"),
    "a tag that is a lie: KeyError": ("logs: {tensorboard: !!bool maybe}", "is not YAML"),
    "a number without digits: IndexError": ("training: {seed: !!int ''}", "is not YAML"),
    "a number in base 60 that no float holds: OverflowError": ("a: " + "1:" * 200 + "1.5", "is not YAML"),
    "a megabyte of nothing, which took minutes": (" " * (1 << 20) + "x", "more than 1,048,576 bytes"),
}


@pytest.mark.parametrize("bug", SETTINGS)
def test_settings(bug, tmp_path):
    text, message = SETTINGS[bug]
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        config.load(path)


def test_anchors_are_welcome_where_they_are_few(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("evaluation: &often {every: 7}\ncheckpoints: {<<: *often, keep: 3}\n")
    run = config.load(path)
    assert (run.evaluation.every, run.checkpoints.every, run.checkpoints.keep) == (7, 7, 3)


def test_a_link_to_itself_was_a_runtime_error(tmp_path):
    (tmp_path / "run.yaml").symlink_to(tmp_path / "run.yaml")
    with pytest.raises(ValueError, match="cannot be read"):
        config.load(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.seed=" + "[" * 2000, "nested too deeply"),
        ("optimizer.options" + ".a" * 2000 + "=1", "the settings is nested too deeply"),
        ("training.timeout=1e300", "training.timeout=1e+300 is out of range"),
        ("training.timeout=0", "training.timeout=0.0 is out of range"),
    ],
)
def test_overrides(override, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        config.load(TINY, [override])


def test_an_option_whose_name_has_two_lines_is_named_in_one(tmp_path):
    run = config.parse({**config.load(TINY).as_dict(), "optimizer": {"name": "alto", "options": {"a\nb": 1}}})
    with pytest.raises(ValueError, match=re.escape(r"optimizer.options.'a\nb' does not exist for alto")):
        optimizers.arguments(run)


@pytest.mark.parametrize("world", [0, -2, 10**30])
def test_a_plan_for_no_ranks_was_a_division_by_zero(world):
    with pytest.raises(ValueError, match=f"{world} ranks .*: there must be between 1 and"):
        plan(config.load(TINY), world, TINY)


# -- DeepSpeed JSONs ---------------------------------------------------------------------------------------

JSONS = {
    '{"optimizer": "ALTO"}': '"optimizer" should be an object',
    '{"optimizer": {"type": "ALTO", "params": [1]}}': '"optimizer" should be an object',
    '{"zero_optimization": [2]}': '"zero_optimization" should be an object, not [2]',
    '{"zero_optimization": {"stage": null}}': '"zero_optimization.stage": None, and it must be 0 to 3',
    '{"zero_optimization": {"stage": [1]}}': "and it must be 0 to 3",
    '{"zero_optimization": {"stage": 4}}': "and it must be 0 to 3",
    '{"zero_optimization": {"stage": 1}, "zero_optimization": {"stage": 2}}': "the key 'zero_optimization' twice",
    '{"gradient_clipping": NaN}': "NaN is not a number that JSON has",
    '{"zero_optimisation": {"stage": 2}}': 'did you mean "zero_optimization"?',
    '{"a": ' * 5000 + "1" + "}" * 5000: "nested too deeply",
    '{"communication_data_type": ["fp16"]}': "DeepSpeed does not take",
    '{"zero_optimization": {"stage": 1, "allgather_partitions": {}}}': "DeepSpeed does not take",
}


@pytest.mark.parametrize("text", JSONS, ids=lambda text: text[:50])
def test_deepspeed_jsons(text, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(text)
    run = config.load(TINY, [f"deepspeed.config={path}"])
    with pytest.raises(ValueError, match=re.escape(JSONS[text])):
        refuse_what_deepspeed_refuses(deepspeed_config(run, 1), str(path))


def test_a_misspelt_key_of_two_lines(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"\ndata_types": {"grad_accum_dtype": "fp32"}}))
    message = r'has "\ndata_types", which DeepSpeed would ignore; did you mean "data_types"?'
    with pytest.raises(ValueError, match=re.escape(message)):
        deepspeed_config(config.load(TINY, [f"deepspeed.config={path}"]), 1)


@pytest.mark.parametrize(
    "section",
    [
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": [1]}},
        {"zero_optimization": {"stage": 2, "overlap_comm": "yes"}},
        {"data_types": {"grad_accum_dtype": [None]}},
        {"zero_optimization": {"stage": 3, "sub_group_size": 1e300}},
    ],
)
def test_the_memory_estimate_of_a_json_with_wrong_types(section, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(section))
    with pytest.raises(ValueError, match="the DeepSpeed JSON has .* where its .* should be"):
        plan(config.load(TINY, [f"deepspeed.config={path}"]), 2, path)


@pytest.mark.parametrize(
    "secret",
    [
        {"comet": {"enabled": True, "api_key": "canary"}},
        {"wandb": {"WANDB_API_KEY": "canary"}},
        {"a": [{"hf_token": "canary"}]},
        {"password": "canary"},
    ],
)
def test_a_secret_in_a_json_is_refused_and_not_repeated(secret, tmp_path):
    """DeepSpeed prints its settings when it starts, and writes them into every checkpoint."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(secret))
    run = config.load(TINY, [f"deepspeed.config={path}"])
    with pytest.raises(ValueError, match="no place for a secret") as refusal:
        deepspeed_config(run, 1)
    assert "canary" not in str(refusal.value)
    path.write_text(json.dumps({"comet": {"enabled": False, "api_key": ""}, "tokenizer": "gpt2"}))
    deepspeed_config(run, 1)


# -- files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": {"../../secret": None}}, "'../../secret' is not a file inside the checkpoint"),
        ({"files": {"/etc/passwd": None}}, "'/etc/passwd' is not a file inside the checkpoint"),
        ({"files": {"a\0b": None}}, "is not a file inside the checkpoint"),
        ({"files": []}, "its files are not a list by name"),
        ({"files": {"run.json": {"bytes": "many"}}}, "it does not say of 'run.json' what it should"),
        ({"step": "7"}, "its step and world_size are not numbers"),
        ({"more": 1}, "it has the fields"),
        ({"version": 2}, "of version 2"),
    ],
)
def test_a_manifest_with_a_checksum_that_fits(change, message, checkpoint):
    """It was a KeyError or a TypeError; and a file outside of the checkpoint was read."""
    directory, original = checkpoint
    content = {**json.loads(original), **change}
    whole = json.loads(original)["files"]["run.json"]
    if isinstance(content["files"], dict):
        content["files"] = {name: whole if entry is None else entry for name, entry in content["files"].items()}
    (directory / manifest.NAME).write_bytes(encoded(content))
    with pytest.raises(ValueError, match=re.escape(message)):
        manifest.read(directory)
    (directory / manifest.NAME).write_bytes(original)
    assert set(manifest.read(directory).files) == set(CONTENTS)


def test_a_directory_that_is_given_in_a_roundabout_way(tmp_path):
    """``--into a/../b``: no checkpoint could be saved. Engines name their files by either way."""
    (tmp_path / "a").mkdir()
    roundabout = tmp_path / "a" / ".." / "b"
    for path in (tmp_path / "b" / "x.pt", roundabout / "x.pt"):
        assert checkpoints._inside(roundabout, {path: None}) == {"x.pt": None}
        assert checkpoints._inside(tmp_path / "b", {path: None}) == {"x.pt": None}


@pytest.mark.parametrize("text", ["[]", "{}", '{"settings": 3}', "{"])
def test_settings_in_a_checkpoint_that_are_none(text, tmp_path):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match="run.json"):
        checkpoints.about(tmp_path)


@pytest.mark.parametrize("line", ["5", "[]", '{"loss": 1.0}', '{"step": "1"}', '{"step": 1, "loss": "low"}', "\x80"])
def test_a_record_that_is_none(line, tmp_path):
    good = '{"step": 1, "loss": 2.0}\n'
    (tmp_path / logs.RECORDS).write_text(f"{line}\n{good}", encoding="latin-1")
    with pytest.raises(ValueError, match="line 1 is not a record"):
        report.summary(tmp_path)
    (tmp_path / logs.RECORDS).write_text(f"{good}{line}\n", encoding="latin-1")  # the last may have been cut off
    assert report.summary(tmp_path)["steps"] == 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "lines",
    [
        '{"step": 1, "loss": 1e308}\n{"step": 2, "loss": -1e308}\n',
        '{"step": 1, "loss": 1e999}\n{"step": 2, "loss": NaN}\n',
        f'{{"step": {10**300}, "loss": {10**307}}}\n',
        f'{{"step": 1, "loss": {10**400}}}\n{{"step": 2, "loss": 2.0}}\n',
    ],
    ids=["whole range", "not finite", "large whole numbers", "larger than any float"],
)
def test_figures_of_any_numbers(lines, tmp_path):
    (tmp_path / logs.RECORDS).write_text(lines)
    documented(lambda: report.write([tmp_path], tmp_path))


def test_a_record_without_its_perplexity_was_a_key_error(tmp_path):
    (tmp_path / logs.RECORDS).write_text('{"step": 3, "valid_loss": 6.5}\n')
    assert "6.5" in report.table([report.summary(tmp_path)])


INDEX = {
    "the type of tokens": (17, b"\4", "its documents do not follow one another"),
    "where a document begins": (None, b"\1", "its documents do not follow one another"),
    "the list of documents": (-8, b"\1", "it does not list its documents one by one"),
}


@pytest.mark.parametrize("what", INDEX)
def test_an_index_with_another(what, prepared, tmp_path):
    _, contents = prepared
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    at, new, message = INDEX[what]
    documents = json.loads(contents[files.MANIFEST])["splits"]["train"]["documents"]
    index = bytearray(contents["train.idx"])
    index[34 + 4 * documents if at is None else at % len(index)] = new[0]
    (tmp_path / "train.idx").write_bytes(index)
    with pytest.raises(ValueError, match=message):
        Samples(tmp_path, "train", 16, 300)


def test_a_token_that_is_another_one_of_the_vocabulary(prepared, tmp_path):
    """Nothing about it is wrong but its checksum; a run compares it when it starts (data.verify)."""
    _, contents = prepared
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    files.verify(tmp_path, "train", "valid", "test")
    tokens = bytearray(contents["train.bin"])
    tokens[10] ^= 1
    (tmp_path / "train.bin").write_bytes(tokens)
    Samples(tmp_path, "train", 16, 300).batch(0, 4, 4)
    with pytest.raises(ValueError, match="train.bin is missing or damaged: it is not what was prepared"):
        files.verify(tmp_path, "train")


@pytest.mark.parametrize(
    "change", [{"splits": None}, {"splits": {}}, {"tokenizer": 3}, {"tokenizer": {"kind": "bytes"}}]
)
def test_a_data_manifest_without_its_parts(change, prepared, tmp_path):
    _, contents = prepared
    (tmp_path / files.MANIFEST).write_text(json.dumps({**json.loads(contents[files.MANIFEST]), **change}))
    with pytest.raises(ValueError, match="manifest.json is damaged"):
        Samples(tmp_path, "train", 16, 300)


# -- ALTO --------------------------------------------------------------------------------------------------


RATES = [10**400, -(10**400), torch.tensor(1j), torch.tensor(1), torch.ones(1).to_sparse()]


@pytest.mark.parametrize("lr", RATES, ids=["huge", "as negative", "complex", "whole", "sparse"])
def test_rates(lr):
    """A whole number beyond all floats was an OverflowError; a complex tensor failed in the step, with states begun."""
    with pytest.raises(ValueError, match="lr"):
        ALTO([torch.nn.Parameter(torch.ones(3))], lr=lr)


@pytest.mark.parametrize("option", ["layerwise", "kernel"])
@pytest.mark.parametrize("value", [np.ones(3), np.array("all"), torch.ones(2), ["all"]], ids=str)
def test_a_word_that_is_an_array(option, value):
    """Whether an array is one of some words, numpy could not say."""
    with pytest.raises(ValueError, match=rf"{option}=.* is not one of "):
        ALTO([torch.nn.Parameter(torch.ones(3))], **{option: value})


@pytest.mark.parametrize("value", [torch.tensor([1.0, 2.0]), "False", 1, None], ids=str)
def test_a_group_that_does_not_say_whether_it_is_decayed(value):
    """The truth of two numbers is ambiguous, and that of "False" is True."""
    with pytest.raises(ValueError, match=r"decayed=.* of a parameter group must be True or False"):
        ALTO([{"params": [torch.nn.Parameter(torch.ones(3))], "decayed": value}])


STATES = {
    "a step that is text": ("step", "two", "must be a number of steps, not 'two'"),
    "a step of -1": ("step", torch.tensor(-1.0), "must be a number of steps"),
    "half a step": ("step", 1.5, "must be a number of steps"),
    "an average of whole numbers": ("exp_avg", torch.ones(3, 4, dtype=torch.int64), "must be a dense floating-point"),
    "a sparse average": ("grad_ema", torch.ones(3, 4).to_sparse(), "must be a dense floating-point tensor"),
    "an average without data": ("exp_avg", torch.ones(3, 4, device="meta"), "not torch.float32, .* without data"),
    "a step without data": ("step", torch.tensor(1.0, device="meta"), "must be a number of steps"),
    "an average that is a list": ("exp_avg_sq", [1.0] * 12, "must be a dense floating-point tensor, not list"),
    "an unknown state without data": ("more", torch.ones(3, device="meta"), "'more' .* a tensor without data"),
    "an unknown state that is an array": ("more", np.ones(3), "'more' for parameter 0 of group 0 .* a ndarray"),
}


@pytest.mark.parametrize("what", STATES)
def test_state_dicts_with(what):
    key, value, message = STATES[what]
    saved = copy.deepcopy(trained().state_dict())
    saved["state"][0][key] = value
    with pytest.raises(ValueError, match=message):
        trained().load_state_dict(saved)


@pytest.mark.parametrize("count", [torch.tensor(3), torch.tensor(3.0, dtype=torch.float64), 3], ids=repr)
def test_a_step_of_another_type(count):
    """As other programs save it. Counters of two types could not be counted up together."""
    saved = copy.deepcopy(trained().state_dict())
    saved["state"][0]["step"] = count
    optimizer = trained()
    optimizer.load_state_dict(saved)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()
    step = optimizer.state[optimizer.param_groups[0]["params"][0]]["step"]
    assert (step.dtype, step.item()) == (torch.float32, 4)


def test_a_group_that_was_gathered_with_nonsense():
    """It was loaded, and the step then failed: the truth of two numbers is ambiguous."""
    saved = copy.deepcopy(trained().state_dict())
    saved["param_groups"][0]["grad_ema_beta1"] = torch.tensor([1.0, 2.0])
    with pytest.raises(ValueError, match="grad_ema_beta1 of group 0="):
        trained().load_state_dict(saved)


@pytest.mark.parametrize(
    "saved",
    [
        *(None, [], {}, {"state": {}}, {"state": 1, "param_groups": []}, {"param_groups": [3]}),
        # Tensors are hashable, and cannot be compared with a number: torch said so, with the groups begun.
        {"state": {}, "param_groups": [{"params": [torch.ones(3)]}, {"params": [1]}]},
    ],
)
def test_what_is_no_state_dict(saved):
    with pytest.raises(ValueError, match="this is not an optimizer's state_dict"):
        trained().load_state_dict(saved)


@pytest.mark.parametrize(
    "bomb",
    [
        *(b"r" + (1_298_491_233).to_bytes(4, "little"), b"p1298491233\n"),  # places among what was read before
        *(b"\x96" + (1 << 33).to_bytes(8, "little"), b"\x8e" + (1 << 33).to_bytes(8, "little")),  # lengths
    ],
)
def test_an_index_that_asks_for_all_memory(bomb, tmp_path):
    """Found by scripts/fuzz.py: Python's unpickler made room for 1.3e9 values, of which the file had none."""
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps({"x": 1}, protocol=4)[:-1] + bomb + b".")
    tracemalloc.start()
    try:
        assert safe_load._problem(path).startswith(".metadata (")
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of one process
def test_an_index_that_torch_could_not_read(tmp_path):
    """Found by scripts/fuzz.py: a frame beyond the end of the file is one to Python's unpickler in C alone."""
    dcp.save({"x": torch.ones(3)}, checkpoint_id=tmp_path)
    path = tmp_path / ".metadata"
    content = path.read_bytes()
    assert content[2:3] == pickle.FRAME
    path.write_bytes(content[:3] + (1 << 20).to_bytes(8, "little") + content[11:])
    assert safe_load._problem(path) == ".metadata (UnpicklingError: pickle data was truncated)"


def test_yaml_is_never_the_loader_that_builds_objects(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.dump({"training": {"seed": object}}))
    with pytest.raises(ValueError, match="is not YAML: could not determine a constructor"):
        config.load(path)
