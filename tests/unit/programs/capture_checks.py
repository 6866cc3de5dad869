"""Steps of a capturable ALTO, captured and replayed on the pretend accelerator; run by tests/unit/test_capture.py.

    TRITON_INTERPRET=1 python -m tests.unit.programs.capture_checks OUTCOMES.json

What a replay gives is compared with ordinary steps of an ordinary ALTO on the same device.
"""

import contextlib
import copy
import gc
import sys
import warnings
import weakref

import pytest
import torch
from torch import nn

from alto_distributed import ALTO, LAMB, collecting
from alto_distributed.kernels.triton import step as triton_step
from tests.helpers import pretend
from tests.helpers.checks import run
from tests.helpers.graph import Graph

pretend.install()
DEVICE = torch.device("pretend", 0)
SHAPES = ((5, 7), (33,), (4, 3, 2), (1, 1))
HYPER = {"betas": (0.9, 0.8, 0.95), "alpha": -3.0, "weight_decay": 0.02}


def params(dtype=torch.float32):
    torch.manual_seed(3)
    return [nn.Parameter(torch.randn(shape).to(DEVICE, dtype)) for shape in SHAPES]


def built(some, lr, cls=ALTO, **options):
    groups = [{"params": some[:2]}, {"params": some[2:], "weight_decay": 0.0, "lr": lr}]
    return cls(groups, lr=lr, **{**({} if cls is LAMB else HYPER), **options})


def gradients(k, some, factor=1.0):
    generator = torch.Generator().manual_seed(k)
    return [(torch.randn(p.shape, generator=generator) * factor).to(DEVICE, p.dtype) for p in some]


def rate(k):
    return 0.05 / (1 + k)


def ordinary(steps, bad=(), dtype=torch.float32, cls=ALTO, **options):
    some = params(dtype)
    optimizer = built(some, rate(0), cls, **options)
    for k in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(k)
        for p, g in zip(some, gradients(k, some), strict=True):
            p.grad = g.fill_(torch.nan) if k in bad else g
        optimizer.step()
    return some, optimizer


def replayed(steps, bad=(), dtype=torch.float32, warm=2, cls=ALTO, **options):
    """Two steps outside of the graph, the next is captured and replayed with new gradients and rates in its tensors."""
    some = params(dtype)
    lr = torch.tensor(rate(0), dtype=torch.float64).to(DEVICE)
    optimizer = built(some, lr, cls, capturable=True, **options)
    static = [torch.zeros_like(p) for p in some]
    for p, g in zip(some, static, strict=True):
        p.grad = g
    graph = Graph(DEVICE)
    for k in range(steps):
        lr.fill_(rate(k))
        for old, new in zip(static, gradients(k, some), strict=True):
            old.copy_(new.fill_(torch.nan) if k in bad else new)
        if k < warm:
            optimizer.step()
            continue
        if k == warm:
            before = [[t.clone() for t in (p.data, *optimizer.state[p].values())] for p in some]
            with graph.capture():
                optimizer.step()
            for p, olds in zip(some, before, strict=True):  # what the capture did, a real one would not have done
                for t, old in zip((p.data, *optimizer.state[p].values()), olds, strict=True):
                    t.copy_(old)
            if optimizer._skipped._on_device is not None:
                optimizer._skipped._on_device.zero_()
        interpreted = options.get("kernel") == "triton"  # Triton's interpreter copies its arguments
        with contextlib.nullcontext() if interpreted else pretend.no():
            graph.replay()
    assert graph.launches > 5
    return some, optimizer


def same(one, other, **bounds):
    (some, mine), (others, theirs) = one, other
    for p, q in zip(some, others, strict=True):
        torch.testing.assert_close(p.cpu(), q.cpu(), **bounds)
        assert float(mine.state[p]["step"]) == float(theirs.state[q]["step"]), "step counts"
        for key in ("exp_avg", "exp_avg_sq", "grad_ema"):
            if key in theirs.state[q]:
                torch.testing.assert_close(mine.state[p][key].cpu(), theirs.state[q][key].cpu(), **bounds)


CLOSE = {"rtol": 2e-6, "atol": 1e-7}
OPTIONS = [
    {},
    {"layerwise": "all"},
    {"layerwise": "none"},
    {"bias_correction": False},
    {"maximize": True},
    {"eps": (0.0, 1e-6, 1e-10)},
    {"trust_clip": (0.1, 2.0)},
    {"grad_ema_dtype": "bfloat16", "exp_avg_dtype": "bfloat16"},
]


