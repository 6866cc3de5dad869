"""The C kernel against the definition, the torch kernel and itself; and how it is built."""

import itertools
import math
import multiprocessing
import os
import platform
import shlex
import stat
import subprocess
import sys
import time
import warnings
from dataclasses import fields, replace
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from alto_distributed import ALTO
from alto_distributed.hyperparameters import Hyperparameters
from alto_distributed.kernels import Batch, Coefficients, FlatShard, Span, chunked, foreach, kernel_for, reference
from alto_distributed.kernels.cpu import build as native_build
from alto_distributed.kernels.cpu import kernel as native
from alto_distributed.kernels.memory import memory_of
from tests.helpers.launcher import REPO

BLOCK = 16384  # of alto.c; test_blocks holds it to that
STATES = ("exp_avg", "exp_avg_sq", "grad_ema")
STEP_SIZES = torch.tensor([0.0123456789, 0.4, 1e-4], dtype=torch.float64)

LARGE_BATCH = dict(alpha=-5.0, betas=(0.99, 0.9, 0.99))
SMALL_BATCH = dict(alpha=0.5, betas=(0.01, 0.9, 0.99))
FAR = dict(alpha=-80.0, betas=(0.99, 0.2, 0.3))  # every weight of a lerp beyond one half


def a_shard(spans, *, param=torch.float32, grad=torch.float32, ema=True, k=7, offset=0, **hyper):
    """Random tensors that are NaN wherever no span is, starting ``offset`` elements into their storage."""
    n = max(stop for _, stop, *_ in spans) + 3
    inside = torch.zeros(n, dtype=torch.bool)
    for start, stop, *_ in spans:
        inside[start:stop] = True

    def tensor(values, dtype=torch.float32):
        storage = torch.full((n + offset,), math.nan, dtype=dtype)
        storage[offset:] = torch.where(inside, values, math.nan).to(dtype)
        return storage[offset:]

    return FlatShard(
        param=tensor(torch.randn(n), param),
        grad=tensor(torch.randn(n), grad),
        exp_avg=tensor(torch.randn(n)),
        exp_avg_sq=tensor(torch.rand(n) + 1e-3),
        grad_ema=tensor(torch.randn(n)) if ema else None,
        spans=tuple(Span(*span) for span in spans),
        coefficients=Coefficients.at_step(Hyperparameters(**hyper), k),
    )


def copied(shard):
    """In storages with the same offset, so that alignment is the same."""

    def copy(t):
        return t.clone() if t._base is None else t._base.clone()[t.storage_offset() :]

    tensors = {f.name: getattr(shard, f.name) for f in fields(shard)}
    return replace(shard, **{name: copy(t) for name, t in tensors.items() if isinstance(t, torch.Tensor)})


def run(kernel, shards, step_sizes=STEP_SIZES):
    shards = [copied(shard) for shard in shards]
    sums = torch.zeros(3, len(step_sizes), dtype=torch.float64)
    kernel.phase_one(shards, sums)
    kernel.phase_two(shards, step_sizes)
    return shards, sums


def same_bits(a, b):
    whole = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}
    return torch.equal(a.contiguous().view(whole[a.dtype]), b.contiguous().view(whole[b.dtype]))


def assert_agree(got, expected):
    (shards, sums), (references, expected_sums) = got, expected
    torch.testing.assert_close(sums, expected_sums, rtol=1e-6, atol=0)
    for shard, truth in zip(shards, references, strict=True):
        for name in ("param", *STATES):
            a, b = getattr(shard, name), getattr(truth, name)
            if a is None:
                continue
            # Of two float32 values that were rounded differently one in a thousand falls to another bfloat16.
            rtol = 8e-3 if a.dtype == torch.bfloat16 else 2e-6
            torch.testing.assert_close(a, b, rtol=rtol, atol=2e-6, equal_nan=True)


