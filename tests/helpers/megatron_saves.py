"""Megatron engines in many layouts and precisions, saved and loaded in every format, and pictures of what they held."""

import contextlib
import dataclasses
import functools
import queue
import shutil

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from . import devices
from .megatron_gpt import LR, WEIGHT_DECAY, Job, Layout, Megatron, alto_config, on_host, parallel

# isort: split
# The imports below need what megatron_gpt puts in place of a GPU.

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer import OptimizerConfig
from megatron.core.utils import unwrap_model

from alto_distributed import ALTO
from alto_distributed.megatron import gather_state

# A save that nobody does anything beside reports in this process: no need to start another one to ask.
filesystem_async._results_queue = queue.Queue()

gather_state._AT_A_TIME = 500  # many parts of each bucket, also of these small ones

BEFORE, AFTER = 3, 3
#: Ours, and that of dist_checkpointing, which says what it does not find before we are asked.
REFUSALS = (ValueError, CheckpointException)

FULLY = {"distrib_optim_sharding_type": "fully_reshardable"}
BY_GLOO = {**FULLY, "distrib_optim_fully_reshardable_mem_efficient": True}
DP = {"distrib_optim_sharding_type": "dp_reshardable"}
DP_ZERO = {"distrib_optim_sharding_type": "dp_zero_gather_scatter"}
#: Megatron's ways of saving, by the names of folders; files are those from before dist_checkpointing.
FORMATS = {"fully": FULLY, "fully, by gloo": BY_GLOO, "dp": DP, "dp zero": DP_ZERO, "replicated": {}, "files": None}


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


# -- engines -------------------------------------------------------------------------------------------


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


def adam(job):
    return OptimizerConfig(optimizer="adam", lr=LR, weight_decay=WEIGHT_DECAY, clip_grad=job.clip)


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
