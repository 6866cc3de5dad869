"""DeepSpeed, the real one, over gloo: every stage, precision and option equals the unsharded run.

float32 cells: each rank sees its share of the batch, and weights are held to the single-process run within
1e-6. bf16 and fp16 cells: all ranks see the same batch, so that averaging is exact whatever the order of
summation, and the master weights must be *bitwise* those of a reference that rounds at the same points.
"""

import contextlib
import dataclasses
import functools
import re
import warnings
from itertools import chain

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

import alto_distributed.deepspeed
from alto_distributed import ALTO, LAMB, param_groups
from alto_distributed.deepspeed.build import split_bare_parameters
from alto_distributed.deepspeed.layout import LayoutBuilder
from alto_distributed.kernels.hugepages import collapse
from alto_distributed.sharding import ShardLayout
from tests.helpers import devices
from tests.helpers.cases import each, some, worlds

# Half precision runs on any CPU in torch; DeepSpeed asks for hardware support, which this is not about.
get_accelerator().is_fp16_supported = lambda: True
warnings.simplefilter("ignore", FutureWarning)

STEPS = 10
PARAMS = {"lr": 0.05, "betas": [0.99, 0.9, 0.99], "alpha": -5, "eps": 1e-6, "weight_decay": 0.01}
if devices.NAME != "cpu":
    PARAMS["kernel"] = "torch"  # also of what is computed on the host to compare with: C adds up in another order
# Bitwise, only the definition serves there: torch's lerp on some CPUs rounds the last elements of a tensor otherwise,
# and shards end where parameters do not.
BITWISE = PARAMS if devices.NAME == "cpu" else {**PARAMS, "kernel": "reference"}