WITH_GAPS = [(0, 5, 0), (9, 1000, 1), (1001, 1001 + 2 * BLOCK + 77, 0), (40000, 40013, 1, False), (40020, 40021, 2)]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(LARGE_BATCH, id="large batch"),
        pytest.param(SMALL_BATCH, id="small batch"),
        pytest.param(FAR, id="far weights"),
        pytest.param({**LARGE_BATCH, "weight_decay": 0.0}, id="no decay"),
        pytest.param(dict(alpha=0.0, ema=False), id="LAMB"),
        pytest.param(dict(alpha=0.0, ema=True), id="alpha 0, average kept"),
        pytest.param({**LARGE_BATCH, "bias_correction": False}, id="vanilla"),
        pytest.param({**LARGE_BATCH, "eps": 0.0, "k": 1}, id="first step, eps 0"),
        pytest.param({**LARGE_BATCH, "grad": torch.bfloat16}, id="bf16 gradient"),
        pytest.param({**LARGE_BATCH, "param": torch.bfloat16, "grad": torch.bfloat16}, id="bf16 parameter"),
        pytest.param({**LARGE_BATCH, "offset": 1}, id="misaligned"),
        pytest.param({**SMALL_BATCH, "param": torch.bfloat16, "offset": 3, "ema": True}, id="all of it"),
    ],
)
def test_agrees_with_the_reference_over_spans_and_padding(options):
    shards = [a_shard(WITH_GAPS, **options), a_shard([(1, 300, 2)], **options)]
    assert all(native.serves(shard) for shard in shards)
    got, expected = run(native, shards), run(reference, shards)
    assert_agree(got, expected)
    for shard, before in zip(got[0], shards, strict=True):
        outside = torch.ones(len(shard.param), dtype=torch.bool)
        for start, stop, *_ in shard.spans:
            outside[start:stop] = False
            assert not shard.param[start:stop].isnan().any()
            assert (shard.exp_avg[start:stop] != before.exp_avg[start:stop]).float().mean() > 0.9
        for name in ("param", *STATES):
            if getattr(shard, name) is not None:
                assert getattr(shard, name)[outside].isnan().all()


def test_every_length_around_the_boundaries_of_vectors_tiles_and_blocks():
    lengths = [*range(1, 20), *(n + d for n in (512, BLOCK, 2 * BLOCK) for d in (-9, -1, 0, 1, 7, 8))]
    for n in lengths:
        shards = [a_shard([(1, 1 + n, 0)], offset=n % 3, **LARGE_BATCH)]
        assert_agree(run(native, shards), run(reference, shards))


def test_many_random_shards():
    generator = torch.Generator().manual_seed(5)
    kinds = itertools.product((torch.float32, torch.bfloat16), (torch.float32, torch.bfloat16), (True, False))
    shards = []
    for param, grad, ema in kinds:
        ends = torch.randint(1, 3 * BLOCK, (8,), generator=generator).sort().values.tolist()
        starts, stops = ends[0::2], ends[1::2]
        slots = [0, 1, 2, 0]
        spans = [(a, b, s, s != 1) for a, b, s in zip(starts, stops, slots, strict=True) if a < b]
        shards.append(a_shard(spans, param=param, grad=grad, ema=ema, **(LARGE_BATCH if ema else dict(alpha=0.0))))
    assert_agree(run(native, shards), run(reference, shards))


@pytest.mark.parametrize("options", [LARGE_BATCH, SMALL_BATCH, FAR, dict(alpha=0.0, ema=False)], ids=str)
def test_states_have_the_bits_of_the_torch_kernel(options):
    """So a run may change kernels without a seam, and flat shards may be cut anywhere: see alto.c."""
    shards = [a_shard(WITH_GAPS, **options)]
    (ours,), (theirs,) = run(native, shards)[0], run(chunked, shards)[0]
    for name in STATES:
        if getattr(ours, name) is not None:
            assert same_bits(getattr(ours, name), getattr(theirs, name)), name
    assert_agree(run(native, shards), run(chunked, shards))


