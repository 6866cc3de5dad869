"""What Megatron-Bridge calls of an optimizer's config, read from a tree of it:

    ALTO_MEGATRON_BRIDGE=/path/to/Megatron-Bridge pytest tests/unit/test_megatron_bridge.py

tests/distributed/cases/megatron.py makes the same calls, and tests/end_to_end/test_megatron_command_line.py runs
Bridge's own ``setup_optimizer``.
"""

import ast
import os
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
TREE = os.environ.get("ALTO_MEGATRON_BRIDGE")


def calls_of(file, method):
    """The keywords of each call of some method of an optimizer's config, and how many arguments stand without one."""
    tree = ast.parse((Path(TREE) / "src/megatron/bridge/training" / file).read_text())
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "attr", None) == method]
    mine = [n for n in calls if ast.unparse(n.func.value).rpartition(".")[2] in ("optimizer_config", "optimizer")]
    return [({keyword.arg for keyword in n.keywords}, len(n.args)) for n in mine]


@pytest.mark.skipif(not TREE, reason="ALTO_MEGATRON_BRIDGE does not name a tree of Megatron-Bridge")
def test_bridge_calls_what_our_config_has():
    (config,) = [
        node
        for node in ast.parse((REPO / "alto_distributed/megatron/config.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "AltoOptimizerConfig"
    ]
    ours = {node.name: {a.arg for a in node.args.args} for node in config.body if isinstance(node, ast.FunctionDef)}
    asked = {"model_chunks", "config_overrides", "use_gloo_process_groups", "pg_collection"}
    assert calls_of("optim.py", "provide") == [(asked, 0)]
    assert ours["provide"] == {"self", *asked}
    finalized = calls_of("config.py", "finalize")
    assert finalized
    assert all(call == (set(), 0) for call in finalized)
    assert ours["finalize"] == {"self"}