class Net(nn.Module):
    """Odd sizes, so that shards cut through parameters and are padded; a tied, a frozen and an unused one."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up, self.down = nn.Linear(6, 13), nn.Linear(13, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(3, 3))

    def forward(self, x):
        h = self.embed(x.to(self.scale.device))
        return self.head(self.norm(h + self.scale * self.frozen(self.down(torch.tanh(self.up(h))))))


def network(make=Net):
    torch.manual_seed(11)
    return make()


def batches(steps=STEPS, accumulation=1):
    """Per step, ``accumulation`` global micro-batches."""
    generator = torch.Generator().manual_seed(17)
    for _ in range(steps):
        x = torch.randint(0, 11, (accumulation, 8, 5), generator=generator)
        yield list(zip(x, torch.randint(0, 11, x.shape, generator=generator), strict=True))


def loss_of(out, y):
    return nn.functional.cross_entropy(out.float().flatten(0, 1), y.flatten().to(out.device))


def trainable(model):
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


@functools.cache
def reference(*, clip=1.0, accumulation=1, steps=STEPS, groups=None, schedule=None, make=Net, **params):
    """The same training in one process with the plain optimizer; it is held to the paper in tests/unit/test_paper.py.

    DeepSpeed gives an unused parameter a gradient of zero, in every stage, so it is decayed like the others.
    """
    model = network(make)
    options = {**PARAMS, **params}
    optimizer = ALTO(groups(model) if groups else split_bare_parameters(list(model.parameters())), **options)
    for k, step in enumerate(batches(steps, accumulation)):
        optimizer.zero_grad()
        for x, y in step:
            (loss_of(model(x), y) / accumulation).backward()
        for p in trainable(model).values():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if schedule is not None:
            for group in optimizer.param_groups:
                group.update(schedule(k))
        optimizer.step()
    return model


def config(zero=None, *, clip=1.0, accumulation=1, name="ALTO", params=None, **more):
    world = dist.get_world_size()
    out = {
        "train_micro_batch_size_per_gpu": 8 // world,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "optimizer": {"type": name, "params": PARAMS if params is None else params},
        **more,
    }
    return {**out, "zero_optimization": zero} if zero else out


def train(engine, *, steps=STEPS, accumulation=1, sliced=True):
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in batches(steps, accumulation):
        for x, y in step:
            if sliced:
                x, y = x.chunk(world)[rank], y.chunk(world)[rank]
            engine.backward(loss_of(engine(x), y))
            engine.step()


@contextlib.contextmanager
def running(model, ds_config, **options):
    engine, *_ = deepspeed.initialize(model=model, config=ds_config, **options)
    try:
        yield engine
    finally:
        engine.destroy()


def weights(engine):
    """Whole weights by name, as the model sees them."""
    out = {}
    for name, p in trainable(engine.module).items():
        with deepspeed.zero.GatheredParameters([p]):
            out[name] = p.detach().float().cpu().clone()
    return out


def masters(engine):
    """Whole float32 weights by name."""
    unfused = getattr(engine.optimizer, "fp32_groups", None)
    if unfused is None:
        return {name: safe_get_full_fp32_param(p).cpu().clone() for name, p in trainable(engine.module).items()}
    pairs = zip(chain(*engine.optimizer.fp16_groups), chain(*unfused), strict=True)
    return {engine.param_names[p]: clone.detach().cpu().clone() for p, clone in pairs}


def largest_gap(got, expected):
    """Largest |difference| relative to the parameter's norm; NaN if there is one (Python's max would lose it)."""
    assert got.keys() == trainable(expected).keys()
    return torch.stack([(got[n] - p).norm() / p.norm() for n, p in trainable(expected).items()]).max().item()


def assert_straddles(engine):
    """Some parameter has elements on two ranks, by the layouts and by what other ranks say of theirs."""
    held = {
        s.parameter.name
        for layout in LayoutBuilder(engine).build().values()
        for s in layout.segments
        if s.length and s.length < torch.Size(s.parameter.shape).numel()
    }
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, held)
    assert set.union(*everywhere), "no parameter lies on two ranks"


# -- float32 -------------------------------------------------------------------------------------------

SMALL = {"reduce_bucket_size": 20, "allgather_bucket_size": 20}
FLOAT32_CELLS = {
    "stage 0": (None, {}),
    "stage 1": ({"stage": 1}, {}),
    "stage 2": ({"stage": 2}, {}),
    "stage 3": ({"stage": 3}, {}),
    "stage 1, no overlap": ({"stage": 1, "overlap_comm": False}, {}),
    "stage 2, overlap_comm": ({"stage": 2, "overlap_comm": True}, {}),
    "stage 3, overlap_comm": ({"stage": 3, "overlap_comm": True}, {}),
    "stage 1, contiguous_gradients off": ({"stage": 1, "contiguous_gradients": False}, {}),
    "stage 2, contiguous_gradients off": ({"stage": 2, "contiguous_gradients": False}, {}),
    "stage 3, contiguous_gradients off": ({"stage": 3, "contiguous_gradients": False}, {}),
    "stage 1, round_robin": ({"stage": 1, "round_robin_gradients": True}, {}),
    "stage 2, round_robin": ({"stage": 2, "round_robin_gradients": True}, {}),
    "stage 2, reduce_scatter off": ({"stage": 2, "reduce_scatter": False}, {}),
    "stage 1, small buckets": ({"stage": 1, **SMALL}, {}),
    "stage 2, small buckets": ({"stage": 2, **SMALL}, {}),
    "stage 3, small sub-groups": ({"stage": 3, "sub_group_size": 40, "reduce_bucket_size": 40}, {}),
    "stage 3, no persistent parameters": ({"stage": 3, "stage3_param_persistence_threshold": 0}, {}),
    "stage 1, optimizer offload": ({"stage": 1, "offload_optimizer": {"device": "cpu"}}, {}),
    "stage 2, optimizer offload": ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, {}),
    "stage 3, optimizer offload": ({"stage": 3, "offload_optimizer": {"device": "cpu"}}, {}),
    "stage 3, both offloaded": (
        {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, {},
    ),
    "stage 0, no clipping": (None, {"clip": 0.0}),
    "stage 1, no clipping": ({"stage": 1}, {"clip": 0.0}),
    "stage 3, no clipping": ({"stage": 3}, {"clip": 0.0}),
    "stage 2, hard clipping": ({"stage": 2}, {"clip": 0.01}),
    "stage 3, hard clipping": ({"stage": 3}, {"clip": 0.01}),
    "stage 0, accumulation": (None, {"accumulation": 4}),
    "stage 1, accumulation": ({"stage": 1}, {"accumulation": 4}),
    "stage 2, accumulation": ({"stage": 2}, {"accumulation": 4}),
    "stage 3, accumulation": ({"stage": 3}, {"accumulation": 4}),
}  # fmt: skip


def float32_gap(zero, cell):
    with running(network(), config(zero, **cell)) as engine:
        if dist.get_world_size() > 1 and zero:
            assert_straddles(engine)
        train(engine, accumulation=cell.get("accumulation", 1))
        return largest_gap(weights(engine), reference(**cell))


@worlds(1, 2, exhaustive=(4,))
@some(FLOAT32_CELLS)
def case_float32(setting):
    gap = float32_gap(*setting)
    assert gap < 1e-6, gap


@worlds(4)
def case_hierarchical_partitioning():
    assert float32_gap({"stage": 3, "zero_hpz_partition_size": 2}, {}) < 1e-6


def huge_bytes(tensor):
    """How much of a tensor's memory lies in huge pages."""
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
    found, inside = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                low, high = (int(address, 16) for address in line.split()[0].split("-"))
                inside = low < end and high > begin
            elif inside and line.startswith("AnonHugePages:"):
                found += int(line.split()[1]) * 1024
    return found


@worlds(1)
@each(stage=(2, 3))
def case_offloaded_weights_and_gradients_lie_in_huge_pages(stage):
    if not collapse(torch.zeros(1 << 22)):
        pytest.skip("this system does not collapse memory into huge pages")
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    with running(nn.Linear(2048, 2048, bias=False), config(zero, **BF16)) as engine:
        (flat,) = (p for p in engine.basic_optimizer.state if p.numel() >= 2048**2)
        assert huge_bytes(flat) > flat.nbytes // 2
        assert huge_bytes(flat.grad) > flat.nbytes // 2