def check_replays_are_steps():
    for options in OPTIONS:
        same(replayed(7, **options), ordinary(7, **options), **CLOSE)


def check_replays_of_other_precisions():
    same(replayed(6, dtype=torch.bfloat16), ordinary(6, dtype=torch.bfloat16), rtol=2**-7, atol=1e-3)
    same(replayed(6, dtype=torch.float64), ordinary(6, dtype=torch.float64), rtol=1e-12, atol=1e-14)


def check_lamb():
    same(replayed(6, cls=LAMB), ordinary(6, cls=LAMB), **CLOSE)


def served(device):
    return triton_step.kernel


def check_triton_in_a_graph():
    """The launches of the real kernel, interpreted; addresses and counters reach it as they would on a GPU."""
    real, available = triton_step.kernel_on, triton_step.available
    triton_step.kernel_on, triton_step.available = served, lambda device: True
    try:
        for options in (*OPTIONS[:4], {"grad_ema_dtype": "bfloat16"}):
            same(replayed(6, kernel="triton", **options), ordinary(6, kernel="torch", **options), **CLOSE)
        same(
            replayed(7, bad=(2, 4), kernel="triton", skip_nonfinite=True), ordinary(7, bad=(2, 4), skip_nonfinite=True)
        )
    finally:
        triton_step.kernel_on, triton_step.available = real, available


def check_steps_that_a_graph_skips():
    """A replay with NaN changes nothing, also not the count; and the tally is right."""
    mine = replayed(8, bad=(3, 5, 6), skip_nonfinite=True)
    theirs = ordinary(8, bad=(3, 5, 6), skip_nonfinite=True)
    same(mine, theirs, **CLOSE)
    assert mine[1].skipped_steps == theirs[1].skipped_steps == 3
    assert mine[1].skipped_in_a_row == theirs[1].skipped_in_a_row == 0
    bad_at_the_end = replayed(5, bad=(3, 4), skip_nonfinite=True)[1]
    assert bad_at_the_end.skipped_in_a_row == 2


def check_a_grad_scaler_in_a_graph():
    some = params()
    optimizer = built(some, torch.tensor(0.05).to(DEVICE), capturable=True)
    static = [torch.zeros_like(p) for p in some]
    scale, found_inf = torch.full((1,), 8.0).to(DEVICE), torch.zeros(1).to(DEVICE)
    optimizer.grad_scale, optimizer.found_inf = scale, found_inf
    others = params()
    plain = built(others, 0.05)
    graph = Graph(DEVICE)
    for k, (size, bad) in enumerate([(8, 0), (8, 0), (8, 0), (4, 1), (2, 0), (16, 0)]):
        scale.fill_(size)
        found_inf.fill_(bad)
        for p, old, new in zip(some, static, gradients(k, some, size), strict=True):
            p.grad = old.copy_(new)
        if k < 2:
            optimizer.step()
        else:
            if k == 2:
                saved = [[t.clone() for t in (p.data, *optimizer.state[p].values())] for p in some]
                with graph.capture():
                    optimizer.step()
                for p, olds in zip(some, saved, strict=True):
                    for t, old in zip((p.data, *optimizer.state[p].values()), olds, strict=True):
                        t.copy_(old)
            graph.replay()
        if not bad:
            for q, g in zip(others, gradients(k, others), strict=True):
                q.grad = g
            plain.step()
    same((some, optimizer), (others, plain), **CLOSE)


def check_checkpoints_go_both_ways():
    for first, second in ((True, False), (False, True)):
        some = params()
        one = built(some, 0.05, capturable=first)
        others = params()
        two = built(others, 0.05, capturable=second)
        for k in range(3):
            for p, g in zip(some, gradients(k, some), strict=True):
                p.grad = g
            one.step()
        assert {s["step"].device.type for s in one.state.values()} == {"pretend" if first else "cpu"}
        two.load_state_dict(copy.deepcopy(one.state_dict()))
        for p, q in zip(some, others, strict=True):
            q.data.copy_(p.data)
        for some_, optimizer in ((some, one), (others, two)):
            for p, g in zip(some_, gradients(3, some_), strict=True):
                p.grad = g
            optimizer.step()
        same((some, one), (others, two), **CLOSE)
        assert {s["step"].device.type for s in two.state.values()} == {"pretend" if second else "cpu"}


