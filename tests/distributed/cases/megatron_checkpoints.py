"""Megatron's checkpoints: all three states and the step count, saved and loaded in every format and layout.

What two ranks save here is loaded by two in the same and in other layouts, and by one and by four.
"""

import contextlib
import dataclasses
import functools
import queue
import shutil
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tests.helpers.megatron_gpt import (
    ALTO_OPTIONS,
    LR,
    WEIGHT_DECAY,
    Job,
    Layout,
    Megatron,
    alto_config,
    on_host,
    parallel,
)

# The imports below need what megatron_gpt puts in place of a GPU.
from megatron.core import dist_checkpointing, parallel_state  # isort: skip
from megatron.core.dist_checkpointing.mapping import ShardedObject  # isort: skip
from megatron.core.dist_checkpointing.strategies import filesystem_async  # isort: skip
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy  # isort: skip
from megatron.core.optimizer import OptimizerConfig  # isort: skip
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # isort: skip
from megatron.core.utils import unwrap_model  # isort: skip

from alto_distributed import ALTO
from alto_distributed.megatron import checkpoint_formats as formats
from alto_distributed.megatron import gather_state as gathering
from alto_distributed.megatron.group_loading import regrouped
from tests.helpers import devices
from tests.helpers.cases import after, each, worlds

# A save that nobody does anything beside reports in this process: no need to start another one to ask.
filesystem_async._results_queue = queue.Queue()

BEFORE, AFTER = 3, 3

gathering._AT_A_TIME = 500  # many parts of each bucket, also of these small ones

FULLY = {"distrib_optim_sharding_type": "fully_reshardable"}
BY_GLOO = {**FULLY, "distrib_optim_fully_reshardable_mem_efficient": True}
DP = {"distrib_optim_sharding_type": "dp_reshardable"}
DP_ZERO = {"distrib_optim_sharding_type": "dp_zero_gather_scatter"}
#: Megatron's ways of saving, by the names of folders; files are those from before dist_checkpointing.
FORMATS = {"fully": FULLY, "fully, by gloo": BY_GLOO, "dp": DP, "dp zero": DP_ZERO, "replicated": {}, "files": None}


#: Ours, and that of dist_checkpointing, which says what it does not find before we are asked.
REFUSALS = (ValueError, CheckpointException)


@dataclasses.dataclass(frozen=True)
class Run:
    """What is trained in which layout, and the formats it is saved in."""

    formats: tuple[str, ...]
    job: Job = Job(layers=1, tied=False)  # noqa: RUF009
    layout: Layout = Layout()  # noqa: RUF009
    distributed: bool = True
    bucket_size: int | None = None
    overlap: bool = False  # also where bucket_size is set: without, there is one bucket
    options: tuple[tuple[str, object], ...] = ()
    tensors: tuple[str, ...] = ("model", "master", *ALTO.state_keys)

    @property
    def exact(self):
        """Whether another layout rounds little: half precision does so wherever the work is cut."""
        return self.job.precision == torch.float32

    def in_layout(self, layout):
        return dataclasses.replace(self, layout=layout)


TP2, EP2 = Layout(tensor=2), Layout(expert=2)
EXPERTS = Job(layers=1, tied=False, experts=4)
BF16, FP16 = Job(layers=1, tied=False, precision=torch.bfloat16), Job(layers=1, tied=False, precision=torch.float16)
SCHEDULED = Job(layers=1, tied=False, scheduled=True, decoupled_lr=0.01)
# The loss scale overflows at first, and then grows every other step.
SCALER = (("initial_loss_scale", 2.0**17), ("loss_scale_window", 2), ("hysteresis", 1))
# One vector alone is trained: it fits into the first rank's half of the buffer.
TINY = Job(layers=1, tied=False, trained="final_layernorm.weight", layerwise="all")
# Matrices alone are trained: their sizes need no padding, in however many buckets.
EVEN = Job(layers=1, tied=False, trained=r"(linear_\w+|embeddings|output_layer)\.weight")
SMALL_STATES = (("alto_exp_avg_dtype", "bfloat16"), ("alto_grad_ema_dtype", "bfloat16"))
PRECISION_AWARE = (("use_precision_aware_optimizer", True), ("exp_avg_dtype", torch.bfloat16))
OFFLOAD = (("optimizer_cpu_offload", True), ("optimizer_offload_fraction", 0.5))
ALL_FORMATS = ("fully", "fully, by gloo", "dp", "dp zero", "files")
EVERYDAY = {
    "DP2": Run(ALL_FORMATS),
    "DP2, bf16": Run(("fully", "dp"), BF16, overlap=True),
    "DP2, states in bfloat16": Run(("fully", "dp"), options=SMALL_STATES),
    "DP2, fp16": Run(("fully",), FP16, options=SCALER),
    "DP2, offload": Run(("fully", "dp"), BF16, options=OFFLOAD),
    "DP2, buckets": Run(("dp", "dp zero"), bucket_size=6000),
    "DP2, one rank holds nothing": Run(("fully", "dp zero"), TINY),
    "DP2, LAMB": Run(
        ("fully", "dp"), options=(("alto_alpha", 0.0),), tensors=("model", "master", *ALTO.state_keys[:2])
    ),
    "TP2": Run(("fully", "dp"), layout=TP2),
    "TP2, FP32Optimizer": Run(("replicated", "files"), layout=TP2, distributed=False),
    "TP2, Float16Optimizer": Run(("replicated", "files"), BF16, TP2, distributed=False),
    "EP2": Run(("fully", "dp"), EXPERTS, EP2),
    "DP2, experts": Run(("fully",), EXPERTS),
}
#: Those that vary what two others show already, and wait for exhaustive runs.
VARIATIONS = {
    "DP2, precision-aware": Run(("fully", "dp"), BF16, options=PRECISION_AWARE),
    "DP2, states in bfloat16, other formats": Run(("fully, by gloo", "dp zero", "files"), options=SMALL_STATES),
    "DP2, scheduled": Run(("fully", "dp"), SCHEDULED),
    "TP2, FP32Optimizer, scheduled": Run(("replicated",), SCHEDULED, TP2, distributed=False),
    "DP2, buckets without padding": Run(("fully",), EVEN, bucket_size=4000),
    "TP2, Float16Optimizer, fp16": Run(("replicated",), FP16, TP2, distributed=False, options=SCALER),
    "TP2, states in bfloat16, replicated": Run(
        ("replicated", "files"), layout=TP2, distributed=False, options=SMALL_STATES
    ),
    "TP2, Float16Optimizer, states in bfloat16": Run(
        ("replicated",), BF16, TP2, distributed=False, options=SMALL_STATES
    ),
}
RUNS = {**EVERYDAY, **VARIATIONS}

