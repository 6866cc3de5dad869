"""The Triton kernels: their numbers on the CPU in Triton's interpreter, their code for GPUs that are not here.

Triton decides at its import whether to interpret, so both run in processes of their own: one for all checks of the
numbers (unit/programs/triton_checks.py), one for all compilations (unit/programs/triton_compile.py).
"""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from alto_distributed.hyperparameters import Hyperparameters
from alto_distributed.kernels import Coefficients, FlatShard, Span
from alto_distributed.kernels.shards import batch_of
from alto_distributed.kernels.triton import step as triton_step
from alto_distributed.kernels.triton import values
from alto_distributed.kernels.triton.launch import launch_phase_one
from alto_distributed.kernels.triton.step import available
from alto_distributed.kernels.triton.table import Dtypes, ShardTable, Tables, Tiling, tiling_for
from alto_distributed.kernels.triton.upload import upload
from alto_distributed.kernels.triton.values import Values
from tests.helpers.launcher import REPO

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

CHECKS = [
    node.name
    for node in ast.parse((REPO / "tests/unit/programs/triton_checks.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_") and node.name != "check_step"
]
CUDA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
AMD = ("gfx90a", "gfx942", "gfx950", "gfx1100")
BUILDS = [(target, "float32") for target in (*CUDA, *AMD)]
BUILDS += [(target, kind) for target in ("sm_80", "sm_90", "sm_100", "gfx90a") for kind in ("bfloat16", "guarded")]


def run(module, directory, *arguments, **environment):
    """Run a script of tests/unit/programs that leaves a JSON file, and read it."""
    output = directory / f"{module}.json"
    path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))  # which may name another Triton
    done = subprocess.run(
        [sys.executable, "-m", f"tests.unit.programs.{module}", str(output), *arguments],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(directory / "cache"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text())


@pytest.fixture(scope="module")
def outcomes(directory):
    return run("triton_checks", directory, TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def compiled(directory):
    return run("triton_compile", directory, TRITON_INTERPRET="0")


@needs_triton
@pytest.mark.parametrize("check", CHECKS)
def test_numbers(outcomes, check):
    assert outcomes[check] == "", outcomes[check]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@needs_triton
def test_numbers_on_a_gpu(directory):
    """The same checks with the compiled kernels."""
    assert {name: failure for name, failure in run("triton_checks", directory, "cuda").items() if failure} == {}


# -- compiled code ----------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize(("target", "dtypes"), BUILDS)
@pytest.mark.parametrize("phase", ["phase_one", "finish", "phase_two"])
def test_it_compiles_and_nothing_spills(compiled, phase, target, dtypes):
    """Down to a binary. Registers that do not fit would go through memory, which is what this kernel is bound by."""
    facts = compiled[f"{phase} {dtypes} {target}"]
    assert facts["binary"] > 0
    assert facts["spilled"] == 0
    assert re.search(rf"^\s*\.(?:target {target}a?|amdgcn_target .*{target}\")$", facts["text"], re.MULTILINE)
    if target in CUDA:
        assert ".local" not in facts["text"]
        assert facts["registers"] <= 65536 // (5 * 128)  # five blocks of 128 threads share a multiprocessor


@needs_triton
@pytest.mark.parametrize(("target", "dtypes"), [one for one in BUILDS if one != ("gfx90a", "bfloat16")])
@pytest.mark.parametrize("phase", ["phase_one", "phase_two"])
def test_whole_tiles_move_in_the_widest_accesses(compiled, phase, target, dtypes):
    """Phase one reads five tensors and writes three; phase two reads three and writes one."""
    text = compiled[f"{phase} {dtypes} {target}"]["text"]
    words = {"gfx1100": "global_{}_b128"}.get(target, "global_{}_dwordx4") if target in AMD else r"{}.global\.v4\.b32"
    names = ("load", "store") if target in AMD else ("ld", "st")
    expected = [5, 3] if phase == "phase_one" else [3, 1]
    if dtypes == "bfloat16":  # four elements of two bytes are two words
        expected = [2, 1]
        halves = [len(re.findall(rf"{name}\.global\.v2\.b32", text)) for name in names]
        assert halves == ([3, 2] if phase == "phase_one" else [1, 0])
    reads, writes = (len(re.findall(words.format(name), text)) for name in names)
    assert writes == expected[1]
    assert reads == expected[0] or (target in AMD and reads > expected[0])  # there rows of the tables count too


@needs_triton
@pytest.mark.parametrize(("target", "dtypes"), BUILDS)
@pytest.mark.parametrize("phase", ["phase_one", "finish", "phase_two"])
def test_there_is_no_atomic_operation_and_no_fence(compiled, phase, target, dtypes):
    """So nothing rests on the order in which programs run, on fences, or on what a cache has of another's stores."""
    text = compiled[f"{phase} {dtypes} {target}"]["text"]
    assert not re.findall(r"\batom\.|\bred\.|_atomic_|\bfence\.|\bmembar\.|buffer_wbl2|buffer_inv|\.acq|\.rel\b", text)
    assert re.search(r"\bst\.global|global_store", text)  # the instrument sees what is there


@needs_triton
def test_operations_round_one_by_one(compiled):
    """As in the reference and the interpreter: no product is fused with a sum, quotient and root are IEEE's."""
    for target in CUDA:
        one, two = (compiled[f"{phase} float32 {target}"]["text"] for phase in ("phase_one", "phase_two"))
        for text in (one, two):
            assert not re.findall(r"\bfma\.\w+\.f32|(?:div|sqrt)\.(?:approx|full)", text)
            assert "div.rn.f32" in text
            assert "sqrt.rn.f32" in text
        assert "add.rn.f64" in one or "add.f64" in one


# -- the host's part, without Triton ----------------------------------------------------------------------


def test_triton_is_imported_at_the_first_launch_only():
    code = "import sys, alto_distributed.kernels.triton.step; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO, check=False).returncode == 0


def shard(spans, dtype=torch.float32):
    flat = torch.zeros(spans[-1][1], dtype=dtype)
    numbers = Coefficients(0.0, 0.9, 0.9, 0.9, 1e-6, 0.0, 1.0, 1.0)
    return FlatShard(flat, flat, flat.float(), flat.float(), None, tuple(Span(*span) for span in spans), numbers)


def tables(shards, tiling=None):
    table = ShardTable(torch.device("cpu"), tiling)
    shapes = [(one, one.memory, Dtypes.of(one)) for one in batch_of(shards)]
    assert table.update(shapes)
    assert not table.update(shapes)
    return table.tables


def test_every_element_of_a_span_is_in_one_chunk():
    shards = [shard([(3, 9, 0), (40, 200, 1)]), shard([(0, 64, 2), (64, 65, 0)]), shard([(0, 31, 0)], torch.bfloat16)]
    made = tables(shards, Tiling(tile=8, tiles=4))
    seen, places = {}, {}
    for launch in made.launches:
        assert launch.programs == len(launch.chunks)
        for index, low, high, slot, place, *_ in launch.chunks.tolist():
            assert low < high <= low // 8 * 8 + 32
            for element in range(low, high):
                assert (index, element) not in seen
                seen[index, element] = slot
            assert place not in places
            places[place] = slot
    spans = {(i, e): s.slot for i, p in enumerate(shards) for s in p.spans for e in range(s.start, s.stop)}
    assert seen == spans
    assert sorted(places) == list(range(len(places))) == list(range(made.partials.shape[1]))
    totals = {slot: range(first, first + count) for first, count, slot in made.totals.tolist()}
    assert {place: slot for slot, some in totals.items() for place in some} == places


def test_alike_dtypes_share_a_launch():
    alike = [shard([(0, 5, 0)]), shard([(0, 9, 1)]), shard([(0, 5, 2)], torch.bfloat16)]
    launches = tables(alike).launches
    assert [launch.programs for launch in launches] == [2, 1]
    assert [launch.dtypes for launch in launches] == [Dtypes.of(alike[0]), Dtypes.of(alike[2])]


def test_a_model_of_a_billion_elements_has_small_tables():
    tile, tiles = tiling_for(torch.device("cuda"))
    assert tile * tiles == 8192
    large = shard([(0, 5, 0)])
    large.spans = (Span(0, 10**9, 0),)
    made = tables([large])
    everything = (made.launches[0].chunks, made.totals, made.partials)
    assert sum(t.numel() * t.element_size() for t in everything) < 10**9 * 4 / 400


def test_values_are_sent_when_they_change_and_no_more(monkeypatch):
    """Whatever way numbers and addresses have come, the tables hold what one made anew would."""
    sent = []
    monkeypatch.setattr(values, "upload", lambda *given, **kept: (sent.append(given), upload(*given, **kept)))
    shards = [shard([(0, 5 + n, n)]) for n in range(4)]
    batch = batch_of(shards)
    rows = {n: n for n in range(4)}
    table = Values(4, torch.device("cpu"))

    def step(k, some=(0, 1, 2, 3), lag=0, weight_decay=0.1):
        numbers = [
            Coefficients.at_step(Hyperparameters(weight_decay=weight_decay), k),
            Coefficients.at_step(Hyperparameters(weight_decay=0.0), k - lag),
        ]
        for n in some:
            batch[n].coefficients = numbers[n % 2]
        ours = [(batch[n], batch[n].memory, Dtypes.of(batch[n])) for n in some]
        before = len(sent)
        table.send(ours, rows)
        copies = len(sent) - before
        anew = Values(4, torch.device("cpu"))
        anew.send(ours, rows)
        del sent[before + copies :]
        used = len({id(batch[n].coefficients) for n in some})
        assert torch.equal(table.shards, anew.shards)
        assert torch.equal(table.coefficients[:used], anew.coefficients[:used])
        return copies

    assert step(1) == 2
    assert [step(2), step(3), step(3), step(9)] == [0, 0, 0, 0]
    assert step(10, weight_decay=0.05) == 0
    assert step(11, lag=4) == 0  # groups at steps of their own
    assert step(12, some=(0, 2)) == 2
    assert step(13, some=(0, 2)) == 0
    batch[2].grad = torch.ones(7)
    assert step(14, some=(0, 2)) == 1
    assert step(15) == 2


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_it_is_for_gpus(device):
    assert not available(torch.device(device))


@pytest.mark.parametrize(
    ("version", "is_enough"), [("3.9.0", True), ("3.4.0+git1", True), ("3.3.1", False), ("x", False)]
)
def test_it_needs_a_triton_that_compiles_it(monkeypatch, version, is_enough):
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
    assert triton_step._triton_is_installed.__wrapped__() is is_enough
    with pytest.raises(ValueError, match=rf"triton 3.4 or later \(here is {re.escape(version)}; pip"):
        triton_step.kernel_on(torch.device("cpu"))


def test_it_needs_a_gpu_that_triton_knows(monkeypatch):
    monkeypatch.setattr(triton_step, "_triton_is_installed", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, known in [((7, 5), False), ((8, 0), True), ((10, 0), True)]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, answer=capability: answer)
        assert available(torch.device("cuda")) is known
    monkeypatch.setattr(triton_step, "_triton_is_installed", lambda: False)
    assert not available(torch.device("cuda"))


@needs_triton
def test_sums_of_another_precision_are_refused(monkeypatch):
    for name in ("kernel", "elements"):  # which this process must not import for good
        monkeypatch.setitem(sys.modules, f"{triton_step.__package__}.{name}", SimpleNamespace(element_type=None))
    nothing = Tables((), torch.zeros(0, 3), torch.zeros(3, 0))
    with pytest.raises(ValueError, match="float64"):
        launch_phase_one(nothing, Tiling(8, 4), Values(0, torch.device("cpu")), torch.zeros(3, 1))