def refusal(optimizer):
    try:
        with Graph(DEVICE).capture(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
    except ValueError as error:
        return str(error)
    return ""


def check_what_is_refused():
    some = params()
    for p, g in zip(some, gradients(0, some), strict=True):
        p.grad = g
    plain = built(some, 0.05)
    plain.step()
    assert "Build it with capturable=True" in refusal(plain)
    cold = built(some, 0.05, capturable=True)
    assert "no step was taken with these parameters yet" in refusal(cold)
    cold.step()
    assert refusal(cold) == ""
    some[0].grad = None
    assert "gradients of other parameters" in refusal(cold)
    flags = built(some, 0.05, capturable=True)
    flags.step()
    flags.grad_scale, flags.found_inf = None, torch.zeros(1).to(DEVICE)
    assert "no step was skipped or counted on the device yet" in refusal(flags)
    for options, words in (({"diagnostics_every": 2}, "which of its steps"), ({"kernel": "reference"}, "use")):
        with pytest.raises(ValueError, match=words):
            built(params(), 0.05, capturable=True, **options)


def check_tensors_on_two_devices():
    """The device of the first parameter alone was looked at: [cpu, cuda] was captured unnoticed."""
    for where in ("cpu", DEVICE):
        some = [nn.Parameter(torch.ones(3, device=where)), *params()]
        for p in some:
            p.grad = torch.ones_like(p)
        plain = ALTO(some)
        plain.step()
        assert "Build it with capturable=True" in refusal(plain)
        optimizer = ALTO(some, capturable=True)
        optimizer.step()
        assert ("on the CPU or on two devices" in refusal(optimizer)) == (where == "cpu")


def check_what_a_graph_reads_stays():
    """Later steps replaced tables of the kernel and of vector_lr; the graph went on reading where they had been."""
    real, available = triton_step.kernel_on, triton_step.available
    triton_step.kernel_on, triton_step.available = served, lambda device: True
    try:
        some = params()
        lr = torch.tensor(0.05).to(DEVICE)
        optimizer = ALTO(
            [{"params": some[:2], "lr": lr}, {"params": some[2:], "weight_decay": 0.0}],
            kernel="triton",
            vector_lr=0.5,
            capturable=True,
        )
        static = gradients(0, some)
        for p, g in zip(some[:3], static, strict=False):
            p.grad = g
        optimizer.step()
        plan, _ = optimizer._plan()
        table, _ = plan.kept_by_kernels[DEVICE]["triton", None]
        read = [*(launch.chunks for launch in table.tables.launches), table.tables.totals, plan._factors[1], lr]
        refs = [weakref.ref(tensor) for tensor in read]
        graph = Graph(DEVICE)
        with graph.capture():
            optimizer.step()
        graph._recorded.clear()  # a real graph keeps addresses, and no tensor
        some[3].grad = static[3]
        for group in optimizer.param_groups:
            group.update(vector_lr=0.25, lr=0.01)
        del table, plan, read, lr
        optimizer.step()
        optimizer.set_layouts({})
        optimizer.step()
        gc.collect()
        assert [place for place, ref in enumerate(refs) if ref() is None] == []
    finally:
        triton_step.kernel_on, triton_step.available = real, available


def check_a_rate_on_the_host_is_warned_of():
    some = params()
    for p, g in zip(some, gradients(0, some), strict=True):
        p.grad = g
    optimizer = built(some, 0.05, capturable=True)
    optimizer.step()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with Graph(DEVICE).capture():
            optimizer.step()
    assert any("learning rate on the host" in str(w.message) for w in told)


def check_a_graph_is_what_replays():
    """The instrument: if the counters do not move, or the rate stays, the replays are not those steps."""
    moved = replayed(6)[0][0].detach().cpu()
    for broken in ("count_one_more", "rate"):
        where = collecting if broken == "count_one_more" else sys.modules[__name__]
        kept = getattr(where, broken)
        try:
            setattr(where, broken, (lambda *_: []) if broken == "count_one_more" else lambda k: 0.05)
            other = replayed(6)[0][0].detach().cpu()
        finally:
            setattr(where, broken, kept)
        assert not torch.allclose(moved, other, rtol=1e-3), broken


if __name__ == "__main__":
    run({name: check for name, check in list(globals().items()) if name.startswith("check_")})