#: Each run with each of its formats. Settings are read from the source, so they are written out.
SAVED = {
    "DP2, fully": ("DP2", "fully"),
    "DP2, fully, by gloo": ("DP2", "fully, by gloo"),
    "DP2, dp": ("DP2", "dp"),
    "DP2, dp zero": ("DP2", "dp zero"),
    "DP2, files": ("DP2", "files"),
    "DP2, bf16, fully": ("DP2, bf16", "fully"),
    "DP2, bf16, dp": ("DP2, bf16", "dp"),
    "DP2, states in bfloat16, fully": ("DP2, states in bfloat16", "fully"),
    "DP2, states in bfloat16, dp": ("DP2, states in bfloat16", "dp"),
    "DP2, fp16, fully": ("DP2, fp16", "fully"),
    "DP2, offload, fully": ("DP2, offload", "fully"),
    "DP2, offload, dp": ("DP2, offload", "dp"),
    "DP2, buckets, dp": ("DP2, buckets", "dp"),
    "DP2, buckets, dp zero": ("DP2, buckets", "dp zero"),
    "DP2, one rank holds nothing, fully": ("DP2, one rank holds nothing", "fully"),
    "DP2, one rank holds nothing, dp zero": ("DP2, one rank holds nothing", "dp zero"),
    "DP2, LAMB, fully": ("DP2, LAMB", "fully"),
    "DP2, LAMB, dp": ("DP2, LAMB", "dp"),
    "TP2, fully": ("TP2", "fully"),
    "TP2, dp": ("TP2", "dp"),
    "TP2, FP32Optimizer, replicated": ("TP2, FP32Optimizer", "replicated"),
    "TP2, FP32Optimizer, files": ("TP2, FP32Optimizer", "files"),
    "TP2, Float16Optimizer, replicated": ("TP2, Float16Optimizer", "replicated"),
    "TP2, Float16Optimizer, files": ("TP2, Float16Optimizer", "files"),
    "EP2, fully": ("EP2", "fully"),
    "EP2, dp": ("EP2", "dp"),
    "DP2, experts, fully": ("DP2, experts", "fully"),
}
MORE_SAVED = {
    "DP2, precision-aware, fully": ("DP2, precision-aware", "fully"),
    "DP2, precision-aware, dp": ("DP2, precision-aware", "dp"),
    "DP2, states in bfloat16, other formats, fully, by gloo": (
        "DP2, states in bfloat16, other formats",
        "fully, by gloo",
    ),
    "DP2, states in bfloat16, other formats, dp zero": ("DP2, states in bfloat16, other formats", "dp zero"),
    "DP2, states in bfloat16, other formats, files": ("DP2, states in bfloat16, other formats", "files"),
    "DP2, scheduled, fully": ("DP2, scheduled", "fully"),
    "DP2, scheduled, dp": ("DP2, scheduled", "dp"),
    "TP2, FP32Optimizer, scheduled, replicated": ("TP2, FP32Optimizer, scheduled", "replicated"),
    "DP2, buckets without padding, fully": ("DP2, buckets without padding", "fully"),
    "TP2, Float16Optimizer, fp16, replicated": ("TP2, Float16Optimizer, fp16", "replicated"),
    "TP2, states in bfloat16, replicated, replicated": ("TP2, states in bfloat16, replicated", "replicated"),
    "TP2, states in bfloat16, replicated, files": ("TP2, states in bfloat16, replicated", "files"),
    "TP2, Float16Optimizer, states in bfloat16, replicated": (
        "TP2, Float16Optimizer, states in bfloat16",
        "replicated",
    ),
}
assert [*SAVED.values(), *MORE_SAVED.values()] == [(label, kind) for label, run in RUNS.items() for kind in run.formats]


@functools.cache
def gloo_of(group):
    """The same ranks, by gloo. On the CPU all groups are gloo's."""
    if devices.NAME == "cpu":
        return group
    # Of all groups that Megatron has for a layout, those of this rank's place in them; made by all ranks together.
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, dist.get_process_group_ranks(group))
    made = {ranks: dist.new_group(list(ranks), backend="gloo") for ranks in sorted({*map(tuple, everywhere)})}
    return made[tuple(dist.get_process_group_ranks(group))]


