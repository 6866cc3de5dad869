"""docs/megatron-names.md lists every name of Megatron's own that the plugin reads, calls, overrides or wraps.

Names are found in two ways. By the syntax of both: used in alto_distributed/megatron, and defined in the installed
megatron-core. And by the syntax of the plugin alone: imported from Megatron, or read from variables that hold its
objects, such as the arguments of its command line, which megatron-core does not define. Those that Python or torch have
too, and those of this package, are no dependence on Megatron.
"""

import argparse
import ast
import importlib.util
import inspect
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import distributed

from tests.helpers.private_names import names_touched

REPO = Path(__file__).parents[2]
PLUGIN = REPO / "alto_distributed" / "megatron"
PAGE = REPO / "docs" / "megatron-names.md"

#: What of megatron-core the plugin touches; its other files define names by the thousand.
PARTS = ("optimizer", "distributed", "parallel_state.py", "transformer/transformer_config.py", "fp8_utils.py")
PARTS += ("transformer/moe/experts.py", "transformer/fsdp_dtensor_checkpoint.py", "extensions/transformer_engine.py")

PUBLIC = (str, dict, list, tuple, set, torch, torch.Tensor, torch.nn.Module, torch.optim.Optimizer, distributed)
PUBLIC += (distributed.ProcessGroup, argparse, argparse.ArgumentParser, argparse.Action, inspect, sys, warnings)

#: Variables of the plugin that hold objects of Megatron's.
OBJECTS = {"args", "bucket", "buffer", "chunk", "config", "fsdp", "held", "model", "model_param", "module", "param"}
OBJECTS |= {"process_groups", "settings", "training", "wrapper", "self.config", "self.ddp_config", "fsdp.dist_index"}

#: Of what is read from those, and of keys of dicts: what is not Megatron's. States and hyperparameters are ALTO's,
#: names of options argparse's, and modules are in the table with what is imported from them.
OWN = {"alpha", "decayed", "layerwise", "alto_alpha", "alto_checkpoint_format", "initialize_state", "prepare_for_alto"}
OWN |= {"knows_alto", "params", "param_groups", "state", "iteration", "choices", "add_scalar", "grad"}
OWN |= {"fp8_utils", "parallel_state", "fsdp_dtensor_checkpoint", "_actions", "_fields", "_kernel_on", "step_in_waves"}

#: Values of flags, which are names of fields too.
COINCIDENCES = {"bf16", "fp16", "fp8"}


def trees(*roots):
    for root in roots:
        for file in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            yield ast.parse(file.read_text())


def defined(*roots, on=None):
    """Functions, classes, fields and attributes that code gives a name to.

    Args:
        roots: where the code is.
        on: names of the objects whose attributes count; without them, all do.
    """
    found = set()
    for tree in trees(*roots):
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.update([node.attr] if on is None or getattr(node.value, "id", None) in on else ())
    return found


def ours():
    """What this package gives a name to; what it writes on objects of Megatron's is Megatron's name."""
    return defined(REPO / "alto_distributed", on=("self", "cls"))


def used():
    """(names that the plugin has as an attribute or as a string, names that it imports or overrides)."""
    touched, certain = set(), set()
    for tree in trees(PLUGIN):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                touched.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                touched.add(node.value)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron."):
                certain.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ClassDef) and any("Optimizer" in ast.unparse(base) for base in node.bases):
                certain.update(child.name for child in node.body if isinstance(child, ast.FunctionDef))
    return touched, certain


def names_of_megatron():
    spec = importlib.util.find_spec("megatron.core")
    if spec is None:
        pytest.skip("megatron-core is not installed")
    core = Path(spec.submodule_search_locations[0])
    theirs = defined(*(core / part for part in PARTS))
    touched, certain = used()
    public = {name for thing in PUBLIC for name in dir(thing)}
    others = public | ours() | COINCIDENCES
    read = names_touched(PLUGIN, "megatron.", OBJECTS, OWN, keys=True)
    read = {name for name in read - public if not name.startswith(("__", "_alto"))}
    return ((touched & theirs) - others) | (certain & theirs) | read


def table():
    return re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.M)


def test_every_name_of_megatrons_is_in_the_table():
    missing = names_of_megatron() - set(table())
    assert not missing, f"write them into {PAGE.name}, with the releases that have them: {sorted(missing)}"


def test_the_table_has_no_name_that_is_not_used():
    touched, certain = used()
    rows = table()
    assert len(rows) == len(set(rows))
    assert not set(rows) - touched - certain


def test_names_are_found():
    """Else the table could be empty."""
    expected = {"_get_model_param_range_map", "shard_fp32_groups", "get_expert_tensor_parallel_group", "numel_unpadded"}
    expected |= {"ckpt_format", "main_param", "init_state_fn", "expt_tp", "gbuf_local", "get_wandb_writer", "offset"}
    assert expected <= names_of_megatron()
