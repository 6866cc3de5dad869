"""What only a device shows: what the host does while a step runs, and where collectives run. On helpers/pretend."""

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from alto_distributed import ALTO, LogicalParameter, ShardLayout, param_groups
from alto_distributed.kernels import choice, reference
from alto_distributed.kernels.skip import SkipIf
from alto_distributed.kernels.triton import step as triton_step
from alto_distributed.sharding import collective
from tests.helpers import devices, pretend
from tests.helpers.cases import each, worlds
from tests.helpers.sharded import HYPER, TIGHT, network, reference_run, sharded_network, train

# -- the device itself -------------------------------------------------------------------------------------


@worlds(2)
def case_operators_take_tensors_of_one_device():
    here, other = devices.here(), torch.device("pretend", 7)
    x = torch.ones(3, device=here)
    for y in (torch.ones(3), torch.ones(3, device=other)):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            torch.add(x, y)
    assert torch.add(x, torch.tensor(1.0)).device == here  # a number may come from the host
    assert x[torch.tensor([0, 2])].device == here
    assert (x.view(1, 3)[:, 1:].add_(1), x.tolist())[1] == [1.0, 2.0, 2.0]
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1, device="pretend:8")


@worlds(2)
def case_the_host_is_watched():
    x = torch.ones(3, device=devices.here())
    with pretend.counted() as counts:
        x.sum().item()
        x.cpu()
        torch.ones(3).to(x.device)
        x.add_(1.0)
    assert counts == {"read": 1, "to host": 1, "to device": 1}
    with pretend.no(), pytest.raises(RuntimeError, match="forbidden here: read"):
        bool(x.any())
    late = torch.empty(3, pin_memory=True).copy_(x, non_blocking=True)
    assert late.isnan().all()
    torch.accelerator.synchronize()
    assert late.tolist() == [2.0] * 3


@worlds(2)
def case_collectives_have_nccls_rules():
    here, rank = devices.here(), dist.get_rank()
    x = torch.full((4,), float(rank), device=here)
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    assert x.tolist() == [0.5] * 4
    for bad, problem in (
        (torch.ones(3), "No backend type associated with device type cpu"),
        (torch.ones(3, device=f"pretend:{1 - rank}"), "not on device passed to init_process_group"),
        (torch.ones(4, 4, device=here).t(), "must be contiguous"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=problem):
            dist.all_reduce(bad)
    names = ["all_reduce of 3 x Float", "all_gather_into_tensor of 3 x Float"]
    collectives = [
        lambda: dist.all_reduce(torch.ones(3, device=here)),
        lambda: dist.all_gather_into_tensor(torch.empty(6, device=here), torch.ones(3, device=here)),
    ]
    with pytest.raises(RuntimeError, match=rf"is {names[rank]}.* on rank {rank} and {names[1 - rank]}.* on rank"):
        collectives[rank]()
    with pytest.raises(RuntimeError, match=rf"all_reduce of {rank + 1} x Float"):
        dist.all_reduce(torch.ones(rank + 1, device=here))
    with pretend.counted() as counts:
        dist.all_gather_object([None, None], "over the device")
    assert counts["to device"]


# -- what a step does to the host --------------------------------------------------------------------------

OPTIONS = {
    "plain": {},
    "bf16 states": {"grad_ema_dtype": "bfloat16", "exp_avg_dtype": "bfloat16"},
    "measured": {"diagnostics_every": 2},
    "no ratio": {"layerwise": "none"},
    "every ratio": {"layerwise": "all"},
    "LAMB": {"alpha": 0.0},
    "lr on the host": {"lr": torch.tensor(0.05)},
    "reference": {"kernel": "reference"},
    "capturable": {"capturable": True},
    "capturable, skips": {"capturable": True, "skip_nonfinite": True},
}


def gradients_for(model):
    for p in model.parameters():
        p.grad = torch.ones_like(p)


@worlds(2)
@each(OPTIONS)
def case_nothing_is_read_or_copied_in_the_steady_state(setting):
    """In every option, with even, uneven and empty shards, and in one process."""
    mesh = devices.mesh(2)
    for model in (sharded_network(mesh, torch.float32), network(torch.float32)):
        optimizer = ALTO(param_groups(model), **{**HYPER, **setting})
        for k in range(5):
            gradients_for(model)
            with pretend.counted() as counts, pretend.no(pretend.HOST if k > 1 else ()):
                optimizer.step()
            assert k < 2 or not counts, (k, counts)


TRITON_OPTIONS = {
    "plain": {},
    "bf16 states": {"grad_ema_dtype": "bfloat16", "exp_avg_dtype": "bfloat16"},
    "no ratio": {"layerwise": "none"},
    "skips": {"skip_nonfinite": True},
    "capturable": {"capturable": True},
}


@contextlib.contextmanager
def launches_of_triton():
    """A list of what the Triton kernel would launch, whose launches do nothing."""
    launched = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_step, "available", lambda device: True)
        for phase in ("launch_phase_one", "launch_phase_two"):
            patch.setattr(triton_step, phase, lambda *given: launched.append(given))
        yield launched


