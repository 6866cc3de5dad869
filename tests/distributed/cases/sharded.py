"""Cases over real gloo ranks: sharded equals unsharded. Run by test_sharded.py through helpers/launcher.py.

Every case computes the unsharded run on the spot, in the same process, from the same weights and the
same global batch, and compares in float64, where a wrong ratio cannot hide behind rounding.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from alto_distributed import ALTO, E, LogicalParameter, ShardLayout, param_groups
from alto_distributed.sharding.norms import NormTable
from alto_distributed.sharding.plan import StepPlan
from alto_distributed.sharding.witness import EVERY, GradientWitness
from tests.helpers import devices
from tests.helpers.cases import each, worlds
from tests.helpers.oracle import PaperALTO
from tests.helpers.releases import TORCH, need_torch
from tests.helpers.sharded import (
    HYPER,
    STEPS,
    TIGHT,
    assert_same,
    assert_straddles,
    batches,
    full,
    network,
    reference_run,
    sharded_network,
    train,
)


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64).to(devices.here())


def at_each_step(collectives):
    """So many in each step; in the first, ranks make sure that they agree, with two more for each process group."""
    return [3 * collectives, *[collectives] * (STEPS - 1)]


def largest_gap(model, reference):
    gaps = [
        (full(p) - full(q)).norm() / full(q).norm()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    ]
    return torch.stack(gaps).max().item()  # NaN if there is one


#: At which of two steps a rank lacks which gradients: rank -> names, by step. "all" are all of them.
MISSING = {
    "on one rank": ({1: ["up.weight", "head.bias"]}, {}),
    "others on another rank": ({0: ["up.weight"], 1: ["head.bias"]}, {}),
    "all on one rank": ({1: "all"}, {}),
    "at different steps": ({0: ["up.weight"]}, {1: ["up.weight"]}),
}


@worlds(2, exhaustive=(4,))
@each(MISSING)
def case_gradients_that_only_some_ranks_have(setting):
    """Shards drifted apart without a word; on an accelerator unless a checkpoint was saved right after the step."""
    model = sharded_network(devices.mesh(dist.get_world_size()), torch.float32)
    optimizer = ALTO(param_groups(model, 1e-2), **HYPER)
    take_a_step_without(model, optimizer, [])
    before = full(model.up.weight)
    message = r"ranks \[0, 1.*did not have gradients of the same parameters"
    missing = [names.get(dist.get_rank(), []) for names in setting]
    done = 0

    def train_on():
        nonlocal done
        for names in [*missing, *[[]] * 2 * EVERY]:
            take_a_step_without(model, optimizer, names)
            done += 1

    with pytest.raises(ValueError, match=message):
        train_on()
    if devices.NAME == "cpu":
        assert done == 0
        assert torch.equal(full(model.up.weight), before)
    else:
        assert done >= EVERY
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, done)
    assert set(counts) == {done}  # all raise at the same step, and none waits for the others
    moments = optimizer.state[model.norm.weight]["exp_avg"].to_local().clone()
    for again in (optimizer.step, optimizer.state_dict):
        with pytest.raises(ValueError, match=message):
            again()
    assert torch.equal(optimizer.state[model.norm.weight]["exp_avg"].to_local(), moments)


def take_a_step_without(model, optimizer, names):
    for name, p in model.named_parameters():
        p.grad = None if names == "all" or name in names else torch.ones_like(p)
    optimizer.step()


@worlds(2, exhaustive=(4,))
def case_such_gradients_are_found_when_states_are_saved():
    model = sharded_network(devices.mesh(dist.get_world_size()), torch.float32)
    optimizer = ALTO(param_groups(model, 1e-2), **HYPER)

    def train_and_save():
        for step in range(4):
            take_a_step_without(model, optimizer, ["up.bias"] if (dist.get_rank(), step) == (1, 1) else [])
        assert devices.NAME != "cpu"
        optimizer.state_dict()

    with pytest.raises(ValueError, match="did not have gradients of the same parameters"):
        train_and_save()


@worlds(2, exhaustive=(4,))
def case_gradients_that_no_rank_has():
    """The parameter is left alone, and nobody objects; also where they come and go."""
    model = sharded_network(devices.mesh(dist.get_world_size()), torch.float32)
    optimizer = ALTO(param_groups(model, 1e-2), **HYPER)
    for step in range(3):
        before = full(model.up.weight)
        take_a_step_without(model, optimizer, ["up.weight", "head.bias"] if step % 2 else ["up.bias"])
        assert torch.equal(full(model.up.weight), before) == (step % 2 == 1)
    take_a_step_without(model, optimizer, "all")
    optimizer.state_dict()


@worlds(2, 4)
def case_fsdp2_equals_the_single_process_run():
    mesh = devices.mesh(dist.get_world_size())
    model = sharded_network(mesh)
    assert_straddles(model, mesh.get_group())
    counts = []
    train(model, ALTO(param_groups(model, 1e-2), **HYPER), sliced=True, counts=counts)
    assert_same(model, reference_run())
    assert counts == at_each_step(1), counts  # one all-reduce a step for all parameters


@worlds(2, 4)
def case_fsdp2_in_float32_stays_within_rounding():
    mesh = devices.mesh(dist.get_world_size())
    model = sharded_network(mesh, torch.float32)
    train(model, ALTO(param_groups(model, 1e-2), **HYPER), sliced=True, dtype=torch.float32)
    gap = largest_gap(model, reference_run(torch.float32))
    assert gap < (2e-5 if TORCH >= (2, 9) else 2e-4), gap


@worlds(2, exhaustive=(4,))
@each(layerwise=("decayed", "matrices", "all", "none"))
def case_fsdp2_with_bare_parameters(layerwise):
    model, counts = sharded_network(devices.mesh(dist.get_world_size())), []
    train(model, ALTO(model.parameters(), layerwise=layerwise, **HYPER), sliced=True, counts=counts)
    assert_same(model, reference_run(make=lambda m: ALTO(m.parameters(), layerwise=layerwise, **HYPER)))
    assert counts == at_each_step(0 if layerwise == "none" else 1)


@worlds(2)
@each(layerwise=("decayed", "matrices"))
def case_fsdp2_with_vectors_at_a_rate_of_their_own(layerwise):
    """And embeddings without the ratio."""

    def make(model):
        return ALTO(param_groups(model, 1e-2, embeddings="adam"), **HYPER, layerwise=layerwise, vector_lr=0.3)

    model, counts = sharded_network(devices.mesh(dist.get_world_size())), []
    train(model, make(model), sliced=True, counts=counts)
    assert_same(model, reference_run(make=make))
    assert counts == at_each_step(1)
    assert largest_gap(model, reference_run()) > 1e-3


@worlds(2, 4)
def case_without_the_reduction_the_comparison_fails():
    """The negative control: norms of the local shard alone are what a naive optimizer would use."""
    mesh = devices.mesh(dist.get_world_size())
    model = sharded_network(mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NormTable, "complete", lambda self, partial: next(iter(partial.values())))
        patch.setattr(StepPlan, "require_agreement", lambda self, common: None)  # it would find the shards too small
        patch.setattr(GradientWitness, "look", lambda self, sums, norms: None)  # it would miss the other ranks
        train(model, ALTO(param_groups(model, 1e-2), **HYPER), sliced=True)
    gap = largest_gap(model, reference_run())
    assert gap > 1e-3, gap


@worlds(4)
def case_hsdp_counts_replicas_once():
    mesh = devices.mesh(2, 2, names=("replicate", "shard"))
    model = sharded_network(mesh)
    assert_straddles(model, mesh.get_group("shard"))
    counts = []
    train(model, ALTO(param_groups(model, 1e-2), **HYPER), sliced=True, counts=counts)
    assert_same(model, reference_run())
    assert counts == at_each_step(1), counts


@worlds(4)
def case_replicas_stay_bitwise_equal():
    """All ranks of a group get the same bits of a norm, so HSDP's replicas never drift apart."""
    mesh = devices.mesh(2, 2, names=("replicate", "shard"))
    model = sharded_network(mesh, torch.float32)
    train(model, ALTO(param_groups(model, 1e-2), **HYPER), sliced=True, dtype=torch.float32)
    for name, p in model.named_parameters():
        replicas = [None] * 2
        dist.all_gather_object(replicas, p.to_local().detach().cpu(), group=mesh.get_group("replicate"))
        assert torch.equal(*replicas), name