@worlds(2)
def case_partial_offload():
    """Twin-Flow: half of the sub-groups stay on the accelerator, which is another name of the CPU here."""
    zero = {"stage": 3, "sub_group_size": 40, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    stayed = "cpu:0" if devices.NAME == "cpu" else get_accelerator()._name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(get_accelerator(), "_name", stayed)
        with running(network(), config(zero)) as engine:
            places = list(engine.optimizer.subgroup_to_device.values())
            assert places.count(stayed) == len(places) // 2 > 0, places
            train(engine)
            gap = largest_gap(weights(engine), reference())
            assert gap < 1e-6, gap


@worlds(2, exhaustive=(4,))
@each(stage=(1, 2, 3))
def case_with_the_layouts_withheld_the_comparison_fails(stage):
    """The negative control: what DeepSpeed does with an optimizer that takes a shard for a parameter."""
    with running(network(), config({"stage": stage})) as engine:
        engine.basic_optimizer.set_layouts({})
        train(engine)
        gap = largest_gap(weights(engine), reference())
        assert not gap < 1e-3, gap  # NaN if padding was taken for weights


def shifted(layouts):
    """Every segment by one element."""
    return {
        flat: ShardLayout(layout.numel, [dataclasses.replace(s, offset=s.offset + 1) for s in layout.segments])
        for flat, layout in layouts.items()
    }


def with_parameters(layouts, change):
    """The same segments of other parameters."""
    return {
        flat: ShardLayout(
            flat.numel(), [dataclasses.replace(s, parameter=change(s.parameter)) for s in layout.segments]
        )
        for flat, layout in layouts.items()
    }


def swapped(layouts):
    """Two parameters of one size in each other's place."""
    every = {s.parameter.name: s.parameter for layout in layouts.values() for s in layout.segments}
    up, down = every["up.weight"], every["down.weight"]
    assert torch.Size(up.shape).numel() == torch.Size(down.shape).numel()
    return with_parameters(layouts, lambda p: {up: down, down: up}.get(p, p))


def ungrouped(layouts):
    """Every parameter as if this rank held all of it."""
    return with_parameters(layouts, lambda p: dataclasses.replace(p, groups=()))


@worlds(2)
@some(engine=("stage 1", "stage 3", "bf16, BF16_Optimizer", "bf16, stage 0"))
def case_a_layout_that_was_read_wrongly_is_found(engine):
    """If need be on one rank only, and both raise. All sizes fit, and training would have gone on."""
    read = LayoutBuilder._read
    version = re.escape(deepspeed.__version__)
    said = rf"rank [01]: .*laid out.* differ from the model's. Read from DeepSpeed {version}"
    zero, precision, *_ = LOW_CELLS.get(engine) or FLOAT32_CELLS[engine]
    for change in (shifted, swapped) if zero else (swapped,):
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1 or change is swapped:  # one of them need not hold any of the two
                patch.setattr(LayoutBuilder, "_read", lambda self, change=change: change(read(self)))
            with pytest.raises(ValueError, match=said):
                deepspeed.initialize(model=network(), config=config(zero, **precision))


@worlds(2)
@each(stage=(1, 3))
def case_a_process_group_that_was_not_read_is_found(stage):
    """The pieces do not add up to whole parameters."""
    read = LayoutBuilder._read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayoutBuilder, "_read", lambda self: ungrouped(read(self)))
        refused = pytest.raises(ValueError, match="A piece is missing")
        with running(network(), config({"stage": stage})) as engine, refused:
            train(engine, steps=1)


@worlds(2, 4)
def case_padding_may_hold_anything():
    """Stage 3 pads pieces with uninitialised memory; with NaN there, nothing may change."""
    with running(network(), config({"stage": 3})) as engine:
        padded = 0
        for params, flat in zip(
            engine.optimizer.fp16_groups, engine.optimizer.fp32_partitioned_groups_flat, strict=True
        ):
            end = 0
            for p in params:
                start, end = end, end + p.ds_tensor.ds_numel
                beyond = (dist.get_rank() + 1) * p.ds_tensor.ds_numel - p.ds_numel
                if beyond > 0:
                    with torch.no_grad():
                        flat[max(start, end - beyond) : end] = torch.nan
                    padded += 1
        assert padded or dist.get_rank() + 1 < dist.get_world_size()
        train(engine)
        gap = largest_gap(weights(engine), reference())
        assert gap < 1e-6, gap


@worlds(2, exhaustive=(4,))
@each(stage=(1, 2, 3))
def case_one_collective_a_group_and_step(stage):
    """Stages 1 and 2 step group by group, stage 3 sub-group by sub-group: one small all-reduce in each."""
    from alto_distributed.sharding import norms

    with running(network(), config({"stage": stage})) as engine:
        train(engine, steps=1)
        counted, original = [], norms.start_all_reduce
        norms.start_all_reduce = lambda *a: counted.append(1) or original(*a)
        try:
            train(engine, steps=1)
        finally:
            norms.start_all_reduce = original
        assert len(counted) == 2, counted


# -- low precision -------------------------------------------------------------------------------------


def rounded_reference(dtype, **options):
    """Master weights in float32 (they start rounded), forward and backward on their rounded copy, gradients
    summed as the engine does.

    Stage 3 puts a function of its own in the place of F.linear, which rounds otherwise.
    """
    return _rounded_reference(nn.functional.linear, dtype, **options)


@functools.cache
def _rounded_reference(
    linear, dtype, *, accumulation=1, accumulate_in=None, communicate_in=None, scale=1.0, steps=STEPS
):
    del linear  # for the cache: the model uses it
    master, model = network().to(dtype).float(), network().to(dtype)
    optimizer = ALTO(split_bare_parameters(list(master.parameters())), **BITWISE)
    pairs = list(zip(trainable(master).values(), trainable(model).values(), strict=True))
    for step in batches(steps, accumulation):
        summed = {}
        for x, y in step:
            model.zero_grad()
            (loss_of(model(x), y) / accumulation * scale).backward()
            for _, p in pairs:
                g = (torch.zeros_like(p) if p.grad is None else p.grad).to(accumulate_in or dtype)
                summed[p] = summed[p] + g if p in summed else g
        for m, p in pairs:
            m.grad = summed[p].to(communicate_in or dtype).float() / scale
        optimizer.step()
        with torch.no_grad():
            for m, p in pairs:
                p.copy_(m)
    return master, optimizer


