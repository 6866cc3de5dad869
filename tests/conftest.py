"""Settings every test needs, set before torch is imported."""

import os
import sys
from pathlib import Path

# bf16 matrix products die with SIGILL on hosts that advertise AMX without letting it be used.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# As many test files run at a time as there are cores. A second thread for each would spin, waiting for its turn.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

from tests.helpers import launcher
from tests.helpers.cases import EXHAUSTIVE, Case
from tests.helpers.pretrain_runs import prepare_tokens

# One launch of processes may serve many examples, so a single one may be slow. CI runs are repeatable; exhaustive ones
# draw anew each time, and print what reproduces a failure.
settings.register_profile("alto", deadline=None, derandomize=not EXHAUSTIVE, print_blob=True)
settings.load_profile("alto")


#: Files that take minutes. Two run at a time, and what comes last runs beside nothing.
LONGEST_FIRST = (
    *("test_megatron", "test_pretend", "test_pretrain_deepspeed", "test_pretrain_runs", "test_deepspeed_zero"),
    *("test_deepspeed_checkpoints", "test_checkpoint_faults", "test_deepspeed_parallel", "test_deepspeed_launch"),
    *("test_sharded", "test_estimate", "test_evidence", "test_restarts", "test_triton"),
)
#: Files whose test functions share neither ranks nor costly fixtures: these may run beside each other.
BY_FUNCTION = ("test_pretend", "test_sharded", "test_checkpoint_faults", "test_estimate", "test_deepspeed_launch")


def pytest_collection_modifyitems(items):
    order = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """``--dist loadfile``, with some files by test function. What a launch of ranks serves stays together."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            path, _, test = nodeid.partition("::")
            return f"{path}::{test.partition('[')[0]}" if Path(path).stem in BY_FUNCTION else path

    return Scheduling(config, log)


def case_of(item):
    """The case that a test checks, if it does."""
    case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
    return case if isinstance(case, Case) else None


def pytest_collection_finish(session):
    """What -k, -m and ids have left is what ranks will run."""
    launcher.select(case for item in session.items if (case := case_of(item)))


_RECURSION = sys.getrecursionlimit()


@pytest.fixture(autouse=True)
def _same_start_for_every_test():
    torch.manual_seed(1234)
    sys.setrecursionlimit(_RECURSION)  # tinygrad raises it when it is imported


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    """Prepared data for the training program."""
    return prepare_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Where the ranks that a test file starts leave their files."""
    return tmp_path_factory.mktemp("ranks")
