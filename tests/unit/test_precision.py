"""Precision, memory and memory formats: what holds whatever the size and layout of a tensor."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alto_distributed import ALTO
from alto_distributed.hyperparameters import Hyperparameters
from alto_distributed.kernels import Coefficients, FlatShard, Span, chunked
from alto_distributed.states import new_state
from tests.helpers.oracle import PaperALTO

HYPER = dict(lr=0.01, betas=(0.99, 0.9, 0.99), alpha=-5.0, eps=(1e-6, 1e-6, 1e-10), weight_decay=1e-2)


@pytest.mark.parametrize("kernel", ["torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_parameters_are_computed_in_float32(dtype, kernel):
    """Equal to a float32 run whose weights are rounded after every step: no rounding anywhere else."""
    low = nn.Parameter(torch.randn(40, 50).to(dtype))
    wide = nn.Parameter(low.detach().float())
    a, b = ALTO([low], kernel=kernel, **HYPER), ALTO([wide], kernel=kernel, **HYPER)
    for _ in range(20):
        low.grad = torch.randn(40, 50).to(dtype)
        wide.grad = low.grad.float()
        a.step()
        b.step()
        wide.data.copy_(wide.to(dtype))
        assert torch.equal(low.float(), wide)
    for key in ALTO.state_keys:
        assert a.state[low][key].dtype == torch.float32
        assert torch.equal(a.state[low][key], b.state[wide][key])


@pytest.mark.slow
def test_norms_keep_their_digits_over_1e8_elements():
    """A float32 running sum of equal numbers stops growing at 2^24 of them; 1e8 is six times that."""
    n = 100_000_000
    theta, g = torch.full((n,), 0.1), torch.full((n,), 0.3)
    c = Coefficients.at_step(Hyperparameters(alpha=0.0, weight_decay=0.5), 1)
    sums = torch.zeros(3, 1, dtype=torch.float64)
    piece = FlatShard(theta, g, torch.zeros(n), torch.zeros(n), None, (Span(0, n, 0),), c)
    chunked.phase_one([piece], sums)
    r = 1.0 / (1 + 1e-6 / 0.3) + 0.5 * 0.1  # m^ / (sqrt v^ + eps1) = g / (|g| + eps1)
    norms = sums.sqrt().squeeze()
    assert norms[0].item() == pytest.approx(0.1 * n**0.5, rel=1e-6)
    assert norms[1].item() == pytest.approx(r * n**0.5, rel=1e-6)


def test_extreme_magnitudes_do_not_overflow_the_norms():
    """Squares of 1e-30 and 1e25 do not fit float32; the ratio must not become 0, 1 or infinity for it."""
    for scale in (1e-30, 1e25):
        theta = torch.randn(64, 64).mul_(scale)
        p = nn.Parameter(theta.clone())
        optimizer = ALTO([p], layerwise="matrices", weight_decay=0.0, eps=(1e-6, 0, 0), lr=0.1)
        p.grad = torch.randn(64, 64)
        optimizer.step()
        moved = ((p.detach() - theta).double().norm() / theta.double().norm()).item()
        assert moved == pytest.approx(0.1, rel=1e-4)  # |step| = lr * |theta|, whatever the scale


class LargestNewTensor(TorchDispatchMode):
    """Bytes of the largest storage that an operation makes, views and in-place results aside."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in known:
                self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_makes_no_full_size_temporaries(dtype):
    n = 20 * chunked.CPU_CHUNK
    p = nn.Parameter(torch.randn(n // 64, 64).to(dtype))
    p.grad = torch.randn_like(p)
    results = {}
    for kernel in ("torch", "reference"):
        optimizer = ALTO([p], kernel=kernel)
        optimizer.step()
        with LargestNewTensor() as largest:
            optimizer.step()
        results[kernel] = largest.bytes
    assert results["torch"] <= 8 * chunked.CPU_CHUNK
    assert results["reference"] >= 4 * n  # so the instrument sees what it should


@pytest.mark.parametrize(
    "arrange",
    [
        pytest.param(lambda t: t.to(memory_format=torch.channels_last), id="channels last"),
        pytest.param(lambda t: t.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0), id="permuted"),
        pytest.param(lambda t: torch.zeros(*t.shape[:3], 8)[..., ::2].copy_(t), id="with gaps"),
    ],
)
@pytest.mark.parametrize("gradient_alike", [True, False])
def test_any_memory_order(arrange, gradient_alike):
    """Parameter, gradient and state are paired by index, not by their places in memory."""
    theta = torch.randn(3, 5, 2, 4)
    p = nn.Parameter(arrange(theta.clone()))
    assert not p.is_contiguous()
    oracle = PaperALTO(theta, **HYPER)
    optimizer = ALTO([p], **HYPER)
    for step in range(4):
        g = torch.randn(3, 5, 2, 4)
        p.grad = arrange(g.clone()) if gradient_alike else g.clone()
        optimizer.step()
        torch.testing.assert_close(p.detach().double(), oracle.step(g), rtol=1e-5, atol=1e-6)
        if step == 1:  # a checkpoint that has passed through something that likes contiguous tensors
            saved = optimizer.state_dict()
            states = {k: v.contiguous() for k, v in saved["state"][0].items()}
            optimizer = ALTO([p], **HYPER)
            optimizer.load_state_dict({**saved, "state": {0: states}})


def test_scalars_and_empty_tensors():
    scalar, empty = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0, 3))
    optimizer = ALTO([scalar, empty])
    oracle = PaperALTO(scalar, **{**HYPER, "weight_decay": 1e-4})
    for _ in range(3):
        scalar.grad, empty.grad = torch.tensor(0.5), torch.empty(0, 3)
        optimizer.step()
        torch.testing.assert_close(scalar.detach().double(), oracle.step(torch.tensor(0.5)), rtol=1e-6, atol=0)