@contextlib.contextmanager
def engine_for(run, optimizer=None, **options):
    """The run's engine, on its process groups."""
    config = optimizer or dataclasses.replace(alto_config(run.job), **{**dict(run.options), **options})
    with parallel(run.layout):
        engine = Megatron(
            run.job,
            run.layout,
            distributed=run.distributed,
            overlap=run.overlap or run.bucket_size is not None,
            bucket_size=run.bucket_size,
            optimizer=config,
            same=not run.exact,  # what every rank computes alike is averaged exactly
        )
        for wrapper in engine.wrappers if run.distributed else ():
            wrapper.data_parallel_group_gloo = gloo_of(wrapper.data_parallel_group)
        yield engine


@contextlib.contextmanager
def other_engine_for(run, **options):
    """One with other weights and another learning rate, for those that are loaded to show."""
    with engine_for(run, lr=7 * LR, min_lr=0.0, **options) as engine:
        with torch.no_grad():
            for _, p in engine.named_parameters():
                p.add_(0.5)
        yield engine


def advance(engine, start, stop):
    for step in range(start, stop):
        engine.step(step)


# -- what there is to compare --------------------------------------------------------------------------


def whole(engine, pieces):
    """Whole tensors by name and key, from the pieces on all ranks, however the model is cut. All go in one exchange.

    Args:
        engine: of the model that they belong to.
        pieces: key -> name of a parameter -> this rank's piece.
    """
    mine = {}
    for name, p in engine.named_parameters():
        cut = getattr(p, "tensor_model_parallel", False)
        rank = parallel_state.get_tensor_model_parallel_rank() if cut else 0
        for key in (key for key, named in pieces.items() if name in named):
            mine[f"{name} {key}", rank] = (p.partition_dim if cut else 0, packed(pieces[key][name]))
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    out = {}
    for name, rank in sorted({key for theirs in everywhere for key in theirs}):
        dim, piece = next(theirs[name, rank] for theirs in everywhere if (name, rank) in theirs)
        piece = unpacked(*piece)
        out[name] = torch.cat([out[name], piece], dim) if rank else piece
    return out


def packed(tensor):
    """What is pickled in a tenth of the time that the tensor takes."""
    tensor = on_host(tensor).contiguous()
    return tensor.dtype, tensor.shape, tensor.view(-1).view(torch.uint8).numpy()


def unpacked(dtype, shape, data):
    return torch.from_numpy(data).view(dtype).view(shape)


@contextlib.contextmanager
def gathered_parameters(engine):
    """Where parameters are gathered by the forward pass, not before: gather them now, as Megatron-LM does to save."""
    if engine.overlap:
        for chunk in engine.chunks:
            chunk.disable_forward_pre_hook()
    try:
        yield
    finally:
        if engine.overlap:
            for chunk in engine.chunks:
                chunk.enable_forward_pre_hook()


def picture(engine, run):
    """Weights, master weights and states, whole, by name; step counts; the loss scale."""
    with gathered_parameters(engine):
        pieces = {
            key: {name: p.detach() for name, p in engine.named_parameters()}
            if key == "model"
            else engine.gathered(lambda inner, p, key=key: p if key == "master" else inner.state[p][key])
            for key in run.tensors
        }
        out = whole(engine, pieces)
    groups = [(wrapper.optimizer, group) for wrapper in engine.wrappers for group in wrapper.optimizer.param_groups]
    counters = [inner.state[p]["step"] for inner, group in groups for p in group["params"]]
    assert len({counter.data_ptr() for counter in counters}) == len(counters), "parameters share a counter"
    out["steps"] = torch.tensor(sorted({int(group["step"]) for _, group in groups} | set(map(int, counters))))
    if run.job.precision == torch.float16:
        scaler = engine.wrappers[0].grad_scaler.state_dict()
        out["loss scale"] = torch.stack([torch.as_tensor(value).cpu().float().view(()) for value in scaler.values()])
    return out


def hyperparameters(engine):
    """Of every group, in an order that does not depend on the ranks."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    return sorted(groups, key=repr)


def without_experts(groups):
    return {repr({key: value for key, value in group.items() if key != "is_expert_parallel"}) for group in groups}


def assert_same(label, got, expected):
    assert got.keys() == expected.keys(), (label, got.keys() ^ expected.keys())
    for key, value in expected.items():
        assert torch.equal(got[key], value), f"{label}: {key} differs by {(got[key] - value).abs().max():.1e}"


def gap(got, expected):
    """Largest difference relative to the largest element of a parameter's weights; NaN if there is one."""
    assert got.keys() == expected.keys()
    gaps = [
        (got[key].float() - value.float()).abs().max() / value.float().abs().max()
        for key, value in expected.items()
        if key.endswith((" model", " master"))
    ]
    return torch.stack(gaps).max()


# -- saving and loading --------------------------------------------------------------------------------


def place(directory, label, kind=""):
    return directory / "megatron" / label / kind


def fresh(folder):
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    dist.barrier()
    return str(folder)