@worlds(4)
def case_fsdp2_and_tensor_parallel_on_a_2d_mesh():
    need_torch(2, 7, "FSDP2 on CPUs")
    mesh = devices.mesh(2, 2, names=("dp", "tp"))
    # Tensor parallelism splits evenly; fully_shard then splits 7 rows over 2, which older releases gather in disorder.
    hidden = 14 if TORCH >= (2, 10) else 16
    model = network(hidden=hidden)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    assert len(model.up.weight.placements) == 2
    # Undecayed biases of the row-wise layer and the norm stay whole over tp; tp ranks see the same batch.
    counts, rank = [], mesh.get_local_rank("dp")
    optimizer = ALTO(param_groups(model, 1e-2), **HYPER)
    for x, y in batches():
        optimizer.zero_grad()
        (model(x.chunk(2)[rank]) - y.chunk(2)[rank]).square().mean().backward()
        with CommDebugMode() as comms:
            optimizer.step()
        counts.append(comms.get_total_counts())
    assert_same(model, reference_run(hidden=hidden))
    assert counts == at_each_step(2), counts  # one over dp, one over tp


def _placements(world):
    if world == 4:
        mesh = devices.mesh(2, 2)
        yield from ((mesh, p) for p in ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(1)]))
        yield from ((mesh, p) for p in ([Shard(1), Replicate()], [Replicate(), Replicate()], [Shard(2), Shard(0)]))
    flat = devices.mesh(world)
    yield from ((flat, p) for p in ([Shard(0)], [Shard(1)], [Shard(2)], [Replicate()]))