@worlds(2)
@each(TRITON_OPTIONS)
def case_the_triton_path_copies_nothing_in_the_steady_state(setting):
    """It sent all addresses and numbers at each step. Rates and decays change, gradients stay where they are."""
    model = sharded_network(devices.mesh(2), torch.float32)
    gradients_for(model)
    with launches_of_triton() as launched:
        optimizer = ALTO(param_groups(model), **{**HYPER, "kernel": "triton", **setting})
        for k in range(6):
            with pretend.counted() as counts:
                optimizer.step()
            allowed = {"event synchronize", "to host, not waiting"} if setting.get("skip_nonfinite") else set()
            assert k < 2 or counts.keys() == allowed, (k, counts)
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
                if not setting.get("capturable"):
                    group["weight_decay"] *= 0.8
        assert len(launched) == 12
        if not setting:
            gradients_for(model)
            for expected in ({"to device, not waiting": 1}, {}):
                with pretend.counted() as counts:
                    optimizer.step()
                assert counts == expected


@worlds(2)
def case_gradients_that_come_and_go_cost_no_copy():
    """As those of experts without tokens: the table with a rank's numbers was copied from the host each time."""
    optimizer = ALTO(param_groups(model := sharded_network(devices.mesh(2), torch.float32)), **HYPER)
    for k in range(6):
        gradients_for(model)
        if k % 2:
            model.up.weight.grad = None
        with pretend.counted() as counts, pretend.no(pretend.HOST if k > 1 else ()):
            optimizer.step()
        assert k < 2 or not counts, (k, counts)
    optimizer.state_dict()


@worlds(2)
def case_tables_that_a_step_replaces_are_kept_for_graphs():
    """A graph goes on reading those that it has recorded, also of the ranks' gradients."""
    optimizer = ALTO(param_groups(model := sharded_network(devices.mesh(2), torch.float32)), vector_lr=0.5, **HYPER)
    gradients_for(model)
    optimizer.step()
    plan, _ = optimizer._plan()
    assert {id(table) for table in plan.replaceable()} > {id(table) for table in plan.witness.tables()} > set()
    assert optimizer._captured == ()


@worlds(2)
def case_skip_nonfinite_waits_for_the_step_before_and_nothing_else():
    mesh = devices.mesh(2)
    model = sharded_network(mesh, torch.float32)
    optimizer = ALTO(param_groups(model), skip_nonfinite=True, **HYPER)
    for k in range(5):
        gradients_for(model)
        if k == 3 and dist.get_rank() == 1:
            model.up.weight.grad.to_local()[0, 0] = torch.nan
        with pretend.counted() as counts, pretend.no(pretend.HOST if k > 1 else ()):
            optimizer.step()
        assert k < 2 or counts == {"event synchronize": 1, "to host, not waiting": 1}, counts
    assert optimizer.skipped_steps == 1


@worlds(2)
def case_a_grad_scaler_waits_for_the_step_before_and_nothing_else():
    """Unlike scaler.step of an optimizer that leaves skipping to the scaler: that reads found_inf."""
    mesh = devices.mesh(2)
    model = sharded_network(mesh, torch.float32)
    optimizer = ALTO(param_groups(model), **HYPER)
    scaler = torch.amp.GradScaler("pretend", init_scale=8.0)
    scaler.scale(torch.ones(1, device=devices.here()))
    for k in range(5):
        gradients_for(model)
        if k == 3 and dist.get_rank() == 1:
            model.up.weight.grad.to_local()[0, 0] = torch.nan
        with pretend.counted() as counts, pretend.no(pretend.HOST if k > 1 else ()):
            scaler.step(optimizer)
        scaler.update()
        assert k < 2 or counts == {"event synchronize": 1, "to host, not waiting": 1}, counts
    assert optimizer.skipped_steps == 1