# So large that no gradient is subnormal in float16: an average over four ranks would be rounded.
SCALE = 4096
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale": SCALE}}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
# Stages 2 and 3 reduce every micro-batch by itself, and round no sum; BF16_Optimizer rounds it before it sends it.
UNROUNDED = {"accumulate_in": torch.float32, "communicate_in": torch.float32, "accumulation": 4}
LOW_CELLS = {
    "bf16, stage 0": (None, BF16, {}),
    "bf16, stage 1": ({"stage": 1}, BF16, {}),
    "bf16, stage 2": ({"stage": 2}, BF16, {}),
    "bf16, stage 3": ({"stage": 3}, BF16, {}),
    "bf16, BF16_Optimizer": ({"stage": 1}, {**BF16, **FP32_SUMS}, {"accumulate_in": torch.float32}),
    "bf16, BF16_Optimizer, accumulation": (
        {"stage": 1}, {**BF16, **FP32_SUMS}, {"accumulate_in": torch.float32, "accumulation": 4},
    ),
    "bf16, stage 2, float32 sums": ({"stage": 2}, {**BF16, **FP32_SUMS}, UNROUNDED),
    "bf16, stage 3, float32 sums": ({"stage": 3}, {**BF16, **FP32_SUMS}, UNROUNDED),
    "fp16, stage 2, float32 sums": ({"stage": 2}, {**FP16, **FP32_SUMS}, UNROUNDED),
    "bf16, stage 2, offload": ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, BF16, {}),
    "bf16, stage 3, offload": ({"stage": 3, "offload_optimizer": {"device": "cpu"}}, BF16, {}),
    "bf16, stage 0, accumulation": (None, BF16, {"accumulation": 4}),
    "bf16, stage 1, accumulation": ({"stage": 1}, BF16, {"accumulation": 4}),
    "bf16, stage 2, accumulation": ({"stage": 2}, BF16, {"accumulation": 4}),
    "bf16, stage 3, accumulation": ({"stage": 3}, BF16, {"accumulation": 4}),
    "fp16, stage 1": ({"stage": 1}, FP16, {}),
    "fp16, stage 2": ({"stage": 2}, FP16, {}),
    "fp16, stage 3": ({"stage": 3}, FP16, {}),
    "fp16, stage 1, accumulation": ({"stage": 1}, FP16, {"accumulation": 4}),
    "fp16, stage 2, accumulation": ({"stage": 2}, FP16, {"accumulation": 4}),
    "fp16, stage 3, accumulation": ({"stage": 3}, FP16, {"accumulation": 4}),
    "fp16, stage 2, offload": ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, FP16, {}),
}  # fmt: skip


def low_config(zero, precision, cell):
    """All ranks see the whole batch, so that averaging is exact."""
    ds_config = config(zero, clip=0.0, accumulation=cell.get("accumulation", 1), params=BITWISE, **precision)
    return {**ds_config, "train_micro_batch_size_per_gpu": 8}


def low_precision_gap(zero, precision, cell):
    """Largest difference of the master weights to the reference that rounds at the same points; 0 if bitwise right."""
    with running(network(), low_config(zero, precision, cell)) as engine:
        train(engine, accumulation=cell.get("accumulation", 1), sliced=False)
        got = masters(engine)
    dtype, scale = (torch.float16, float(SCALE)) if "fp16" in precision else (torch.bfloat16, 1.0)
    expected, _ = rounded_reference(dtype, scale=scale, **cell)
    return torch.stack([(got[name] - p.detach()).abs().max() for name, p in trainable(expected).items()]).max().item()


@worlds(1, 2, exhaustive=(4,))
@some(LOW_CELLS)
def case_low_precision_is_bitwise_right(setting):
    assert low_precision_gap(*setting) == 0


def same_bits(a, b):
    """Equal also where both are NaN, as stage 3's uninitialised padding may be."""
    return torch.equal(a.detach().view(torch.int32), b.detach().view(torch.int32))


@worlds(2)
@each(stage=(1, 2, 3))
def case_skipped_steps_change_nothing(stage):
    """A dynamic loss scale that starts too high: steps are skipped, and then not even k has moved."""
    fp16 = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 1000}
    with running(network(), config({"stage": stage}, fp16=fp16)) as engine:
        optimizer = engine.basic_optimizer
        skipped = taken = 0
        for x, y in (pair for step in batches() for pair in step):
            before = [t.clone() for s in optimizer.state.values() for t in s.values()]
            shards = [t.detach().clone() for t in optimizer.state]
            skips = engine.skipped_steps
            engine.backward(loss_of(engine(x), y))
            engine.step()
            after = [t for s in optimizer.state.values() for t in s.values()]
            if engine.skipped_steps > skips:
                skipped += 1
                assert all(map(same_bits, before, after))
                assert all(map(same_bits, shards, optimizer.state))
            else:
                taken += 1
        assert skipped, "the scale never was too high"
        assert taken, "no step was taken"
        assert {int(s["step"]) for s in optimizer.state.values()} == {taken}


# -- ways in -------------------------------------------------------------------------------------------