def metadata(kind):
    """As Megatron-LM makes it."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    always = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True, "dp_cp_group": group}
    return {**FORMATS[kind], **always}


def described(engine, about, is_loading=False):
    """What is saved, or to be loaded into, as Megatron-LM collects it."""
    (model,) = unwrap_model(engine.chunks)
    out = {"model": model.sharded_state_dict(metadata=about)}
    out["optimizer"] = engine.optimizer.sharded_state_dict(out, is_loading=is_loading, metadata=about)
    if engine.scheduler:
        out["opt_param_scheduler"] = engine.scheduler.state_dict()
    return out


def save(engine, folder, kind, change=lambda state: state, **options):
    """Save in one of the formats; ``change`` makes something else of what is saved."""
    if FORMATS[kind] is None:
        with gathered_parameters(engine):
            save_files(engine, fresh(folder), change)
    else:  # ALTO's optimizer gathers parameters itself
        about = metadata(kind)
        state = described(engine, about)
        state["optimizer"] = change(state["optimizer"])
        content = {key: value for key, value in about.items() if key != "dp_cp_group"}
        writer = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
        return dist_checkpointing.save(state, fresh(folder), writer, content_metadata=content, **options)
    dist.barrier()


def load(engine, folder, kind):
    if FORMATS[kind] is None:
        load_files(engine, folder)
        return
    about = dist_checkpointing.load_content_metadata(str(folder))
    about["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = dist_checkpointing.load(described(engine, about, is_loading=True), str(folder))
    (model,) = unwrap_model(engine.chunks)
    model.load_state_dict(state["model"])
    engine.optimizer.load_state_dict(state["optimizer"])
    if engine.scheduler:
        engine.scheduler.load_state_dict(state["opt_param_scheduler"])


def paths(folder):
    rank = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_expert_model_parallel_rank()
    return tuple(f"{folder}/{name} {rank}.pt" for name in ("model", "states"))


def save_files(engine, folder, change):
    """One file for the model and what is replicated, one for the shards, as before dist_checkpointing."""
    (model,) = unwrap_model(engine.chunks)
    common, shards = paths(folder)
    replicated = engine.optimizer.state_dict()
    if not engine.distributed:
        replicated = change(replicated)
    if parallel_state.get_expert_data_parallel_rank() == 0:
        torch.save({"model": model.state_dict_for_save_checkpoint(), "optimizer": replicated}, common)
    if engine.distributed:
        engine.optimizer.save_parameter_state(shards)
        dist.barrier()
        if parallel_state.get_data_parallel_rank() == 0:
            torch.save(change(torch.load(shards)), shards)


def load_files(engine, folder):
    (model,) = unwrap_model(engine.chunks)
    common, shards = paths(folder)
    state = torch.load(common, weights_only=False)
    model.load_state_dict(state["model"])
    engine.optimizer.load_state_dict(state["optimizer"])
    if engine.distributed:
        engine.optimizer.load_parameter_state(shards)


def pictures_of(directory, label):
    return torch.load(place(directory, label) / "pictures.pt", weights_only=False)


def in_another_layout(directory, label, kind, layout):
    """Load there what was saved, which has all tensors bit for bit, and go on; returns the gap at the end."""
    at_save, at_end, saved_hyper = pictures_of(directory, label)
    run = RUNS[label].in_layout(layout)
    with other_engine_for(run) as engine:
        load(engine, place(directory, label, kind), kind)
        assert_same(f"{label}, {kind}, loaded in {layout}", picture(engine, run), at_save)
        if layout.expert == RUNS[label].layout.expert:
            assert hyperparameters(engine) == saved_hyper, (label, kind)
        else:  # groups of experts come and go; all have been saved but for that
            assert without_experts(hyperparameters(engine)) == without_experts(saved_hyper), (label, kind)
        advance(engine, BEFORE, BEFORE + AFTER)
        got = picture(engine, run)
        assert torch.equal(got["steps"], at_end["steps"])
        difference = gap(got, at_end)
    allowed = 1e-6
    if layout.tensor != RUNS[label].layout.tensor:
        # Half precision rounds differently where tensor parallelism cuts; it need only go on. So may a state in
        # bfloat16, by its last bit.
        allowed = 0.1 if not run.exact else 1e-3 if run.options == SMALL_STATES else 1e-6
    assert difference <= allowed, f"{label}, {kind}, in {layout}: {difference:.1e}"


# -- cases ---------------------------------------------------------------------------------------------


@worlds(2)
@each(EVERYDAY, exhaustive=VARIATIONS)
def case_save(directory, label, setting):
    """Train, save once or several times, and train on: as if nothing had been saved."""
    run = setting
    with engine_for(run) as engine:
        if run.distributed and run.job is not TINY:
            engine.assert_straddles()
        advance(engine, 0, BEFORE)
        for kind in run.formats:
            save(engine, place(directory, label, kind), kind)
        at_save, saved_hyper = picture(engine, run), hyperparameters(engine)
        advance(engine, BEFORE, BEFORE + AFTER)
        at_end = picture(engine, run)
    with engine_for(run) as engine:
        advance(engine, 0, BEFORE + AFTER)
        assert_same(label, picture(engine, run), at_end)
    steps = at_save["steps"].tolist()
    assert steps == [BEFORE] if run.job is not FP16 else 0 < steps[0] < BEFORE, steps
    if dist.get_rank() == 0:
        torch.save((at_save, at_end, saved_hyper), place(directory, label) / "pictures.pt")
    dist.barrier()


@worlds(2)
@each(SAVED, exhaustive=MORE_SAVED)
@after("case_save", of=0)
def case_same_layout_goes_on_bit_for_bit(directory, setting):
    label, kind = setting
    run, (at_save, at_end, saved_hyper) = RUNS[label], pictures_of(directory, label)
    with other_engine_for(run) as engine:
        load(engine, place(directory, label, kind), kind)
        assert_same("loaded", picture(engine, run), at_save)
        assert hyperparameters(engine) == saved_hyper
        advance(engine, BEFORE, BEFORE + AFTER)
        assert_same("continued", picture(engine, run), at_end)


#: The run that saved, the format, and the layout that loads.
LAYOUTS = {
    "TP2 to DP2": ("TP2", "fully", Layout()),
    "DP2 to TP2": ("DP2", "fully", TP2),
    "DP2 to TP2, by gloo": ("DP2", "fully, by gloo", TP2),
    "TP2 to DP2, FP32Optimizer": ("TP2, FP32Optimizer", "replicated", Layout()),
    "TP2 to DP2, Float16Optimizer": ("TP2, Float16Optimizer", "replicated", Layout()),
    "DP2 to TP2, bf16": ("DP2, bf16", "fully", TP2),
    "DP2 to TP2, states in bfloat16": ("DP2, states in bfloat16", "fully", TP2),
}
#: Two optimizers become one, and one becomes two.
EXPERT_LAYOUTS = {"EP2 to EP1": ("EP2", "fully", Layout()), "EP1 to EP2": ("DP2, experts", "fully", EP2)}


@worlds(2)
@each(LAYOUTS)
@after("case_save", of=0)
def case_another_layout(directory, setting):
    in_another_layout(directory, *setting)


@worlds(2)
@each({"to the host": ("DP2, bf16", "DP2, offload"), "from the host": ("DP2, offload", "DP2, bf16")})
@after("case_save", of=0)
def case_states_that_move(directory, setting):
    """A run with optimizer_cpu_offload goes on from one without, and the other way around."""
    saved, loads = setting
    at_save, at_end, _ = pictures_of(directory, saved)
    with other_engine_for(RUNS[loads]) as engine:
        load(engine, place(directory, saved, "fully"), "fully")
        assert_same("loaded", picture(engine, RUNS[loads]), at_save)
        advance(engine, BEFORE, BEFORE + AFTER)
        assert_same("continued", picture(engine, RUNS[loads]), at_end)


@worlds(2)
@each(EXPERT_LAYOUTS)
@after("case_save", of=0)
def case_another_expert_parallelism(directory, setting):
    in_another_layout(directory, *setting)


@worlds(2)
def case_another_expert_parallelism_that_is_refused():
    with engine_for(RUNS["DP2, experts"]) as engine:
        files = [engine.optimizer.state_dict()] * 2  # as two optimizers have it where it is not reshardable
        with pytest.raises(ValueError, match=r"2 optimizers and this run has 1: .*save it as fully_reshardable"):
            engine.optimizer.load_state_dict(files)
        decayed, *_ = mine = hyperparameters(engine)
        expert = {**decayed, "is_expert_parallel": True}
        assert regrouped(mine, [expert]) == [expert]
        slower = {**decayed, "max_lr": 0.5}
        assert regrouped([slower, *mine], [expert]) == [expert]
        with pytest.raises(ValueError, match=r"has 2 groups for this run's.*--decoupled-lr"):
            regrouped([slower, *mine], [{**expert, "max_lr": 0.25}])


#: Where the model is cut, two formats alone go to one rank.
FOR_ONE = {
    "DP2, fully": ("DP2", "fully"),
    "DP2, dp": ("DP2", "dp"),
    "DP2, dp zero": ("DP2", "dp zero"),
    "DP2, files": ("DP2", "files"),
    "DP2, bf16, dp": ("DP2, bf16", "dp"),
    "DP2, states in bfloat16, fully": ("DP2, states in bfloat16", "fully"),
    "DP2, fp16, fully": ("DP2, fp16", "fully"),
    "DP2, offload, dp": ("DP2, offload", "dp"),
    "DP2, buckets, dp": ("DP2, buckets", "dp"),
    "DP2, one rank holds nothing, fully": ("DP2, one rank holds nothing", "fully"),
    "DP2, LAMB, dp": ("DP2, LAMB", "dp"),
    "TP2, fully": ("TP2", "fully"),
    "TP2, FP32Optimizer, replicated": ("TP2, FP32Optimizer", "replicated"),
    "TP2, Float16Optimizer, replicated": ("TP2, Float16Optimizer", "replicated"),
    "EP2, fully": ("EP2", "fully"),
    "DP2, experts, fully": ("DP2, experts", "fully"),
}
MORE_FOR_ONE = {
    "DP2, fully, by gloo": ("DP2", "fully, by gloo"),
    "DP2, bf16, fully": ("DP2, bf16", "fully"),
    "DP2, states in bfloat16, dp": ("DP2, states in bfloat16", "dp"),
    "DP2, offload, fully": ("DP2, offload", "fully"),
    "DP2, buckets, dp zero": ("DP2, buckets", "dp zero"),
    "DP2, one rank holds nothing, dp zero": ("DP2, one rank holds nothing", "dp zero"),
    "DP2, LAMB, fully": ("DP2, LAMB", "fully"),
    "DP2, precision-aware, fully": ("DP2, precision-aware", "fully"),
    "DP2, precision-aware, dp": ("DP2, precision-aware", "dp"),
    "DP2, states in bfloat16, other formats, fully, by gloo": (
        "DP2, states in bfloat16, other formats",
        "fully, by gloo",
    ),
    "DP2, states in bfloat16, other formats, dp zero": ("DP2, states in bfloat16, other formats", "dp zero"),
    "DP2, states in bfloat16, other formats, files": ("DP2, states in bfloat16, other formats", "files"),
    "DP2, scheduled, fully": ("DP2, scheduled", "fully"),
    "DP2, scheduled, dp": ("DP2, scheduled", "dp"),
    "TP2, FP32Optimizer, scheduled, replicated": ("TP2, FP32Optimizer, scheduled", "replicated"),
    "DP2, buckets without padding, fully": ("DP2, buckets without padding", "fully"),
    "TP2, Float16Optimizer, fp16, replicated": ("TP2, Float16Optimizer, fp16", "replicated"),
    "TP2, states in bfloat16, replicated, replicated": ("TP2, states in bfloat16, replicated", "replicated"),
    "TP2, Float16Optimizer, states in bfloat16, replicated": (
        "TP2, Float16Optimizer, states in bfloat16",
        "replicated",
    ),
}


@worlds(1)
@each(FOR_ONE, exhaustive=MORE_FOR_ONE)
@after("case_save", of=0, world=2)
def case_one_rank_has_all_of_the_model(directory, setting):
    in_another_layout(directory, *setting, Layout())


#: Four ranks need not see everything.
FOR_FOUR = {
    "DP2, fully": ("DP2", "fully"),
    "DP2, dp": ("DP2", "dp"),
}
MORE_FOR_FOUR = {
    "DP2, one rank holds nothing, fully": ("DP2, one rank holds nothing", "fully"),
    "TP2, fully": ("TP2", "fully"),
    "TP2, dp": ("TP2", "dp"),
    "EP2, fully": ("EP2", "fully"),
    "EP2, dp": ("EP2", "dp"),
    "DP2, bf16, fully": ("DP2, bf16", "fully"),
    "DP2, bf16, dp": ("DP2, bf16", "dp"),
    "DP2, buckets, dp": ("DP2, buckets", "dp"),
    "DP2, buckets without padding, fully": ("DP2, buckets without padding", "fully"),
}


@worlds(4)
@each(FOR_FOUR, exhaustive=MORE_FOR_FOUR)
@after("case_save", of=0, world=2)
def case_four_ranks_have_twice_the_replicas(directory, setting):
    label, kind = setting
    in_another_layout(directory, label, kind, RUNS[label].layout)


def dropped(state, key="grad_ema"):
    """A state_dict without a state, otherwise the same; what it was made of keeps it."""
    if isinstance(state, dict):
        return {k: dropped(value) for k, value in state.items() if k != key}
    if isinstance(state, list):
        return [dropped(value) for value in state]
    if isinstance(state, ShardedObject):
        return dataclasses.replace(state, data=dropped(state.data))
    return state


LACKING = {
    "DP2, fully": ("DP2", "fully"),
    "DP2, fully, by gloo": ("DP2", "fully, by gloo"),
    "DP2, dp": ("DP2", "dp"),
    "DP2, dp zero": ("DP2", "dp zero"),
    "DP2, files": ("DP2", "files"),
    "TP2, FP32Optimizer, replicated": ("TP2, FP32Optimizer", "replicated"),
    "TP2, FP32Optimizer, files": ("TP2, FP32Optimizer", "files"),
    "TP2, Float16Optimizer, replicated": ("TP2, Float16Optimizer", "replicated"),
    "TP2, Float16Optimizer, files": ("TP2, Float16Optimizer", "files"),
}


@worlds(2)
@each(LACKING)
def case_what_lacks_the_third_state_is_refused(directory, setting):
    label, kind = setting
    folder = place(directory, label, f"{kind}, lacking")
    with engine_for(RUNS[label]) as engine:
        advance(engine, 0, 1)
        save(engine, folder, kind, dropped)
    with other_engine_for(RUNS[label]) as engine, pytest.raises(REFUSALS, match="grad_ema"):
        load(engine, folder, kind)


@worlds(2)
@each(kind=("fully", "dp"))
@after("case_save", "DP2", "DP2, LAMB")
def case_lamb_is_not_taken_for_alto(directory, kind):
    """With alpha 0 there is no third state."""
    with other_engine_for(RUNS["DP2"]) as engine, pytest.raises(REFUSALS, match="grad_ema"):
        load(engine, place(directory, "DP2, LAMB", kind), kind)
    refused = pytest.raises(ValueError, match=r"has 'grad_ema' and this run has not.*alto_alpha=-5.0")
    with other_engine_for(RUNS["DP2, LAMB"]) as engine, refused:
        load(engine, place(directory, "DP2", kind), kind)


def adam(job):
    return OptimizerConfig(optimizer="adam", lr=LR, weight_decay=WEIGHT_DECAY, clip_grad=job.clip)


def moments(engine):
    """This rank's weights and Adam's states, by name."""
    out = {key: engine.gathered(lambda inner, p, key=key: inner.state[p][key]) for key in ALTO.state_keys[:2]}
    model = {name: p.detach().clone() for name, p in engine.named_parameters()}
    return {"model": model, "master": engine.gathered(), **out}


@torch.no_grad()
def put(engine, values, groups, step):
    """Give ALTO by hand what Adam had: weights, moments, the groups' rates and the step count."""
    parameters = dict(engine.named_parameters())
    names = {p: name for name, p in parameters.items()}
    for name, p in parameters.items():
        p.copy_(values["model"][name])
    (wrapper,) = engine.wrappers
    inner = wrapper.optimizer
    inner.initialize_state()
    if engine.distributed:
        held = list(engine.shards(wrapper))
    else:
        held = [(p, 0, getattr(p, "main_param", p)) for p in parameters.values()]
    for p, start, master in held:
        for key, tensor in (("master", master), *inner.state[master].items()):
            if key in values:
                tensor.copy_(values[key][names[p]].view(-1)[start : start + master.numel()].view(master.shape))
        inner.state[master]["step"].fill_(step)
    for ours, theirs in zip(inner.param_groups, groups, strict=True):
        # Adam's groups have the decay everywhere until a scheduler's first step.
        ours.update(step=step, lr=theirs["lr"], weight_decay=theirs["weight_decay"] if ours["decayed"] else 0.0)