class OneRow(nn.Module):
    """FSDP2 gives all of it to the first rank."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(1, 6)), nn.Parameter(torch.randn(1, 6))

    def forward(self, x):
        return (x * self.a).tanh() * self.b


@worlds(2)
def case_a_rank_without_elements_does_as_the_others_do():
    """It read its flag on the host and returned from a bad step; the others waited for it in the norms. It also copied
    its table to the device at each step."""
    torch.manual_seed(3)
    model = OneRow().to(devices.here())
    fully_shard(model, mesh=devices.mesh(2))
    assert sum(p.to_local().numel() for p in model.parameters()) == (0 if dist.get_rank() else 12)
    optimizer = ALTO(model.parameters(), skip_nonfinite=True, **HYPER)
    for k in range(6):
        gradients_for(model)
        if k == 3 and dist.get_rank() == 0:
            model.a.grad.to_local()[0, 0] = torch.nan
        with pretend.no(pretend.HOST if k > 1 else ()):
            optimizer.step()
    assert optimizer.skipped_steps == 1
    assert {float(state["step"]) for state in optimizer.state.values()} == {5.0}


@worlds(2)
def case_a_rank_without_any_tensor_copies_nothing():
    rank = dist.get_rank()
    whole = LogicalParameter("w", (2, 3), (dist.group.WORLD,))
    flat = torch.arange(6.0, device=devices.here())
    optimizer = ALTO([{"params": [] if rank else [flat]}], **HYPER)
    optimizer.set_layouts({} if rank else {flat: ShardLayout.whole(whole, 6)}, joined=[whole])
    for k in range(4):
        flat.grad = torch.ones_like(flat)
        with pretend.no(pretend.HOST if k > 1 else ()):
            optimizer.step()


@worlds(2)
def case_groups_with_a_backend_for_each_device():
    """As Accelerate makes them. A rank without elements took the backend of the host, the other that of the device."""
    both = dist.new_group(backend="cpu:gloo,pretend:pretend")
    rank = dist.get_rank()
    flat = torch.arange(4.0, device=devices.here())
    whole = LogicalParameter("w", (2, 2), (both,))
    optimizer = ALTO([{"params": [] if rank else [flat]}], skip_nonfinite=True, **HYPER)
    optimizer.agree_over(both)
    optimizer.set_layouts({} if rank else {flat: ShardLayout.whole(whole, 4)}, joined=[whole])
    for k in range(3):
        flat.grad = torch.ones_like(flat)
        if k == 1 and not rank:
            flat.grad[0] = torch.inf
        optimizer.step()
    assert optimizer.skipped_steps == 1


@worlds(2)
def case_counters_that_an_engine_moved_to_the_device_come_back():
    """Each of them was read at each step from then on."""
    model = network(torch.float32)
    optimizer = ALTO(param_groups(model), **HYPER)
    for k in range(5):
        gradients_for(model)
        if k == 2:
            for state in optimizer.state.values():
                state["step"] = state["step"].to(devices.here())
        with pretend.no(pretend.HOST if k in (1, 3, 4) else ()):
            optimizer.step()
    assert {str(state["step"].device) for state in optimizer.state.values()} == {"cpu"}
    assert {float(state["step"]) for state in optimizer.state.values()} == {5.0}


@worlds(2)
def case_offloaded_parameters_meet_a_group_of_the_device():
    """FSDP2's CPUOffloadPolicy: shards on the host, and a process group that works on the device alone."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    model = network(torch.float64)
    fully_shard(model, mesh=devices.mesh(2), offload_policy=CPUOffloadPolicy())
    model.to("cpu")
    optimizer = ALTO(param_groups(model, 1e-2), skip_nonfinite=True, **HYPER)
    train(model, optimizer, sliced=True)
    assert {p.to_local().device.type for p in model.parameters()} == {"cpu"}
    for p, q in zip(model.parameters(), reference_run().parameters(), strict=True):
        piece = distribute_tensor(q.detach(), p.device_mesh, p.placements).to_local().cpu()
        torch.testing.assert_close(p.to_local().detach(), piece, **TIGHT)


# -- the kernel for this device ----------------------------------------------------------------------------


class Injected:
    """A kernel for the device, as Triton's is for GPUs; ``wrong`` in one bit of a state."""

    def __init__(self, wrong=False):
        self.wrong, self.steps = wrong, 0

    def phase_one(self, shards, sums):
        self.steps += 1
        reference.phase_one(shards, sums)
        if self.wrong:
            shards[0].exp_avg[0].mul_(1 + 2**-20)

    def phase_two(self, shards, step_sizes, prepared=None):
        reference.phase_two(shards, step_sizes)

    def unless(self, skip):
        return SkipIf(self, skip)


@contextlib.contextmanager
def injected(wrong):
    """The kernel of this device, found right or wrong anew."""
    kernel = Injected(wrong)
    choice.ACCELERATED["pretend"] = lambda device: kernel
    choice._complaints.clear()
    try:
        yield kernel
    finally:
        del choice.ACCELERATED["pretend"]
        choice._complaints.clear()