@worlds(2)
@some(name=("alto", "Alto", "ALTO"))
def case_a_name_in_any_case(name):
    with running(network(), config({"stage": 2}, name=name)) as engine:
        train(engine)
        assert largest_gap(weights(engine), reference()) < 1e-6


@worlds(2)
@some(stage=(0, 1, 2, 3))
def case_eadamw(stage):
    with running(network(), config({"stage": stage} if stage else None, name="EAdamW")) as engine:
        train(engine)
        assert largest_gap(weights(engine), reference(layerwise="none")) < 1e-6


@worlds(2)
@some(stage=(0, 1, 2, 3))
def case_lamb(stage):
    with running(network(), config({"stage": stage} if stage else None, params={**PARAMS, "alpha": 0})) as engine:
        train(engine)
        assert not any("grad_ema" in s for s in engine.basic_optimizer.state.values())
        assert largest_gap(weights(engine), reference(alpha=0)) < 1e-6


@worlds(2)
@some(stage=(0, 1, 2, 3))
def case_esgd(stage):
    params = {"lr": 0.05, "momentum": 0.9, "alpha": -5, "beta1": 0.99}
    model = network()
    optimizer = alto_distributed.deepspeed.ESGD(trainable(model).values(), **params)
    for step in batches():
        optimizer.zero_grad()
        for x, y in step:
            loss_of(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with running(network(), config({"stage": stage} if stage else None, name="ESGD", params=params)) as engine:
        train(engine)
        gap = largest_gap(weights(engine), model)
        assert gap < 1e-6, gap


CLIENTS = {
    "stage 1": {"stage": 1},
    "stage 2, offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "stage 3": {"stage": 3},
}


@worlds(2)
@some(CLIENTS, given=("instance", "callable"))
def case_client_built_optimizers_get_the_same_treatment(setting, given):
    model, ds_config = network(), config(setting)
    del ds_config["optimizer"]

    def build(params):
        return ALTO(split_bare_parameters(list(params)), **{**PARAMS, "betas": tuple(PARAMS["betas"])})

    optimizer = build(model.parameters()) if given == "instance" else build
    with running(model, ds_config, optimizer=optimizer) as engine:
        train(engine)
        assert largest_gap(weights(engine), reference()) < 1e-6


def two_groups(model):
    named = trainable(model)
    fast = [p for n, p in named.items() if n.startswith("up")]
    slow = [p for n, p in named.items() if not n.startswith("up")]
    return [{"params": fast, "lr": 0.1, "alpha": 2.0, "layerwise": "all"}, {"params": slow, "weight_decay": 0.3}]


@worlds(2, exhaustive=(4,))
@each(stage=(0, 1, 2, 3))
def case_parameter_groups_are_kept_as_they_are(stage):
    model = network()
    with running(model, config({"stage": stage} if stage else None), model_parameters=two_groups(model)) as engine:
        assert [g["alpha"] for g in engine.basic_optimizer.param_groups] == [2.0, -5.0]
        train(engine)
        gap = largest_gap(weights(engine), reference(groups=two_groups))
        assert gap < 1e-6, gap


def born_sharded():
    """A model made under zero.Init, and the same in plain tensors."""
    with deepspeed.zero.Init(config_dict_or_path=config({"stage": 3})):
        model = network()
    whole = network()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([p]), torch.no_grad():
            q.copy_(p)
    assert {p.ndim for p in model.parameters()} == {1}
    return model, whole


#: How ALTO reaches DeepSpeed: what is left of the config, and arguments for deepspeed.initialize.
DOORS = {
    "JSON": lambda model: {},
    "groups": lambda model: {"model_parameters": param_groups(model)},
    "client": lambda model: {"optimizer": ALTO(param_groups(model), **PARAMS)},
    "callable": lambda model: {"optimizer": lambda _: ALTO(param_groups(model), **PARAMS)},
}


@worlds(2)
@each(DOORS)
def case_zero_init(setting):
    """Parameters born sharded hide their shape; the split into decayed and undecayed must not be fooled.

    ``param_groups`` once was: all parameters went undecayed and without the ratio.
    """
    model, expected = born_sharded()
    options, ds_config = setting(model), config({"stage": 3})
    if "optimizer" in options:
        del ds_config["optimizer"]
    with running(model, ds_config, **options) as engine:
        decays = [g["weight_decay"] for g in engine.basic_optimizer.param_groups]
        assert decays == [0.01, 0.0], decays
        train(engine)
        gap = largest_gap(weights(engine), reference(make=lambda: expected))
        assert gap < 1e-6, gap


SCHEDULERS = {
    "WarmupLR": {"warmup_min_lr": 0.01, "warmup_max_lr": 0.05, "warmup_num_steps": 5, "warmup_type": "linear"},
    "WarmupDecayLR": {"total_num_steps": 12, "warmup_min_lr": 0.0, "warmup_max_lr": 0.05, "warmup_num_steps": 4},
    "WarmupCosineLR": {"total_num_steps": 12, "warmup_num_steps": 4, "warmup_min_ratio": 0.1},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.05, "cycle_first_step_size": 4},
}