@worlds(2)
@each({"DP2": None, "TP2, FP32Optimizer": None}, exhaustive={"TP2, Float16Optimizer": None})
@after("case_save")
def case_adam_is_adopted_only_when_asked(directory, label):
    run = RUNS[label]
    with engine_for(run, optimizer=adam(run.job)) as engine:
        advance(engine, 0, BEFORE)
        for kind in run.formats:
            save(engine, place(directory, label, f"{kind}, Adam"), kind)
        expected, groups = moments(engine), hyperparameters(engine)
    with engine_for(run) as engine:
        put(engine, expected, groups, BEFORE)
        at_start = picture(engine, run)
        advance(engine, BEFORE, BEFORE + AFTER)
        at_end = picture(engine, run)
    for kind in run.formats:
        folder = place(directory, label, f"{kind}, Adam")
        with other_engine_for(run) as engine, pytest.raises(REFUSALS, match="grad_ema"):
            load(engine, folder, kind)
        with other_engine_for(run, alto_adopt=True) as engine:
            load(engine, folder, kind)
            got = picture(engine, run)
            assert_same(f"{kind}, adopted", got, at_start)
            assert not any(value.any() for key, value in got.items() if key.endswith("grad_ema"))
            advance(engine, BEFORE, BEFORE + AFTER)
            assert_same(f"{kind}, continued", picture(engine, run), at_end)
        refused = pytest.raises(ValueError, match=r"grad_ema.*alto_adopt=False \(leave out --alto-adopt\)")
        with other_engine_for(run, alto_adopt=True) as engine, refused:
            load(engine, place(directory, label, kind), kind)