def test_the_step_reads_nothing_back_from_the_device():
    """With .item(), .tolist() and bool() of anything but the host-side step counter forbidden."""
    p = nn.Parameter(torch.randn(70, 3))
    optimizer = ALTO([{"params": [p]}, {"params": [nn.Parameter(torch.ones(3))], "weight_decay": 0.0}])

    class NoReadBack(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._local_scalar_dense.default:
                counters = {id(state["step"]) for state in optimizer.state.values()}
                assert id(args[0]) in counters, "a value was read back by the host"
            return func(*args, **(kwargs or {}))

    for _ in range(3):
        p.grad = torch.randn_like(p)
        with NoReadBack():
            optimizer.step()
    with pytest.raises(AssertionError, match="read back"), NoReadBack():
        p.sum().item()


def _flags_of_memory(tensor):
    """What Linux was told about the memory in the middle of a tensor."""
    middle, inside = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            low, high = (int(address, 16) for address in first.split("-"))
            inside = low <= middle < high
        elif inside and first == "VmFlags:":
            return rest
    return []


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="Linux without huge pages")
def test_large_states_ask_for_huge_pages():
    """Whether they get them is up to Linux, and to malloc: memory it gives out a second time has its pages already."""
    p = nn.Parameter(torch.ones(3000, 2048))
    optimizer = ALTO([p], weight_decay=0.1)
    optimizer.initialize_state()
    for key in ALTO.state_keys:
        assert "hg" in _flags_of_memory(optimizer.state[p][key]), key


@pytest.mark.parametrize("shape", [(5, 7, 3, 2), (9, 64, 64, 40)], ids=["small", "large"])
def test_states_are_laid_out_like_their_parameter(shape):
    p = nn.Parameter(torch.randn(shape).to(memory_format=torch.channels_last))
    for dtype in (torch.float32, torch.bfloat16):
        state = new_state(p, None if dtype == torch.float32 else dtype)
        assert state.stride() == p.stride()
        assert state.dtype == dtype
        assert not state.requires_grad
        assert not state.any()