@worlds(2)
@some(name=SCHEDULERS, stage=(1, 3))
def case_schedulers_from_the_json(name, stage):
    """OneCycle cycles the beta of the first moment as well. The second's is kept: it became 0.99, whatever it was."""
    rank, given = dist.get_rank(), []
    params, scheduler = {**PARAMS, "betas": [0.99, 0.9, 0.95]}, {"type": name, "params": SCHEDULERS[name]}
    with running(network(), config({"stage": stage}, params=params, scheduler=scheduler)) as engine:
        for x, y in (pair for step in batches() for pair in step):
            *_, momentum, _ = engine.basic_optimizer.param_groups[0]["betas"]
            given.append({"lr": engine.get_lr()[0], "betas": (0.99, momentum, 0.95)})
            engine.backward(loss_of(engine(x.chunk(2)[rank]), y.chunk(2)[rank]))
            engine.step()
        assert len({step["lr"] for step in given}) > 3, given
        momenta = {step["betas"][1] for step in given}
        assert len(momenta) > 3 if name == "OneCycle" else momenta == {0.9}, momenta
        gap = largest_gap(weights(engine), reference(schedule=given.__getitem__))
        assert gap < 1e-6, gap


READ = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, small sub-groups": {"stage": 3, "sub_group_size": 40},
}


@worlds(2)
@each(READ)
def case_every_state_of_every_group_can_be_read(setting):
    with running(network(), config(setting)) as engine:
        train(engine, steps=1)
        for name, p in trainable(engine.module).items():
            for key in ALTO.state_keys:
                state = safe_get_full_optimizer_state(p, key)
                assert state is not None, (name, key)
                if name != "unused":
                    assert state.abs().sum() > 0, (name, key)


@worlds(2)
@each(stage=(0, 1, 2, 3))
def case_diagnostics_are_those_of_whole_parameters_and_reach_the_monitor(stage, directory):
    """Names as in the module, values as without sharding, a summary in DeepSpeed's CSV monitor."""
    model = network()
    plain = ALTO(split_bare_parameters(list(model.parameters())), diagnostics_every=2, **PARAMS)
    for step in batches(2):
        plain.zero_grad()
        for x, y in step:
            loss_of(model(x), y).backward()
        for p in trainable(model).values():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        plain.step()
    names = [n for decayed in (True, False) for n, p in trainable(model).items() if (p.ndim >= 2) == decayed]
    expected = dict(zip(names, plain.diagnostics().values(), strict=True))
    csv = {"enabled": True, "output_path": str(directory), "job_name": f"stage{stage}"}
    zero = {"stage": stage} if stage else None
    ds_config = config(zero, params={**PARAMS, "diagnostics_every": 2}, csv_monitor=csv)
    with running(network(), ds_config) as engine:
        train(engine, steps=2)
        readings = engine.basic_optimizer.diagnostics()
        assert readings.keys() == expected.keys(), readings.keys()
        for name, reading in readings.items():
            assert tuple(reading) == pytest.approx(tuple(expected[name]), rel=1e-4, abs=1e-6), name
    if dist.get_rank() == 0:
        written = {p.name for p in (directory / f"stage{stage}").iterdir()}
        assert "Train_ALTO_trust_ratio_median.csv" in written, written


# -- the bugs that DeepSpeed's own Muon had -----------------------------------------------------------------


@worlds(2, 4)
@each(stage=(1, 2))
def case_muon_7807_parameters_that_cross_partitions(stage):
    """Muon orthogonalised the piece of a matrix that lay on a rank. The ratio must be of the whole matrix."""
    with running(network(), config({"stage": stage})) as engine:
        assert_straddles(engine)
        train(engine)
        assert largest_gap(weights(engine), reference()) < 1e-6


@worlds(2)
@some(stage=(0, 1, 2, 3))
def case_muon_8443_state_advances_once_a_step_not_once_a_micro_batch(stage):
    with running(network(), config({"stage": stage} if stage else None, accumulation=4)) as engine:
        train(engine, steps=3, accumulation=4)
        assert {int(s["step"]) for s in engine.basic_optimizer.state.values()} == {3}
        assert largest_gap(weights(engine), reference(steps=3, accumulation=4)) < 1e-6


@worlds(2)
def case_muon_8438_shapes_hidden_by_zero_init():
    """Under zero.Init a matrix reports the shape (0,); what is a matrix must still be known."""
    with deepspeed.zero.Init(config_dict_or_path=config({"stage": 3})):
        model = network()
    assert model.up.weight.ndim == 1
    matrices = {"params": {**PARAMS, "layerwise": "matrices"}}
    with running(model, config({"stage": 3}, **matrices)) as engine:
        shapes = [s.parameter.shape for lay in LayoutBuilder(engine).build().values() for s in lay.segments]
        assert (13, 6) in shapes
        assert (13,) in shapes
        decays = [(g["weight_decay"], g["name"]) for g in engine.basic_optimizer.param_groups]
        assert decays == [(0.01, "decayed"), (0.0, "undecayed")]


@worlds(2)
@each({"fp32": {}, "bf16": BF16})
def case_muon_8442_stage_0_runs_the_chosen_optimizer(setting):
    """Muon at stage 0 silently ran plain SGD."""
    with running(network(), config(**setting)) as engine:
        train(engine, steps=2)
        assert type(engine.basic_optimizer) is ALTO
        assert {int(s["step"]) for s in engine.basic_optimizer.state.values()} == {2}
        assert all(s["grad_ema"].any() for p, s in engine.basic_optimizer.state.items() if p.shape != (3, 3))


def groups_with_embeddings(model):
    return param_groups(model, PARAMS["weight_decay"], embeddings="adam")


