"""ShardLayout and the norms, in one process; tests/distributed/cases has them over real process groups."""

import pytest
import torch
from torch import nn

from alto_distributed import ALTO, LogicalParameter, Segment, ShardLayout
from alto_distributed.sharding import proof
from alto_distributed.sharding.norms import NormTable
from alto_distributed.sharding.proof import ModelWeight, require_proved
from tests.helpers.oracle import PaperALTO

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


@pytest.fixture
def flat_model():
    """Two matrices of one size and a vector, in bfloat16, and a shard of masters that begins inside of the first."""
    weights = {name: torch.randn(shape).bfloat16() for name, shape in {"a": (3, 4), "b": (4, 3), "c": (5,)}.items()}
    logical = [LogicalParameter(name, tuple(w.shape)) for name, w in weights.items()]
    buffer = torch.cat([w.flatten() for w in weights.values()]).float()
    return weights, logical, torch.cat([buffer[7:], torch.full((3,), torch.nan)])


def proved(shard, layout, weights):
    require_proved({shard: layout}, {n: ModelWeight(w) for n, w in weights.items()}, "DeepSpeed 9: fp32_groups", None)


def test_a_layout_is_proved_by_the_models_weights(flat_model):
    weights, logical, shard = flat_model
    layout = ShardLayout.of_flat_shard(logical, 7, len(shard))
    assert [s.offset for s in layout.segments] == [7, 0, 0]
    proved(shard, layout, weights)
    weights["c"][2] = shard[5 + 12 + 2] = torch.nan  # NaN is as good as any
    proved(shard, layout, weights)


def test_a_layout_that_was_read_wrongly_is_an_error(flat_model):
    weights, logical, shard = flat_model
    a, b, c = logical
    size = len(shard)
    wrong = {
        "shifted by one": (ShardLayout.of_flat_shard(logical, 6, size), "'a', 'b', 'c'"),
        "two swapped": (ShardLayout.of_flat_shard([b, a, c], 7, size), "'a', 'b'"),
        "beyond its end": (ShardLayout(size, [Segment(c, 17, 5, 3)]), "'c'"),
        "before its start": (ShardLayout(size, [Segment(a, 0, 5, -1)]), "'a'"),
        "unknown": (ShardLayout(size, [Segment(LogicalParameter("d", (5,)), 0, 5)]), "'d'"),
    }
    for why, (layout, names) in wrong.items():
        with pytest.raises(ValueError, match=rf"weights of {names} differ .* Read from DeepSpeed 9: fp32_groups"):
            proved(shard, layout, weights)
        assert why


def test_a_master_is_compared_in_the_models_precision_and_order():
    weight = torch.randn(6, 4).t().bfloat16()
    layout = ShardLayout.whole(LogicalParameter("w", (4, 6)), 24)
    proved(weight.float(), layout, {"w": weight})
    proved(weight.float().contiguous(), layout, {"w": weight})
    proved(weight.float() * (1 + 2**-12), layout, {"w": weight})  # as a bfloat16 it is the same
    with pytest.raises(ValueError, match="'w'"):
        proved(weight.float() * (1 + 2**-6), layout, {"w": weight})


def test_a_segment_is_compared_in_chunks(monkeypatch):
    monkeypatch.setattr(proof, "_CHUNK", 4)
    weight = torch.arange(11.0)
    layout = ShardLayout(13, [Segment(LogicalParameter("w", (11,)), 2, 9, 2)])
    for bad in (None, 2, 5, 6, 10):
        shard = torch.cat([torch.zeros(2), weight[2:], torch.zeros(2)])
        if bad is not None:
            shard[bad] += 1
            with pytest.raises(ValueError, match="'w'"):
                proved(shard, layout, {"w": weight})
        else:
            proved(shard, layout, {"w": weight})


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