@worlds(2, 4)
@each(shape=((5, 3, 7), (1, 9, 2), (4, 4, 4)))
def case_every_placement(shape):
    """Shard on any dimension, two dimensions at once, uneven and empty, replicas; partial gradients too."""
    for mesh, placements in _placements(dist.get_world_size()):
        theta = randn(shape)
        p = nn.Parameter(distribute_tensor(theta, mesh, placements))
        optimizer, oracle = ALTO([p], **HYPER), PaperALTO(theta, **HYPER)
        for _ in range(3):
            g = randn(shape)
            p.grad = distribute_tensor(g, mesh, placements)
            optimizer.step()
            torch.testing.assert_close(full(p), full(oracle.step(g)), msg=str(placements), **TIGHT)


@worlds(2, 4)
@each({"replicated": Replicate(), "sharded": Shard(0)})
def case_a_gradient_that_is_still_a_partial_sum(setting):
    world = dist.get_world_size()
    theta = randn(5, 3)
    mesh = devices.mesh(world)
    p = nn.Parameter(distribute_tensor(theta, mesh, [setting]))
    optimizer, oracle = ALTO([p], **HYPER), PaperALTO(theta, **HYPER)
    for _ in range(3):
        g = randn(5, 3)
        p.grad = DTensor.from_local(g / world, mesh, [Partial()])
        optimizer.step()
        torch.testing.assert_close(full(p), full(oracle.step(g)), **TIGHT)


@worlds(2, 4)
def case_a_parameter_that_is_a_partial_sum_is_refused():
    theta, mesh = randn(5, 3), devices.mesh(dist.get_world_size())
    p = nn.Parameter(DTensor.from_local(theta, mesh, [Partial()]))
    p.grad = DTensor.from_local(theta, mesh, [Partial()])
    with pytest.raises(ValueError, match="partial sum on mesh dimension 0"):
        ALTO([p], **HYPER).step()


BASES = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), 0.05, momentum=0.9),
    "LAMB": lambda m: ALTO(m.parameters(), alpha=0),
}


@worlds(2, 4)
@each(BASES)
def case_e_under_fsdp2(setting):
    model = sharded_network(devices.mesh(dist.get_world_size()))
    train(model, E(setting(model)), sliced=True)
    assert_same(model, reference_run(make=lambda m: E(setting(m))))


@worlds(2)
def case_ddp():
    model = nn.parallel.DistributedDataParallel(network())
    counts = []
    train(model, ALTO(param_groups(model.module, 1e-2), **HYPER), sliced=True, counts=counts)
    assert_same(model.module, reference_run())
    assert counts == at_each_step(0)  # every rank holds whole parameters


# -- flat shards with explicit layouts -----------------------------------------------------------------