@worlds(2)
@each({"stage 1": {"stage": 1}, "stage 3": {"stage": 3, "sub_group_size": 40}})
def case_vectors_at_a_rate_of_their_own_and_embeddings_without_ratio(setting):
    params = {**PARAMS, "vector_lr": 0.3, "embeddings": "adam"}
    with running(network(), config(setting, params=params)) as engine:
        assert_straddles(engine)
        train(engine)
        gap = largest_gap(weights(engine), reference(vector_lr=0.3, groups=groups_with_embeddings))
        assert gap < 1e-6, gap
        for other in (reference(groups=groups_with_embeddings), reference(vector_lr=0.3)):
            assert largest_gap(weights(engine), other) > 1e-3
    model = network()
    given = {"model": model, "model_parameters": param_groups(model), "config": config(setting, params=params)}
    with pytest.raises(ValueError, match='"embeddings": "adam" has no effect on parameter groups that are given'):
        deepspeed.initialize(**given)


@worlds(2)
def case_lamb_is_ours_if_it_is_asked_for():
    """ "type": "LAMB" was DeepSpeed's, with a ratio for each shard of its own, and stays so."""
    params = {"lr": 0.01, "betas": [0.9, 0.99], "weight_decay": 0.01, "trust_clip": [0.01, 10.0]}
    results = []
    for name, more in (("LAMB", {"implementation": "alto"}), ("ALTO_LAMB", {})):
        for zero in (None, {"stage": 2}, {"stage": 3}):
            torch.manual_seed(0)
            with running(network(), config(zero, name=name, params={**params, **more})) as engine:
                train(engine, steps=3)
                assert type(engine.basic_optimizer) is LAMB
                assert all("grad_ema" not in state for state in engine.basic_optimizer.state.values())
                results.append(weights(engine))
    for other in results[1:]:
        for name, weight in results[0].items():
            torch.testing.assert_close(other[name], weight, rtol=1e-5, atol=1e-6)
    with pytest.raises(TypeError, match="FusedLamb.*trust_clip"):  # DeepSpeed's own, which does not know it
        deepspeed.initialize(model=network(), config=config(name="LAMB", params=params))
    with pytest.raises(ValueError, match=r'"implementation": .apex. of LAMB is not "alto"'):
        deepspeed.initialize(model=network(), config=config(name="Lamb", params={**params, "implementation": "apex"}))


# -- refusals ------------------------------------------------------------------------------------------