@pytest.mark.parametrize("decay", [0.0, 1e-30, 0.9 * chunked.SMALLEST_DIVISOR, chunked.SMALLEST_DIVISOR, 1e-4, 30.0])
def test_the_torch_kernel_divides_by_the_decay_and_agrees_all_the_same(decay):
    shards = [a_shard(WITH_GAPS, **LARGE_BATCH, weight_decay=decay)]
    step_sizes = STEP_SIZES / (1 + decay)  # a step of 12 times the weight would show nothing but rounding
    assert_agree(run(chunked, shards, step_sizes), run(reference, shards, step_sizes))


def test_the_same_bits_whatever_the_number_of_threads():
    shards = [a_shard([(0, 40 * BLOCK + 13, 0)], **LARGE_BATCH), a_shard([(1, 9 * BLOCK, 0)], **LARGE_BATCH)]
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 3, 8):
            torch.set_num_threads(threads)
            results.append(run(native, shards))
    finally:
        torch.set_num_threads(before)
    (first, first_sums), *others = results
    for shards, sums in others:
        assert same_bits(sums, first_sums)
        for a, b in zip(shards, first, strict=True):
            assert all(same_bits(getattr(a, name), getattr(b, name)) for name in ("param", *STATES))


def test_the_bits_of_an_element_do_not_depend_on_its_place():
    """A shard that begins elsewhere must update the elements it shares with another alike."""
    whole = a_shard([(0, 5000, 0)], **LARGE_BATCH)
    tensors = {name: getattr(whole, name)[3:4444] for name in ("param", "grad", *STATES)}
    part = replace(whole, **tensors, spans=(Span(0, 4441, 0),))
    ((a,), _), ((b,), _) = run(native, [whole]), run(native, [part])
    assert all(same_bits(getattr(a, name)[3:4444], getattr(b, name)[:4441]) for name in ("param", *STATES))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_comes_through(bad):
    for options in (LARGE_BATCH, SMALL_BATCH, dict(alpha=0.0, ema=False)):
        shards = [a_shard([(0, 1000, 0), (1000, 1100, 1)], **options)]
        shards[0].grad[[3, 517]] = bad
        (got,), sums = run(native, shards)
        (truth,), expected = run(reference, shards)
        for name in ("param", *STATES):
            if getattr(got, name) is not None:
                assert torch.equal(getattr(got, name).isfinite(), getattr(truth, name).isfinite()), name
        assert torch.equal(sums.isfinite(), expected.isfinite())
        assert not sums[1, 0].isfinite()
        assert sums[1, 1].isfinite()


