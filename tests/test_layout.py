"""ShardLayout and the norms, in one process; tests/ranks has them over real process groups."""

import pytest
import torch
from torch import nn

from alto_distributed import ALTO, LogicalParameter, Segment, ShardLayout
from alto_distributed.sharding.norms import NormTable

from .oracle import PaperALTO

HYPER = dict(lr=0.1, betas=(0.99, 0.9, 0.99), alpha=-5.0, eps=(1e-6, 1e-6, 1e-10), weight_decay=1e-2)


def test_a_flat_shard_knows_its_pieces():
    a, b, c = LogicalParameter("a", (2, 3)), LogicalParameter("b", (4,)), LogicalParameter("c", (1,))
    shards = [ShardLayout.of_flat_shard([a, b, c], offset, 5) for offset in (0, 5, 10, 15)]
    held = [[(s.parameter.name, s.start, s.length) for s in shard.segments] for shard in shards]
    assert held[0] == [("a", 0, 5), ("b", 0, 0), ("c", 0, 0)]
    assert held[1] == [("a", 0, 1), ("b", 1, 4), ("c", 0, 0)]
    assert held[2] == [("a", 0, 0), ("b", 0, 0), ("c", 0, 1)]  # and four of padding
    assert held[3] == [("a", 0, 0), ("b", 0, 0), ("c", 0, 0)]  # padding only, but it takes part
    assert repr(shards[3]) == "ShardLayout(numel=5, padding only)"
    aligned = ShardLayout.of_flat_shard([a, b], 8, 8, starts=[0, 8])
    assert [(s.start, s.length) for s in aligned.segments] == [(0, 0), (0, 4)]


@pytest.mark.parametrize("kernel", ["torch", "reference"])
def test_one_tensor_that_holds_several_parameters_and_padding(kernel):
    """Every segment gets the ratio of its own parameter; padding is never touched, be it NaN."""
    thetas = [torch.randn(2, 3), 10 * torch.randn(4), torch.zeros(2)]
    flat = nn.Parameter(
        torch.cat([torch.full((2,), torch.nan), *(t.flatten() for t in thetas), torch.full((3,), torch.nan)])
    )
    parameters = [LogicalParameter(str(i), tuple(t.shape)) for i, t in enumerate(thetas)]
    segments = [Segment(parameters[0], 2, 6), Segment(parameters[1], 8, 4), Segment(parameters[2], 12, 2)]
    optimizer = ALTO([flat], kernel=kernel, **HYPER)
    optimizer.set_layouts({flat: ShardLayout(17, segments)})
    oracles = [PaperALTO(t, **HYPER) for t in thetas]
    for _ in range(4):
        flat.grad = torch.randn(17)
        expected = []
        for oracle, piece in zip(oracles, flat.grad[2:14].split([6, 4, 2]), strict=True):
            expected.append(oracle.step(piece.reshape(oracle.theta.shape)).flatten())
        optimizer.step()
        torch.testing.assert_close(flat[2:14].detach().double(), torch.cat(expected), rtol=1e-5, atol=1e-6)
        assert flat[:2].isnan().all()
        assert flat[14:].isnan().all()
        assert not optimizer.state[flat]["exp_avg"][14:].any()


def test_matrices_asks_the_logical_shape_not_the_flat_one():
    flat = nn.Parameter(torch.randn(8))
    matrix, vector = LogicalParameter("m", (2, 2)), LogicalParameter("v", (4,))
    hyper = {**HYPER, "weight_decay": 0.0}
    oracles = [PaperALTO(flat[:4], **hyper), PaperALTO(flat[4:], ratio=False, **hyper)]
    optimizer = ALTO([flat], layerwise="matrices", **hyper)
    optimizer.set_layouts({flat: ShardLayout(8, [Segment(matrix, 0, 4), Segment(vector, 4, 4)])})
    flat.grad = torch.randn(8)
    optimizer.step()
    for got, oracle, g in zip(flat.detach().double().split(4), oracles, flat.grad.split(4), strict=True):
        torch.testing.assert_close(got, oracle.step(g), rtol=1e-5, atol=1e-6)


def test_one_parameter_in_two_tensors_of_this_rank():
    theta = torch.randn(10, dtype=torch.float64)
    whole = LogicalParameter("w", (10,))
    head, tail = nn.Parameter(theta[:3].clone()), nn.Parameter(theta[3:].clone())
    optimizer = ALTO([head, tail], **HYPER)
    optimizer.set_layouts({head: ShardLayout.whole(whole, 3), tail: ShardLayout.whole(whole, 7)})
    oracle = PaperALTO(theta, **HYPER)
    for _ in range(3):
        g = torch.randn(10, dtype=torch.float64)
        head.grad, tail.grad = g[:3].clone(), g[3:].clone()
        optimizer.step()
        torch.testing.assert_close(torch.cat([head, tail]).detach(), oracle.step(g), rtol=1e-12, atol=1e-13)


def test_groups_that_come_and_go_between_steps():
    """DeepSpeed steps one parameter group at a time by shortening ``param_groups``."""
    thetas = [torch.randn(6, dtype=torch.float64) for _ in range(2)]
    flats = [nn.Parameter(t.clone()) for t in thetas]
    optimizer = ALTO([{"params": [flats[0]]}, {"params": [flats[1]], "lr": 0.2}], **HYPER)
    optimizer.set_layouts({f: ShardLayout.whole(LogicalParameter(f"p{i}", (2, 3)), 6) for i, f in enumerate(flats)})
    oracles = [PaperALTO(t, **{**HYPER, "lr": lr}) for t, lr in zip(thetas, (0.1, 0.2), strict=True)]
    groups = optimizer.param_groups
    for _ in range(3):
        for i, flat in enumerate(flats):
            flat.grad = torch.randn_like(flat)
            optimizer.param_groups = [groups[i]]
            optimizer.step()
            torch.testing.assert_close(flat.detach(), oracles[i].step(flat.grad), rtol=1e-12, atol=1e-13)
        optimizer.param_groups = groups
    assert len(optimizer._plans) == 2  # planned once for each set of tensors


def test_a_names_order_fixes_the_slots():
    a, b = LogicalParameter("a", (1,)), LogicalParameter("b", (1,))
    assert NormTable([b, a, b]).slots == {"a": 0, "b": 1}
    assert NormTable([a, b]).collectives == 0