ZENFLOW = {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 4, "update_interval": 4}
REFUSED = {
    "alpha out of range": ({"params": {**PARAMS, "alpha": -100}}, r"alpha=-100 is out of range"),
    "one beta": ({"params": {**PARAMS, "betas": [0.99]}}, r"betas=\[0.99\] must be three numbers"),
    "lr as text": ({"params": {**PARAMS, "lr": "1e-2"}}, r"lr='1e-2' must be a finite number"),
    "a name with a typo": (
        {"params": {**PARAMS, "weight_deacy": 0}}, r"'weight_deacy' is not a hyperparameter of ALTO; did you mean",
    ),
    "auto": ({"params": {**PARAMS, "lr": "auto"}}, r'"lr": "auto" of alto is for Hugging Face.*; write one, or'),
    "torch_adam": ({"params": {**PARAMS, "torch_adam": True}}, r"'torch_adam' is not a hyperparameter of ALTO"),
    "max_grad_norm": ({"params": {**PARAMS, "max_grad_norm": 1.0}}, r'set "gradient_clipping"'),
    "lr beside params": (
        {"optimizer": {"type": "Alto", "lr": 0.03}},
        r'"lr": 0.03 of the optimizer Alto is not among its "params", and would be ignored; write .*{"lr": ...}',
    ),
    "params that are no object": (
        {"params": [{"lr": 0.03}]},
        r'"params": \[\{.lr.: 0.03\}\] of the optimizer ALTO should be an object such as {"lr": 0.01}; write one, or',
    ),
    "LAMB's implementation beside params": (
        {"optimizer": {"type": "LAMB", "params": {}, "implementation": "alto"}},
        r'"implementation": .alto. of the optimizer LAMB is not among its "params"',
    ),
    "EAdamW with layerwise": ({"name": "EAdamW", "params": {"layerwise": "all"}}, r"EAdamW is ALTO with layerwise"),
    "ESGD with a typo": (
        {"name": "ESGD", "params": {"momentun": 0.9}}, r"'momentun' is not a hyperparameter.*did you mean 'momentum'",
    ),
    "fp16 at stage 0": ({"fp16": {"enabled": True}}, r"fp16 at ZeRO stage 0 does not scale the loss.*stage\": 1"),
    "parameters to NVMe": (
        {"zero": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}},
        r'offload_param to NVMe has not been tested.*use "device": "cpu"',
    ),
    "zenflow": (
        {"zero": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": ZENFLOW}},
        r"zenflow steps its own CPU Adam",
    ),
    "SuperOffload": (
        {"zero": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
        r'SuperOffload runs DeepSpeedCPUAdam in its own processes; set "super_offload": false',
    ),
    "float16 autocast": (
        {"zero": {"stage": 1}, "torch_autocast": {"enabled": True, "dtype": "float16"}},
        r'torch_autocast with float16 skips steps on each rank by itself.*use "dtype": "bfloat16"',
    ),
    "float16 master weights": (
        {"zero": {"stage": 2}, "fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
        r"float16 master weights lose small updates; remove fp16_master_weights_and_grads, or use bf16",
    ),
    "DeepCompile": ({"zero": {"stage": 2}, "compile": {"deepcompile": True}}, r"DeepCompile has not been tested"),
}  # fmt: skip


@worlds(2)
@some(REFUSED)
def case_what_cannot_be_done_right_is_refused(setting):
    """On every rank, before training."""
    options, message = setting
    with pytest.raises(ValueError, match=message):
        deepspeed.initialize(model=network(), config=config(**options))


@worlds(2)
def case_a_parameter_without_elements_is_refused():
    model = network()
    model.empty = nn.Parameter(torch.empty(0, 3))
    with pytest.raises(ValueError, match="without elements .* breaks ZeRO stage 3"):
        deepspeed.initialize(model=model, config=config({"stage": 3}))


def told(about, model, ds_config, **options):
    """Of the warnings when an engine is built: those with some words in them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with running(model, ds_config, **options):
            pass
    return [str(w.message) for w in caught if about in str(w.message)]


#: Scheduler -> its params, and the rate of its own that it has a default for.
RATES = {
    "WarmupDecayLR": ({"total_num_steps": 12}, "warmup_max_lr"),
    "LRRangeTest": ({}, "lr_range_test_min_lr"),
    "WarmupLR": ({}, None),
    "WarmupCosineLR": ({"total_num_steps": 12}, None),
    "OneCycle": (SCHEDULERS["OneCycle"], None),
}


@worlds(2)
def case_a_rate_that_is_not_lr_is_told():
    """WarmupDecayLR warms up to 0.001 and LRRangeTest begins there, unless told otherwise. The others take lr."""
    for name, (params, own) in RATES.items():
        for given in ({}, {own: 0.05}) if own else ({},):
            scheduler = {"type": name, "params": {**params, **given}}
            said = told("is not used. Write", network(), config({"stage": 1}, scheduler=scheduler))
            expected = [
                f"the scheduler {name} takes its default {own} of 0.001, and the optimizer's lr of 0.05 is not used. "
                f'Write "{own}": 0.05 among the params of the scheduler'
            ]
            assert said == (expected if own and not given else []), (name, given, said)


@worlds(2)
def case_faults_of_other_releases_are_told():
    """Those that hang on more than the config: torch's version, and gloo."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed, "__version__", "0.18.8")
        if torch.__version__ >= "2.11":
            with pytest.raises(
                ValueError, match=r"0\.18\.8 fails at ZeRO stages 1 and 2 over .*use DeepSpeed 0\.18\.6"
            ):
                deepspeed.initialize(model=network(), config=config({"stage": 1}))
        patch.setattr(torch, "__version__", "2.10.0")
        assert told("over gloo", network(), config({"stage": 2})) == []
        said = told("over gloo", network(), config({"stage": 3}))
        assert len(said) == (devices.NAME == "cpu")  # the others do not run over gloo
        expected = "DeepSpeed 0.18.8 at ZeRO stage 3 over gloo may use weights before they have arrived"
        assert all(line.startswith(expected) for line in said)
    assert told("over gloo", network(), config({"stage": 3})) == []


@worlds(2)
def case_two_betas():
    """They are Adam's, and become those of the moments."""
    with running(network(), config({"stage": 1}, params={**PARAMS, "betas": [0.8, 0.95]})) as engine:
        assert {group["betas"] for group in engine.basic_optimizer.param_groups} == {(0.99, 0.8, 0.95)}


def dropped(model, ds_config, **options):
    """Those about an optimizer that never reaches the engine."""
    return told("never reached DeepSpeed", model, ds_config, **options)


@worlds(2)
def case_an_optimizer_that_never_reaches_the_engine_is_told():
    """As Trainer's, which takes ``optimizers=`` and gives DeepSpeed another one."""
    model, adam = network(), config({"stage": 1}, name="AdamW", params=OTHERS["AdamW"])
    optimizer = ALTO(param_groups(model), **PARAMS)
    (said,) = dropped(model, adam)
    assert said.startswith("ALTO was built for this model and never reached DeepSpeed, which trains with AdamW. Name")
    (said,) = dropped(model, config({"stage": 1}))  # another ALTO
    assert "trains with ALTO" in said
    assert dropped(network(), adam) == []
    by_client = config({"stage": 1})
    del by_client["optimizer"]
    assert dropped(model, by_client, optimizer=optimizer) == []


OTHERS = {"AdamW": {"lr": 1e-3, "torch_adam": True}, "SGD": {"lr": 0.1}, "RMSprop": {"lr": 1e-3}}


@worlds(2)
@each(name=OTHERS)
def case_other_optimizers_are_left_alone(name):
    with running(network(), config(name=name, params=OTHERS[name])) as engine:
        train(engine, steps=2)
        assert type(engine.basic_optimizer).__name__ == name


@worlds(2)
def case_what_deepspeed_says_of_other_optimizers():
    with running(network(), config({"stage": 1}, name="AdamW", params=OTHERS["AdamW"])) as engine:
        train(engine, steps=2)
    with pytest.raises(AssertionError, match="untested ZeRO Optimizer"):
        deepspeed.initialize(model=network(), config=config({"stage": 1}, name="SGD", params={"lr": 0.1}))
    with pytest.raises(AssertionError, match="not a supported DeepSpeed Optimizer"):
        deepspeed.initialize(model=network(), config=config(name="Allto"))