def test_sums_keep_their_digits():
    n = 1 << 20
    shard = a_shard([(0, n, 0)], **LARGE_BATCH)
    _, sums = run(native, [shard])
    exact = math.fsum((shard.param[:n].double() ** 2).tolist())
    assert sums[0, 0].item() == pytest.approx(exact, rel=1e-14)
    shard.param.mul_(1e-30)  # squares of these would be 0 in float32
    assert run(native, [shard])[1][0, 0].item() == pytest.approx(exact * 1e-60, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_what_c_does_not_serve_goes_to_torch(dtype):
    p, q = (nn.Parameter(torch.randn(700).to(dtype)) for _ in range(2))
    other, another = (nn.Parameter(torch.ones(30)) for _ in range(2))
    q.data.copy_(p)
    a, b = ALTO([p, other], kernel="native"), ALTO([q, another], kernel="torch")
    for _ in range(3):
        p.grad, other.grad = torch.randn(700).to(dtype), torch.randn(30)
        q.grad, another.grad = p.grad.clone(), other.grad.clone()
        a.step(), b.step()
    assert torch.equal(p, q)
    torch.testing.assert_close(other, another, rtol=1e-6, atol=0)


def test_tensors_without_memory_of_their_own_are_left_to_torch():
    shard = a_shard([(0, 100, 0)], **LARGE_BATCH)
    assert native.serves(shard)
    for grad in (
        torch.ones(()).expand(103),
        torch.ones(103, device="meta"),
        torch.randn(206)[::2],
        torch._neg_view(torch.ones(103)),
    ):
        assert not native.serves(replace(shard, grad=grad))
    (truth,), _ = run(reference, [replace(shard, grad=torch.ones(103))])
    sums = torch.zeros(3, 3, dtype=torch.float64)
    spread = replace(shard, grad=torch.ones(()).expand(103))
    native.phase_one([spread], sums)
    native.phase_two([spread], STEP_SIZES)
    torch.testing.assert_close(spread.param[:100], truth.param[:100], rtol=1e-6, atol=1e-6)


class Wrapper(torch.Tensor):
    """As torchao's float8 weights are: no memory of its own, and operations work on the tensor inside."""

    KEPT = {torch.ops.aten.detach.default, torch.ops.aten.view.default, torch.ops.aten.copy_.default}

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inner = tree_map_only(cls, lambda wrapper: wrapper.inner, (args, kwargs or {}))
        out = func(*inner[0], **inner[1])
        return cls(out) if func in cls.KEPT else out


@pytest.mark.parametrize("kernel", ["native", "torch", "reference"])
def test_a_parameter_without_memory_of_its_own(kernel):
    """Kernels that go by addresses would write to address 0."""
    torch.manual_seed(3)
    start = torch.randn(6, 5)
    wrapped, plain = nn.Parameter(Wrapper(start.clone())), nn.Parameter(start.clone())
    assert (type(wrapped), wrapped.data_ptr()) == (Wrapper, 0)
    assert memory_of(wrapped, *(torch.zeros(6, 5) for _ in range(3)), None) is None
    optimizers = [ALTO([wrapped], kernel=kernel), ALTO([plain], kernel=kernel)]
    for _ in range(3):
        wrapped.grad = plain.grad = torch.randn(6, 5)
        for optimizer in optimizers:
            optimizer.step()
    assert not torch.equal(plain, start)
    torch.testing.assert_close(wrapped.inner, plain.detach(), rtol=1e-6, atol=1e-7)


def test_fifty_steps_of_the_optimizer():
    results = {}
    for kernel in ("native", "torch", "reference"):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.LayerNorm(300), nn.Linear(300, 7))
        groups = [
            {"params": [p for p in model.parameters() if p.ndim == 2]},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ]
        optimizer = ALTO(groups, kernel=kernel, lr=0.02)
        x = torch.randn(64, 40)
        for _ in range(50):
            optimizer.zero_grad()
            (model(x) - x[:, :7].sin()).square().mean().backward()
            optimizer.step()
        results[kernel] = [p.detach() for p in model.parameters()]
    for kernel in ("native", "torch"):
        for a, b in zip(results[kernel], results["reference"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


# -- building ------------------------------------------------------------------------------------------------------


@pytest.fixture
def build(monkeypatch, tmp_path):
    """What a fresh process would find, in this one."""
    monkeypatch.delenv("CC", raising=False)

    def found(**environment):
        for name, value in {"ALTO_CACHE_DIR": str(tmp_path / "cache"), **environment}.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        return native_build.library()

    return found


@pytest.fixture
def _forgotten():
    """As in a process that has not looked for the library yet; and again afterwards."""
    native._library.cache_clear(), native.available.cache_clear()
    yield
    native._library.cache_clear(), native.available.cache_clear()


def test_many_processes_build_at_once_and_leave_one_private_library(build, tmp_path):
    context = multiprocessing.get_context("fork")
    together = context.Barrier(4)

    def one_rank():
        together.wait()
        sys.exit(0 if build().alto_span_size() == native.SPAN.size else 1)

    ranks = [context.Process(target=one_rank) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * 4
    (library,) = (tmp_path / "cache").iterdir()
    for path in (tmp_path / "cache", library):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_what_was_built_needs_no_compiler_and_is_built_anew_if_damaged(build, tmp_path):
    path = os.environ["PATH"]
    build()
    (library,) = (tmp_path / "cache").iterdir()
    made = library.stat()
    build(PATH="")
    assert library.stat().st_mtime_ns == made.st_mtime_ns
    content = library.read_bytes()
    library.unlink()
    library.write_bytes(content[:3000])  # the disk was full; the loader would die of it
    library.chmod(0o700)
    with pytest.raises(ValueError, match="no C compiler"):
        build(PATH="")
    build(PATH=path)
    assert library.stat().st_size == made.st_size


@pytest.mark.usefixtures("_forgotten")
def test_without_a_compiler_there_is_one_warning_and_the_torch_kernel(monkeypatch, tmp_path):
    monkeypatch.setenv("ALTO_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    p = nn.Parameter(torch.ones(3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer = ALTO([p], kernel="auto")
            for _ in range(2):
                p.grad = torch.ones(3)
                optimizer.step()
    (warning,) = caught
    assert "C kernel is not available" in str(warning.message)
    assert "no C compiler was found: install one" in str(warning.message)
    assert kernel_for("auto", torch.device("cpu")) is chunked
    with pytest.raises(
        ValueError, match=r'"native" cannot be had: no C compiler was found.* use kernel="torch"'
    ) as info:
        ALTO([p], kernel="native")
    assert isinstance(info.value, RuntimeError)
    ALTO([p], kernel="torch")


def test_a_compiler_that_fails_or_lies_or_is_not_there(build, tmp_path):
    for name, body, message in (
        ("fails", "echo nonsense on line 3 >&2; exit 1", "fails failed on alto.c: nonsense on line 3"),
        ("lies", "exit 0", "lies failed on alto.c: .*file too short"),
        ("speaks latin", r"printf 'erreur: cha\356ne' >&2; exit 1", "failed on alto.c: erreur: cha\ufffdne"),
    ):
        compiler = tmp_path / name
        compiler.write_text(f"#!/bin/sh\n{body}\n")
        compiler.chmod(0o755)
        with pytest.raises(native_build.NativeUnavailable, match=message):
            build(CC=shlex.quote(str(compiler)))
    with pytest.raises(native_build.NativeUnavailable, match="is not a command: No closing quotation"):
        build(CC="gcc'")
    with pytest.raises(ValueError, match="CC='no-such-cc -m64' names was not found"):
        build(CC="no-such-cc -m64")
    assert list((tmp_path / "cache").iterdir()) == []


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_compiler_that_hangs_is_ended_with_what_it_started(build, tmp_path, monkeypatch):
    """What it starts has its output, and would be waited for."""
    compiler = tmp_path / "hangs"
    compiler.write_text(f"#!/bin/sh\nsleep 60 &\necho $! >{shlex.quote(str(tmp_path / 'started'))}\nwait\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(native_build, "_TIMEOUT", 1.5)
    began = time.monotonic()
    with pytest.raises(native_build.NativeUnavailable, match="did not run: .*timed out"):
        build(CC=str(compiler))
    assert time.monotonic() - began < 20
    started = int((tmp_path / "started").read_text())
    while is_running(started):
        assert time.monotonic() - began < 20, "what the compiler had started goes on"
        time.sleep(0.01)


def test_a_cache_that_others_could_replace_is_not_used(build, tmp_path):
    parent = tmp_path / "shared"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(native_build.NativeUnavailable, match=rf"{parent} can be written to by others \(chmod go-w"):
        build(ALTO_CACHE_DIR=str(parent / "cache"))
    parent.chmod(0o1777)  # as /tmp is: what is there cannot be replaced
    build(ALTO_CACHE_DIR=str(parent / "cache"))


def test_a_compiler_that_does_not_know_this_cpu(build, tmp_path):
    compiler = tmp_path / "old"
    compiler.write_text('#!/bin/sh\ncase "$*" in *=native*) exit 1;; esac\nexec cc "$@"\n')
    compiler.chmod(0o755)
    assert build(CC=str(compiler)).alto_span_size() == native.SPAN.size


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other CPUs have one width")
def test_the_same_bits_whatever_the_width_of_vectors(build, monkeypatch):
    """Ranks on different CPUs, or a run that moves to another, must agree."""
    lengths = (5 * BLOCK + 13, 24, 17, 9, 8, 7)
    options = (LARGE_BATCH, dict(alpha=0.0, ema=False), {**LARGE_BATCH, "grad": torch.bfloat16})
    shards = [a_shard([(1, 1 + n, i % 3)], **each) for i, n in enumerate(lengths) for each in options]
    first, first_sums = run(native, shards)
    for narrower in ("-mno-avx512f", "-mno-avx512f -mprefer-vector-width=128"):
        loaded = build(CC=f"cc {narrower}")
        monkeypatch.setattr(native, "_library", lambda loaded=loaded: loaded)
        again, sums = run(native, shards)
        assert same_bits(sums, first_sums)
        for a, b in zip(again, first, strict=True):
            assert all(same_bits(getattr(a, name), getattr(b, name)) for name in ("param", "exp_avg", "exp_avg_sq"))


def test_a_cache_that_others_could_write_to_is_refused(build, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(ValueError, match=r"can be written to by others \(chmod go-w"):
        build()
    (tmp_path / "cache").chmod(0o700)
    build()
    (library,) = (tmp_path / "cache").iterdir()
    library.chmod(0o722)
    with pytest.raises(PermissionError, match="can be written to by others"):
        build()


def test_a_cache_of_somebody_else_is_refused(build, tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ValueError, match="belongs to another user"):
        build()


def test_a_cache_below_a_directory_of_somebody_else_is_refused(build, tmp_path, monkeypatch):
    """Its owner could put another in its place."""
    parent, status_of = (tmp_path / "theirs").resolve(), Path.stat
    parent.mkdir(mode=0o700)

    def of_another(path, **options):
        status = status_of(path, **options)
        return os.stat_result([*status[:4], status.st_uid + 4711, *status[5:]]) if path == parent else status

    monkeypatch.setattr(Path, "stat", of_another)
    with pytest.raises(native_build.NativeUnavailable, match=f"{parent} belongs to another user"):
        build(ALTO_CACHE_DIR=str(parent / "cache"))


def test_another_c_library_gets_a_library_of_its_own(monkeypatch):
    """Containers with different ones may share a home."""
    names = set()
    for version in (("glibc", "2.36"), ("glibc", "2.28"), ("", "")):
        monkeypatch.setattr(platform, "libc_ver", lambda version=version: version)
        names.add(native_build._fingerprint())
    assert len(names) == 3


def test_without_a_home_the_library_is_built_for_the_process(build, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    loaded = build(ALTO_CACHE_DIR=None, XDG_CACHE_HOME=str(tmp_path / "file"))
    assert loaded.alto_span_size() == native.SPAN.size
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(ValueError, match="ALTO_CACHE_DIR=.* cannot be used"):
        build(ALTO_CACHE_DIR=str(tmp_path / "file"))


def test_blocks():
    assert native._found().alto_block() == BLOCK
    assert kernel_for("auto", torch.device("cpu")) is native
    assert kernel_for("auto", torch.device("cuda"), proved=False) is foreach.kernel
    assert kernel_for("torch", torch.device("cuda")) is foreach.kernel


def test_a_step_after_a_fork(monkeypatch):
    """A pool of threads would be gone in the child, and its first step would wait for ever."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    shards = [a_shard([(0, 20 * BLOCK, 0)], **LARGE_BATCH)]
    again = [copied(shard) for shard in shards]
    (expected,), _ = run(native, shards)
    sums = torch.zeros(3, 3, dtype=torch.float64)
    child = os.fork()
    if child == 0:
        native.phase_one(again, sums)
        native.phase_two(again, STEP_SIZES)
        same = bytes(memoryview(again[0].param.numpy())) == bytes(memoryview(expected.param.numpy()))
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


WITHOUT_THREADS = """
import resource, sys, threading, torch
from alto_distributed.kernels.cpu import kernel as native
from tests.unit.test_native import BLOCK, LARGE_BATCH, a_shard, run
torch.manual_seed(0)
shards = [a_shard([(0, 20 * BLOCK, 0)], **LARGE_BATCH)]
torch.get_num_threads = lambda: 3
native._found()
if sys.argv[1] == "none":
    size = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (size * 1024 + 2**22, resource.RLIM_INFINITY))  # less than a stack
    run.__globals__["copied"] = lambda shard: shard
    try:
        threading.Thread(target=print).start()
        sys.exit("a thread could be started")
    except RuntimeError:
        pass
(shard,), sums = run(native, shards)
print(sums.tolist(), shard.param.double().sum().item(), shard.grad_ema.double().sum().item())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits memory as Linux does")
def test_threads_that_cannot_be_started_leave_their_share_to_the_others():
    said = [
        subprocess.run(
            [sys.executable, "-c", WITHOUT_THREADS, threads], cwd=REPO, capture_output=True, text=True, check=True
        )
        for threads in ("some", "none")
    ]
    assert said[0].stdout == said[1].stdout != ""


def test_phase_two_works_on_the_shards_it_is_given():
    """It uses what phase one has prepared if that is given, and prepares anew if not. Two steps may cross."""
    first, second = (a_shard([(0, 700, 0)], **LARGE_BATCH) for _ in range(2))
    expected = [run(native, [shard])[0][0].param for shard in (first, second)]
    sums = torch.zeros(3, 3, dtype=torch.float64)
    one, other = copied(first), copied(second)
    prepared = native.phase_one([one], sums)
    native.phase_one([other], sums)
    native.phase_two([one], STEP_SIZES, prepared)
    native.phase_two([other], STEP_SIZES)
    assert same_bits(one.param, expected[0])
    assert same_bits(other.param, expected[1])


@pytest.mark.parametrize("limits", [(65536, 320, 1 << 30), (50, 2, 4000), (64, 7, 0)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        LARGE_BATCH,
        SMALL_BATCH,
        dict(alpha=0.0, ema=False),
        {**LARGE_BATCH, "weight_decay": 0.0},
        {**LARGE_BATCH, "weight_decay": 1e-30},
        {**LARGE_BATCH, "param": torch.bfloat16, "grad": torch.bfloat16},
    ],
    ids=str,
)
def test_foreach_has_the_bits_of_the_torch_kernel(options, limits, monkeypatch):
    """In one group or many, with directions kept for phase two or computed again."""
    for name, limit in zip(("BLOCK", "BLOCKS", "KEPT_BYTES"), limits, strict=True):
        monkeypatch.setattr(foreach, name, limit)
    shards = [a_shard(WITH_GAPS, **options), a_shard([(1, 300, 2)], **options)]
    (ours, sums), (theirs, expected) = run(foreach.kernel, shards), run(chunked, shards)
    assert torch.equal(sums[2] > 0, expected[2] > 0)
    assert_agree((ours, sums[:2]), (theirs, expected[:2]))
    for one, other in zip(ours, theirs, strict=True):
        for name in STATES:
            assert getattr(one, name) is None or same_bits(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize("kernel", [native, chunked, foreach.kernel, reference])
@pytest.mark.parametrize("decay", [0.0, 1e-30, 0.01])
def test_a_gradient_near_the_largest_number_leaves_weights_finite(kernel, decay):
    """A product that overflowed was divided by an infinity, exp_avg_sq's root."""
    shard = a_shard([(0, 700, 0)], **{**LARGE_BATCH, "weight_decay": decay})
    shard.grad[:] = torch.finfo(torch.float32).max * 0.88
    (got,), _ = run(kernel, [shard])
    assert got.exp_avg_sq[:700].isinf().all()
    assert got.param[:700].isfinite().all()


@pytest.mark.parametrize("kernel", [native, chunked, reference])
def test_gradients_that_are_not_zero_are_counted(kernel):
    """Also those whose squares are 0 in float32, and NaN; elements of padding are not."""
    shard = a_shard([(0, 40, 0), (44, 44 + BLOCK + 9, 1, False), (20000, 20007, 2)], **LARGE_BATCH)
    shard.grad.zero_()
    shard.grad[[3, 45, 44 + BLOCK + 8]] = torch.tensor([1e-45, math.nan, -1e-30])
    shard.grad[41] = 7.0
    _, sums = run(kernel, [shard])
    assert sums[2].tolist() == [1.0, 2.0, 0.0]


@pytest.mark.parametrize("kernel", [native, chunked, foreach.kernel, reference])
@pytest.mark.parametrize("eps", [1e-6, 0.0])
def test_a_step_size_of_zero_leaves_weights_alone(kernel, eps):
    """Also where there has been no gradient yet, and eps1 is 0: r is 0/0 there."""
    for dtype in (torch.float32, torch.bfloat16):
        shard = a_shard([(1, 600, 0), (600, 700, 1)], param=dtype, **LARGE_BATCH, eps=eps)
        for tensor in (shard.exp_avg, shard.exp_avg_sq, shard.grad_ema, shard.grad):
            tensor[1:600] = 0
        (got,), sums = run(kernel, [shard], torch.tensor([0.0, 0.1, 0.1], dtype=torch.float64))
        assert same_bits(got.param[:600], shard.param[:600])
        assert (got.param[600:700] != shard.param[600:700]).all()
        assert (sums[2] > 0).tolist() == [False, True, False]


def test_shards_that_are_not_in_a_step_are_left_alone():
    """Their records stay with the plan, so that experts without tokens do not cost new ones."""
    shards = [
        a_shard(WITH_GAPS, **LARGE_BATCH),
        a_shard([(1, 300, 2)], **LARGE_BATCH),
        a_shard([(0, 9, 1)], **SMALL_BATCH),
    ]
    for place, shard in enumerate(shards):
        shard.place = place
    kept = {}
    for present in ([0, 1], [0, 1, 2], [2], [1, 0], [], [0, 1, 2]):
        expected = [copied(shard) for shard in shards]
        sums, expected_sums = torch.zeros(3, 3, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)
        batch = Batch([shards[i] for i in present], kept)
        prepared = native.phase_one(batch, sums)
        native.phase_two(batch, STEP_SIZES, prepared)
        others = [expected[i] for i in present]
        native.phase_one(others, expected_sums)
        native.phase_two(others, STEP_SIZES)
        torch.testing.assert_close(sums, expected_sums, rtol=1e-14, atol=0)
        for shard, other in zip(shards, expected, strict=True):
            assert all(same_bits(getattr(shard, name), getattr(other, name)) for name in ("param", *STATES))


def test_one_thread_for_many_elements_is_told_once(monkeypatch):
    """torchrun sets OMP_NUM_THREADS=1, and nobody notices that steps of offloaded states take many times as long."""
    monkeypatch.setattr(native, "_MANY", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    native._warn_of_one_thread.cache_clear()
    p = torch.ones(101)
    p.grad = torch.ones(101)
    optimizer = ALTO([p], kernel="native")
    with pytest.warns(UserWarning, match=r"more than 100 elements on one thread, and this process may use 8 cores"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    native._warn_of_one_thread.cache_clear()