@worlds(2)
@each(saved=("DP2", "TP2, FP32Optimizer", "TP2, Float16Optimizer"))
@after("case_save")
def case_adam_says_what_to_do_with_altos_checkpoint(directory, saved):
    run = RUNS[saved]
    for kind in run.formats:
        if run.distributed and kind != "files":
            continue  # torch's Adam cannot describe what it would load; with TransformerEngine's it is the same load
        refused = pytest.raises(ValueError, match=r"saved by ALTO.*is adam.*--no-load-optim, or --finetune")
        with engine_for(run, optimizer=adam(run.job)) as engine, refused:
            load(engine, place(directory, saved, kind), kind)


#: The run that saved, and the format.
CHANGED = {
    "DP2, fully": ("DP2", "fully"),
    "DP2, files": ("DP2", "files"),
    "TP2, replicated": ("TP2, FP32Optimizer", "replicated"),
}


@worlds(2)
@each(CHANGED)
@after("case_save", of=0)
def case_hyperparameters_are_the_checkpoints(directory, setting):
    label, kind = setting
    changed = {"alto_alpha": -2.0, "alto_betas": (0.9, 0.8, 0.95), "alto_layerwise": "all"}
    at_save, at_end, saved_hyper = pictures_of(directory, label)
    with other_engine_for(RUNS[label], **changed) as engine:
        with pytest.warns(UserWarning, match="ALTO goes on with the checkpoint's") as said:
            load(engine, place(directory, label, kind), kind)
        told = " ".join(str(warning.message) for warning in said)
        assert f"alpha={ALTO_OPTIONS['alpha']}, not with this run's -2.0" in told, told
        assert "betas=(0.99, 0.9, 0.99)" in told, told
        assert "layerwise=decayed" in told, told
        assert hyperparameters(engine) == saved_hyper
        assert_same("loaded", picture(engine, RUNS[label]), at_save)
        advance(engine, BEFORE, BEFORE + AFTER)
        assert_same("continued", picture(engine, RUNS[label]), at_end)