def warnings_of_first_step(model, prepare=lambda optimizer: None, **options):
    optimizer = ALTO(param_groups(model), **{**HYPER, **options})
    prepare(optimizer)
    gradients_for(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer.step()
    return optimizer, [str(w.message) for w in told if "kernel" in str(w.message)]


def all_agree(model, wrong_rank, *prepare, **options):
    """All ranks use the injected kernel, or, if that is wrong on one, all warn and use torch's operations."""
    rank = dist.get_rank()
    with injected(rank == wrong_rank) as kernel:
        optimizer, said = warnings_of_first_step(model, *prepare, **options)
        proving = kernel.steps
        gradients_for(model)
        with pretend.no(() if prepare else pretend.HOST):
            optimizer.step()
        assert (kernel.steps > proving) == (wrong_rank is None), "which kernel is used"
        assert len(said) == (wrong_rank is not None), said
        if wrong_rank is not None:
            assert ("is not the reference's" if rank == wrong_rank else "it failed on another rank") in said[0]


@worlds(2)
def case_all_ranks_use_the_kernel_for_the_device_or_none():
    for wrong_rank in (None, 1):
        all_agree(sharded_network(devices.mesh(2), torch.float32), wrong_rank)


@worlds(4)
def case_replicas_of_shards_use_the_same_kernel():
    """HSDP: a fault reaches the ranks with which no norm is summed, whichever rank has it."""
    mesh = devices.mesh(2, 2, names=("replicate", "shard"))
    for wrong_rank in (None, 0, 3):
        all_agree(sharded_network(mesh, torch.float32), wrong_rank)


@worlds(2)
def case_replicas_without_a_process_group_use_the_same_kernel():
    """As under DistributedDataParallel: ranks tell each other through the store."""
    for wrong_rank in (None, 0):
        all_agree(network(torch.float32), wrong_rank)


@worlds(2)
def case_ranks_without_any_norm_use_the_same_kernel():
    """layerwise="none" has nothing to sum, and nobody was asked."""
    for wrong_rank in (None, 1):
        all_agree(network(torch.float32), wrong_rank, layerwise="none")
        all_agree(sharded_network(devices.mesh(2), torch.float32), wrong_rank, layerwise="none")


@worlds(2)
def case_ranks_that_talk_over_the_host_use_the_same_kernel():
    """Tensors on the device and a group of gloo: it was left out, as if all were on the host."""
    gloo = dist.new_group(backend="cpu:gloo,pretend:gloo")

    def cut(optimizer):
        layouts = {}
        for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            whole = LogicalParameter(f"{i}", (2 * p.numel(),), (gloo,))
            layouts[p] = ShardLayout.of_flat_shard([whole], dist.get_rank() * p.numel(), p.numel())
        optimizer.set_layouts(layouts, replicas=())

    for wrong_rank in (None, 0):
        all_agree(network(torch.float32), wrong_rank, cut)


@worlds(2)
def case_replicas_that_an_engine_knows_use_the_same_kernel():
    """Their process group is asked, and not the store."""
    before = next(collective._exchanges)
    for wrong_rank in (None, 1):
        all_agree(
            network(torch.float32),
            wrong_rank,
            lambda optimizer: optimizer.set_layouts({}, replicas=[dist.group.WORLD]),
            layerwise="none" if wrong_rank else "all",
        )
    assert next(collective._exchanges) == before + 1


@worlds(4)
def case_plain_replicas_of_tensor_parallel_shards_use_the_same_kernel():
    """Tensors know the tensor-parallel ranks alone: those of the other replica were not asked."""
    mesh = devices.mesh(2, 2, names=("data", "tensor"))
    for wrong_rank in (None, 0, 3):
        model = network(torch.float32)
        for layer in (model.up, model.down):
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tensor"], [Shard(0)]))
        all_agree(model, wrong_rank)


@worlds(2)
def case_a_replica_that_says_nothing_is_warned_of():
    """One rank has no such optimizer: the other neither hangs nor decides in silence."""
    model, patience = network(torch.float32), collective.replicas_object.__defaults__
    collective.replicas_object.__defaults__ = (0.5,)
    try:
        if dist.get_rank() == 0:
            with injected(False):
                _, said = warnings_of_first_step(model)
            assert ["rank 1 did not say within 0.5 s" in text for text in said] == [True]
        else:
            next(collective._exchanges)  # so that the ranks count alike in what follows
    finally:
        collective.replicas_object.__defaults__ = patience
        dist.barrier()