def _flat_case(sizes, cuts, padding, groups_of, rank_in_group):
    """ZeRO's way: parameters glued end to end, cut at ``cuts`` for the ranks, each shard padded with NaN."""
    thetas = [randn(s) * (i + 1) for i, s in enumerate(sizes)]
    parameters = [LogicalParameter(f"p{i}", s, groups_of(i)) for i, s in enumerate(sizes)]
    buffer = torch.cat([t.flatten() for t in thetas])
    low, high = cuts[rank_in_group], cuts[rank_in_group + 1]
    pad = torch.full((padding,), torch.nan, dtype=torch.float64, device=devices.here())
    shard = nn.Parameter(torch.cat([buffer[low:high], pad]))
    layout = ShardLayout.of_flat_shard(parameters, low, high - low)
    optimizer = ALTO([shard], **HYPER)
    optimizer.set_layouts({shard: ShardLayout(shard.numel(), layout.segments)})
    oracles = [PaperALTO(t, **HYPER) for t in thetas]
    for k in range(4):
        gradients = [randn(s) for s in sizes]
        shard.grad = torch.cat([torch.cat([g.flatten() for g in gradients])[low:high], pad])
        with CommDebugMode() as comms:
            optimizer.step()
        assert comms.get_total_counts() == at_each_step(1)[k]
        expected = torch.cat([o.step(g).flatten() for o, g in zip(oracles, gradients, strict=True)])
        torch.testing.assert_close(shard.detach()[: high - low], expected[low:high], **TIGHT)
    return layout


@worlds(2, 4)
def case_flat_shards_with_padding():
    world, rank = dist.get_world_size(), dist.get_rank()
    sizes = [(4, 3), (5,), (2, 2, 2), (1,)]
    total = 12 + 5 + 8 + 1
    cuts = [min(total, i * 9) for i in range(world)] + [total]
    layout = _flat_case(sizes, cuts, 3, lambda i: (dist.group.WORLD,), rank)
    straddling = [None] * world
    dist.all_gather_object(straddling, {s.parameter.name for s in layout.segments if s.length})
    assert any(straddling[0] & other for other in straddling[1:]), straddling


SMALL = {"grad_ema_dtype": "bfloat16", "exp_avg_dtype": "bfloat16"}


def unsharded_and_gradients(shapes):
    """An unsharded run with small states, and the gradients that it has seen."""
    generator = torch.Generator().manual_seed(5)
    params = [nn.Parameter(torch.randn(*shape, generator=generator).to(devices.here())) for shape in shapes]
    begin = [param.detach().clone() for param in params]
    gradients = [[torch.randn(*shape, generator=generator).to(devices.here()) for shape in shapes] for _ in range(4)]
    optimizer = ALTO([(f"p{i}", param) for i, param in enumerate(params)], **HYPER, **SMALL)
    for of_step in gradients:
        for param, gradient in zip(params, of_step, strict=True):
            param.grad = gradient
        optimizer.step()
    return begin, gradients, params, [optimizer.state[param] for param in params]