@worlds(2)
@each({"DP2, bf16": None, "TP2, FP32Optimizer": None}, exhaustive={"TP2, Float16Optimizer": None})
def case_before_the_first_step_and_into_one_that_has_stepped(directory, label):
    run = RUNS[label]
    with engine_for(run) as engine:
        for kind in run.formats:
            save(engine, place(directory, label, f"{kind}, new"), kind)
        at_save = picture(engine, run)
        assert at_save["steps"].tolist() == [0]
        advance(engine, 0, 2)
        at_end = picture(engine, run)
    for kind in run.formats:
        with other_engine_for(run) as engine:
            advance(engine, 0, 1)
            load(engine, place(directory, label, f"{kind}, new"), kind)
            assert_same(f"{kind}, loaded", picture(engine, run), at_save)
            advance(engine, 0, 2)
            assert_same(f"{kind}, continued", picture(engine, run), at_end)


#: The run, distrib_optim_sharding_type, and the refusal.
REFUSED = {
    "none": ("DP2", None, "fully_sharded_model_space, which is also what it takes if none is named.*dp_reshardable"),
    "fully_sharded_model_space": (
        "DP2", "fully_sharded_model_space", "fully_sharded_model_space.*does not work any more",
    ),
    "fsdp_dtensor": ("DP2", "fsdp_dtensor", "fsdp_dtensor is the format of Megatron-FSDP"),
    "dp_reshardable, one rank holds nothing": (
        "DP2, one rank holds nothing", "dp_reshardable", "needs a piece of every bucket on every data-parallel rank",
    ),
}  # fmt: skip


@worlds(2)
@each(REFUSED)
def case_formats_that_are_refused(setting):
    label, kind, message = setting
    with engine_for(RUNS[label]) as engine:
        about = metadata("replicated") | ({"distrib_optim_sharding_type": kind} if kind else {})
        for is_loading in (False, True):
            with pytest.raises(ValueError, match=message):
                described(engine, about, is_loading)


@worlds(2)
@after("case_save", "DP2")
def case_formats_that_need_gloo(directory):
    with engine_for(RUNS["DP2"]) as engine:
        with pytest.raises(ValueError, match="fully_sharded_model_space"):
            engine.optimizer.sharded_state_dict({})
        for wrapper in engine.wrappers:
            wrapper.data_parallel_group_gloo = None
        for attempt in (
            lambda: load(engine, place(directory, "DP2", "files"), "files"),
            lambda: load(engine, place(directory, "DP2", "dp zero"), "dp zero"),
            lambda: save(engine, place(directory, "DP2", "no gloo"), "fully, by gloo"),
            lambda: save(engine, place(directory, "DP2", "no gloo"), "files"),
        ):
            with pytest.raises(ValueError, match="use_gloo_process_groups=True"):
                attempt()


def wrong_in(folder, engine, keys):
    """Names of states that a fully reshardable checkpoint has other values of than the optimizer."""
    saved = dist_checkpointing.load_plain_tensors(str(folder))
    # Norms are saved under the names they have where they are fused with what follows them.
    fused = {"layers.0.": "layers.", "input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    fused["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    wrong = []
    for key in keys:
        for name, value in engine.gathered(lambda inner, p, key=key: inner.state[p][key]).items():
            for ours, theirs in fused.items():
                name = name.replace(ours, theirs)
            if not torch.equal(saved[f"optimizer.state.{key}.{name}"].view(-1), value.cpu().view(-1)):
                wrong.append(f"{name} {key}")
    return wrong


def sharded_param_state_fully_reshardable(self, *args):
    """Has what the repaired method has."""
    cumulative_padding_stripped = [0]
    return cumulative_padding_stripped


REPAIRED = sharded_param_state_fully_reshardable


@worlds(2)
@after("case_save", "DP2")
def case_padding_between_buckets(directory):
    """Megatron before August 2026 garbles states, ours and Adam's, in what it saves as fully reshardable."""
    run = RUNS["DP2, buckets"]
    folder = place(directory, "DP2, buckets", "fully")
    if formats.allows_for_padding(DistributedOptimizer.sharded_param_state_fully_reshardable.__code__):
        with engine_for(run) as engine:
            advance(engine, 0, 2)
            save(engine, folder, "fully")
            assert not wrong_in(folder, engine, ALTO.state_keys)
        return
    # Told of when the optimizer is built, and refused there if the format is known.
    with pytest.warns(UserWarning, match="do not save as fully_reshardable"), engine_for(run):
        pass
    early = pytest.raises(ValueError, match="writes wrong values into fully_reshardable")
    with early, engine_for(run, alto_checkpoint_format="fully_reshardable"):
        pass
    for optimizer in (None, adam(run.job)):
        with engine_for(run, optimizer=optimizer) as engine:
            advance(engine, 0, 2)
            if optimizer is None:
                with pytest.raises(ValueError, match="writes wrong values into fully_reshardable.*dp_reshardable"):
                    save(engine, folder, "fully")
                # Releases from 0.19 on have the property, and the fault: it is the repair that is asked for.
                with mock.patch.object(DistributedOptimizer, "optimizer_state_keys", property(), create=True):
                    assert formats.corrupts_fully_reshardable(engine.wrappers[0])
                with mock.patch.object(DistributedOptimizer, REPAIRED.__name__, REPAIRED):
                    assert not formats.corrupts_fully_reshardable(engine.wrappers[0])
            with mock.patch.object(formats, "corrupts_fully_reshardable", return_value=False):
                save(engine, folder, "fully")
            assert wrong_in(folder, engine, ALTO.state_keys[: 2 if optimizer else 3])
        with engine_for(RUNS["DP2"], optimizer=optimizer) as engine:  # and not where there is none
            advance(engine, 0, 2)
            save(engine, folder, "fully")
            assert not wrong_in(folder, engine, ALTO.state_keys[: 2 if optimizer else 3])
    # Loading does not ask how the saving run cut its buckets.
    at_save, at_end, _ = pictures_of(directory, "DP2")
    with other_engine_for(run) as engine:
        load(engine, place(directory, "DP2", "fully"), "fully")
        assert_same("into buckets", picture(engine, run), at_save)
        advance(engine, BEFORE, BEFORE + AFTER)
        assert gap(picture(engine, run), at_end) <= 1e-6