@worlds(2, exhaustive=(4,))
def case_flat_shards_round_small_states_as_the_unsharded_run():
    """To the bit: rounding goes by the place in the parameter, not by that on a rank. It was 1e-4 off."""
    shapes = [(40, 30), (5,), (20, 20, 2), (1,)]
    begin, gradients, params, states = unsharded_and_gradients(shapes)
    world, rank = dist.get_world_size(), dist.get_rank()
    whole = [LogicalParameter(f"p{i}", shape, (dist.group.WORLD,)) for i, shape in enumerate(shapes)]
    flat = torch.cat([theta.flatten() for theta in begin])
    here = slice(rank * -(-len(flat) // world), min(len(flat), (rank + 1) * -(-len(flat) // world)))
    shard = nn.Parameter(flat[here].clone())
    optimizer = ALTO([shard], **HYPER, **SMALL)
    optimizer.set_layouts({shard: ShardLayout.of_flat_shard(whole, here.start, shard.numel())})
    for of_step in gradients:
        shard.grad = torch.cat([gradient.flatten() for gradient in of_step])[here].clone()
        optimizer.step()
    for key in ("exp_avg", "grad_ema"):
        expected = torch.cat([state[key].flatten() for state in states])[here]
        assert expected.dtype == torch.bfloat16
        assert torch.equal(optimizer.state[shard][key], expected), key
    torch.testing.assert_close(shard, torch.cat([param.flatten() for param in params])[here], rtol=1e-6, atol=0)


@worlds(2, exhaustive=(4,))
def case_fsdp2_rounds_small_states_as_the_unsharded_run():
    shapes = [(41, 30), (7,), (1, 3)]
    begin, gradients, params, states = unsharded_and_gradients(shapes)
    mesh = devices.mesh(dist.get_world_size())
    cut = [nn.Parameter(distribute_tensor(theta, mesh, [Shard(0)])) for theta in begin]
    optimizer = ALTO([(f"p{i}", param) for i, param in enumerate(cut)], **HYPER, **SMALL)
    for of_step in gradients:
        for param, gradient in zip(cut, of_step, strict=True):
            param.grad = distribute_tensor(gradient, mesh, [Shard(0)])
        optimizer.step()
    for param, twin, state in zip(cut, params, states, strict=True):
        for key in ("exp_avg", "grad_ema"):
            assert torch.equal(optimizer.state[param][key].full_tensor(), state[key]), key
        torch.testing.assert_close(param.full_tensor(), twin.detach(), rtol=1e-6, atol=0)


@worlds(4)
def case_a_rank_that_holds_padding_only_still_joins():
    _flat_case([(4, 3), (5,)], [0, 8, 17, 17, 17], 2, lambda i: (dist.group.WORLD,), dist.get_rank())


@worlds(4)
def case_a_rank_without_any_tensor_still_joins():
    """Megatron's distributed optimizer may leave a rank with no shard at all."""
    rank, theta = dist.get_rank(), randn(6)
    g = randn(6)
    parameter = LogicalParameter("w", (2, 3), (dist.group.WORLD,))
    if rank < 2:
        shard = nn.Parameter(theta[rank * 3 : rank * 3 + 3].clone())
        shard.grad = g[rank * 3 : rank * 3 + 3].clone()
        optimizer = ALTO([shard], **HYPER)
        optimizer.set_layouts({shard: ShardLayout.whole(parameter, 3)})
    else:
        optimizer = ALTO([{"params": []}], **HYPER)
        optimizer.set_layouts({}, joined=[parameter])
    with CommDebugMode() as comms:
        optimizer.step()
    assert comms.get_total_counts() == at_each_step(1)[0]
    if rank < 2:
        expected = PaperALTO(theta, **HYPER).step(g)
        torch.testing.assert_close(shard.detach(), expected[rank * 3 : rank * 3 + 3], **TIGHT)


@worlds(4)
def case_data_and_tensor_parallel_groups_cost_one_collective_each():
    """Matrices cut over tp and dp, vectors over dp alone and equal on tp ranks, one parameter whole."""
    mesh = devices.mesh(2, 2, names=("dp", "tp"))
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    dp_rank, tp_rank = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    matrices = [randn(6, 4) for _ in range(3)]
    vectors = [randn(7) for _ in range(3)]
    whole = randn(3, 3)

    def cut(m, v):
        """What this rank holds: of a matrix its tp columns, and of those, as of a vector, its dp slice."""
        pieces = [x.chunk(2, dim=1)[tp_rank].flatten() for x in m] + list(v)
        return [x.tensor_split(2)[dp_rank].clone() for x in pieces]

    held = [nn.Parameter(t) for t in cut(matrices, vectors)] + [nn.Parameter(whole.clone())]
    layouts = {}
    for i, p in enumerate(held[:6]):
        shape, groups = ((6, 4), (dp, tp)) if i < 3 else ((7,), (dp,))
        layouts[p] = ShardLayout.whole(LogicalParameter(f"p{i}", shape, groups), p.numel())
    optimizer = ALTO(held, **HYPER)
    optimizer.set_layouts(layouts)
    oracles = [PaperALTO(t, **HYPER) for t in [*matrices, *vectors, whole]]
    for k in range(4):
        gradients = [torch.randn_like(o.theta) for o in oracles]
        for p, g in zip(held, [*cut(gradients[:3], gradients[3:6]), gradients[6]], strict=True):
            p.grad = g
        with CommDebugMode() as comms:
            optimizer.step()
        assert comms.get_total_counts() == at_each_step(2)[k], comms.get_comm_counts()
        new = [o.step(g) for o, g in zip(oracles, gradients, strict=True)]
        for p, expected in zip(held, [*cut(new[:3], new[3:6]), new[6]], strict=True):
            torch.testing.assert_close(p.detach(), expected, **TIGHT)


@worlds(2)
def case_groups_of_one_rank_are_skipped():
    """Each rank alone in its group: nothing to add up, nothing sent."""
    alone = [dist.new_group([r]) for r in range(2)][dist.get_rank()]
    p = nn.Parameter(randn(4))
    p.grad = randn(4)
    optimizer = ALTO([p], **HYPER)
    optimizer.set_layouts({p: ShardLayout.whole(LogicalParameter("w", (2, 2), (alone,)), 4)})
    with CommDebugMode() as comms:
        optimizer.step()
    assert comms.get_total_counts() == 0
