"""A tiny GPT of megatron-core, trained by Megatron in any layout, and by the plain optimizer in none.

The model, the schedules, the gradient buffers and the optimizer wrappers are Megatron's own ("local" layers, on the
CPU). A parameter's weights follow from its name in the whole model, so that every layout and the reference
start alike; a rank holds its piece of the result against the same piece of the reference.
"""
# ruff: noqa: E402 - the stand-ins for a GPU come before anything of Megatron's

import contextlib
import copy
import dataclasses
import functools
import inspect
import re
import warnings
import zlib
from collections.abc import Callable

import torch
import torch.distributed as dist

from scripts.megatron_on_cpu import install, norms_for_sequence_parallel

from . import devices

install()
norms_for_sequence_parallel()
warnings.filterwarnings("ignore", message=r".*(Apex|Transformer Engine|torch.jit.script|torch.distributed._)")

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: F401
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_batch_on_this_cp_rank

from alto_distributed import ALTO
from alto_distributed.megatron import AltoOptimizerConfig, diagnostics

_CP_ARGUMENTS = inspect.signature(get_batch_on_this_cp_rank).parameters

VOCABULARY, HIDDEN, HEADS, SEQUENCE = 128, 32, 4, 16
MICROBATCHES, SEQUENCES = 2, 4  # microbatches a step, and sequences of the whole world in each
LR, MIN_LR, WEIGHT_DECAY = 0.003, 0.0003, 0.05
ALTO_OPTIONS = {"betas": (0.99, 0.9, 0.99), "alpha": -5.0, "eps": 1e-6}


@dataclasses.dataclass(frozen=True)
class Job:
    """What is trained, whatever the layout."""

    layers: int = 2
    experts: int = 0
    tied: bool = True
    trained: str = ""  # a pattern that names must contain; the others are frozen
    precision: torch.dtype = torch.float32
    clip: float = 1.0
    scheduled: bool = False  # learning rate and weight decay
    decoupled_lr: float | None = None
    layerwise: str = "decayed"
    vector_lr: float = 1.0
    embeddings: str = "ratio"
    weight_decay: float = WEIGHT_DECAY
    steps: int = 10
    gated: bool = False  # SwiGLU
    modern_router: bool = False  # sigmoid scores in float32, a bias of each expert, and an expert that all tokens share


@dataclasses.dataclass(frozen=True)
class Layout:
    """Over which ranks it is cut. What is left of the world is data parallel."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    instances: int = 1
    sequence_parallel: bool = False


# -- process groups ------------------------------------------------------------------------------------


def _parallel_state():
    return {name: value for name, value in vars(parallel_state).items() if re.fullmatch("_[A-Z_]+", name)}


_NO_GROUPS = _parallel_state()
_groups: dict[Layout, dict[str, object]] = {}


@contextlib.contextmanager
def parallel(layout):
    """Megatron's process groups for a layout. They are made once and kept: that takes long, and sockets are few."""
    before = _parallel_state()
    vars(parallel_state).update(_groups.get(layout, _NO_GROUPS))
    if layout not in _groups:
        parallel_state.initialize_model_parallel(
            layout.tensor,
            layout.pipeline,
            layout.virtual,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            num_distributed_optimizer_instances=layout.instances,
            create_gloo_process_groups=False,
        )
        _groups[layout] = _parallel_state()
    model_parallel_cuda_manual_seed(1234)
    try:
        yield
    finally:
        vars(parallel_state).update(before)


# -- the model and its weights -------------------------------------------------------------------------


class ContextParallelAttention(DotProductAttention):
    """Megatron leaves context parallelism to TransformerEngine. Here every rank has its queries meet all keys."""

    def __init__(self, config, *args, **kwargs):
        one = copy.copy(config)
        one.context_parallel_size = 1
        super().__init__(one, *args, **kwargs)

    def forward(self, query, key, value, attention_mask, *args, **kwargs):
        group = parallel_state.get_context_parallel_group()
        key, value = (gather_from_sequence_parallel_region(x, group=group) for x in (key, value))
        return super().forward(query, key, value, attention_mask, *args, **kwargs)


MODERN_ROUTER = {
    "moe_router_score_function": "sigmoid",
    "moe_router_dtype": "fp32",
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": HIDDEN,
}


def transformer_config(job, layout):
    return TransformerConfig(
        num_layers=job.layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor or layout.tensor,
        sequence_parallel=layout.sequence_parallel,
        num_moe_experts=job.experts or None,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        # Room for all tokens in every expert: gloo gathers only pieces of one size over the experts' tensor ranks.
        moe_expert_capacity_factor=job.experts / 2 if (layout.expert_tensor or 1) > 1 else None,
        moe_pad_expert_input_to_capacity=(layout.expert_tensor or 1) > 1,
        **(MODERN_ROUTER if job.modern_router else {}),
        gated_linear_unit=job.gated,
        activation_func=torch.nn.functional.silu if job.gated else torch.nn.functional.gelu,
        add_bias_linear=not job.experts,  # a bias of an expert stops Megatron's own forward pass
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=job.precision,
        pipeline_dtype=job.precision,
        bf16=job.precision == torch.bfloat16,
        fp16=job.precision == torch.float16,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
    )


def build(job, layout=Layout()):  # noqa: B008
    """This rank's part of the model: a list of chunks, as Megatron keeps them."""
    config = transformer_config(job, layout)
    spec = get_gpt_layer_local_spec(num_experts=job.experts or None, moe_grouped_gemm=False)
    if layout.context > 1:
        spec.submodules.self_attention.submodules.core_attention = ContextParallelAttention
    chunks = []
    for v in range(layout.virtual or 1):
        stage = v if layout.virtual else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=job.tied,
            # A bias of the keys shifts all scores of a query alike and has no gradient but rounding errors, unless
            # positions turn it.
            position_embedding_type="rope",
            rotary_base=10,
            vp_stage=stage,
        )
        for name, p in named_parameters([model]):
            p.requires_grad_(bool(re.search(job.trained, name)))
            with torch.no_grad():
                p.copy_(piece_of(whole_weights(name, p), name, p))
        model.to(devices.here())
        chunks.append(Float16Module(config, model) if job.precision != torch.float32 else model)
    return chunks


def named_parameters(chunks):
    """Parameters with their names in the whole model: layers and experts counted over all ranks."""
    for chunk in chunks:
        model = _gpt(chunk)
        experts = (model.config.num_moe_experts or 0) // model.config.expert_model_parallel_size
        for name, p in model.named_parameters():
            name = _counted_on(name, "decoder.layers.", model.decoder.layers[0].layer_number - 1)
            name = _counted_on(name, "local_experts.", experts * parallel_state.get_expert_model_parallel_rank())
            if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
                name = "embedding.word_embeddings.weight"
            yield name, p


def _counted_on(name, list_name, before):
    """The index that follows ``list_name`` counted from the first of the whole model."""
    return re.sub(rf"(?<={re.escape(list_name)})\d+", lambda match: str(before + int(match[0])), name)


def _gpt(chunk):
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module
    return chunk


def _cut(name, p):
    """(dimension, rank, size) along which tensor parallelism cuts a parameter; experts have groups of their own."""
    if not getattr(p, "tensor_model_parallel", False):
        return 0, 0, 1
    if "local_experts" in name:
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    return p.partition_dim, group.rank(), group.size()


def piece_of(whole, name, p):
    """This rank's piece of a whole parameter."""
    dim, rank, size = _cut(name, p)
    return whole.chunk(size, dim)[rank]


def whole_weights(name, p):
    """Weights that follow from the name and grow along both dimensions, so that no piece has the norm of another."""
    dim, _, size = _cut(name, p)
    shape = [n * size if d == dim else n for d, n in enumerate(p.shape)]
    out = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    for d, n in enumerate(shape):
        out *= torch.linspace(0.3, 1.7, n).view([-1 if d == e else 1 for e in range(len(shape))])
    return 1 + 0.1 * out if "layernorm.weight" in name else 0.2 * out


def is_decayed(name, p):
    """As Megatron's get_standard_config_overrides has it."""
    return p.ndim > 1 and not name.endswith(".bias")


# -- batches -------------------------------------------------------------------------------------------


def microbatches(step):
    """Tokens and labels of the whole world, per microbatch."""
    generator = torch.Generator().manual_seed(100 + step)
    text = torch.randint(0, VOCABULARY, (MICROBATCHES, SEQUENCES, SEQUENCE + 1), generator=generator)
    text = text.to(devices.here())
    return [{"tokens": x[:, :-1], "labels": x[:, 1:], "positions": _positions(x)} for x in text]


def _positions(text):
    return torch.arange(SEQUENCE, device=text.device).expand(len(text), -1)


def mine(batch, same=False):
    """This rank's sequences of a microbatch, and its part of each of them under context parallelism."""
    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    if not same:
        batch = {key: x.chunk(size)[rank].contiguous() for key, x in batch.items()}
    options = {"is_hybrid_cp": False, "cp_group": parallel_state.get_context_parallel_group()}  # newer releases ask
    options = {name: value for name, value in options.items() if name in _CP_ARGUMENTS}
    return get_batch_on_this_cp_rank(dict(batch), **options)


def loss_of(model, batch):
    """The sum over this rank's tokens, over the number of tokens in its sequences."""
    mask = None
    group = parallel_state.get_context_parallel_group()
    if group.size() > 1:  # keys come in the order of ranks, each with two chunks of the sequence
        everywhere = [torch.empty_like(batch["positions"][0]) for _ in range(group.size())]
        dist.all_gather(everywhere, batch["positions"][0].contiguous(), group=group)
        mask = (batch["positions"][0][:, None] < torch.cat(everywhere)[None, :])[None, None]
    losses = model(batch["tokens"], batch["positions"], mask, labels=batch["labels"])
    return losses, lambda out: out.float().sum() / (len(out) * SEQUENCE)


# -- hyperparameters as they should be -----------------------------------------------------------------

WARMUP, DECAY, GROWTH = 3, 12, 8  # steps of the schedules
FIRST_LR = 0.001  # not 0: the weight decay is 0 in the first step, and whether there is a ratio then must show


def learning_rate(job, name, step):
    apart = job.decoupled_lr is not None and re.match("embedding|output_layer", name)
    highest = job.decoupled_lr if apart else LR
    if not job.scheduled:
        return highest
    if step <= WARMUP:
        return FIRST_LR + (highest - FIRST_LR) * step / WARMUP
    return MIN_LR + (highest - MIN_LR) * (1 - (step - WARMUP) / (DECAY - WARMUP))


def weight_decay(job, step):
    return job.weight_decay * min(step / GROWTH, 1) if job.scheduled else job.weight_decay


# -- the reference -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    weights: dict[str, torch.Tensor]
    losses: torch.Tensor
    gradients: list[dict[str, torch.Tensor]]  # of each step, as the optimizer got them


def alto_groups(model):
    return [
        {"params": [p], "name": name, "decayed": is_decayed(name, p)}
        for name, p in named_parameters([model])
        if p.requires_grad
    ]


def set_hyperparameters(job, optimizer, step):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(job, group["name"], step)
        group["weight_decay"] = weight_decay(job, step) if group["decayed"] else 0.0


def whole_model(job):
    """Trained parameters of the whole model, by name, before the first step. On the host."""
    with parallel(Layout()):
        return {name: on_host(p) for name, p in named_parameters(build(job)) if p.requires_grad}


def on_host(tensor):
    """A copy to compare."""
    return tensor.detach().to("cpu", copy=True)


@functools.cache
def reference(job, make: Callable[..., torch.optim.Optimizer] | None = None):
    """The same training by one rank, with whole parameters, plain autograd and the plain optimizer.

    The result is on the host.
    """
    with parallel(Layout()):
        (model,) = build(job)
        groups = alto_groups(model)
        for group in groups:
            if job.embeddings == "adam" and group["name"].startswith("embedding"):
                group["layerwise"] = "none"
        options = {"layerwise": job.layerwise, "vector_lr": job.vector_lr, **ALTO_OPTIONS}
        optimizer = make(groups) if make else ALTO(groups, **options)
        losses, gradients = [], []
        for step in range(job.steps):
            optimizer.zero_grad()
            losses.append(0.0)
            for batch in microbatches(step):
                out, mean = loss_of(model, batch)
                loss = mean(out) / MICROBATCHES
                loss.backward()
                losses[-1] += loss.item()
            clip([g["params"][0].grad for g in groups], job.clip)
            gradients.append({g["name"]: on_host(g["params"][0].grad) for g in groups})
            set_hyperparameters(job, optimizer, step)
            optimizer.step()
        weights = {name: on_host(p) for name, p in named_parameters([model])}
        return Result(weights, torch.tensor(losses, dtype=torch.float64), gradients)


def clip(gradients, limit):
    """By the global norm, with Megatron's coefficient."""
    norm = torch.stack([g.double().norm() for g in gradients]).norm().item()
    coefficient = limit / (norm + 1e-6)
    if limit and coefficient < 1:
        for g in gradients:
            g.mul_(coefficient)


# -- Megatron ------------------------------------------------------------------------------------------


class Megatron:
    """The job in a layout; use within ``parallel(layout)``."""

    _ddp_config, _data_parallel = DistributedDataParallelConfig, DistributedDataParallel

    def __init__(self, job, layout, *, distributed=True, overlap=False, bucket_size=None, optimizer=None, same=False):
        self.job, self.layout, self.distributed, self.overlap, self.same = job, layout, distributed, overlap, same
        optimizer = optimizer or alto_config(job)
        ddp_config = self._ddp_config(
            grad_reduce_in_fp32=optimizer.main_grads_dtype == torch.float32,
            use_distributed_optimizer=distributed,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap and distributed,
            bucket_size=bucket_size,
            num_distributed_optimizer_instances=layout.instances,
        )
        chunks = build(job, layout)
        self.config = _gpt(chunks[0]).config
        self.chunks = [
            self._data_parallel(self.config, ddp_config, chunk, disable_bucketing=i > 0)
            for i, chunk in enumerate(chunks)
        ]
        self.optimizer = get_megatron_optimizer(
            dataclasses.replace(optimizer, **self._shared_settings()),
            self.chunks,
            use_gloo_process_groups=False,
        )
        self.scheduler = self._scheduler() if job.scheduled else None
        self.config.finalize_model_grads_func = self.finalize
        self.config.grad_scale_func = self.optimizer.scale_loss
        if overlap:
            self.config.no_sync_func = [chunk.no_sync for chunk in self.chunks]
            if len(self.chunks) == 1:
                self.config.no_sync_func = self.config.no_sync_func[0]
        self.losses = []
        self.before_reduction = lambda: None

    def _shared_settings(self):
        return {
            "use_distributed_optimizer": self.distributed,
            "overlap_param_gather": self.overlap and self.distributed,
            "params_dtype": self.job.precision,
            "bf16": self.job.precision == torch.bfloat16,
            "fp16": self.job.precision == torch.float16,
        }

    def _scheduler(self):
        return OptimizerParamScheduler(
            self.optimizer,
            init_lr=FIRST_LR,
            max_lr=LR,
            min_lr=MIN_LR,
            lr_warmup_steps=WARMUP,
            lr_decay_steps=DECAY,
            lr_decay_style="linear",
            start_wd=0.0,
            end_wd=self.job.weight_decay,
            wd_incr_steps=GROWTH,
            wd_incr_style="linear",
        )

    def finalize(self, *args, **kwargs):
        self.before_reduction()
        finalize_model_grads(*args, **kwargs)

    def train(self, steps=None):
        for step in range(self.job.steps if steps is None else steps):
            self.step(step)
        return self

    def step(self, step):
        """One step; returns what Megatron's ``step()`` does: (updated, norm of the gradient, ...)."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = [mine(batch, self.same) for batch in microbatches(step)]
        done = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[iter(batches) for _ in self.chunks] if len(self.chunks) > 1 else iter(batches),
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(batches),
            seq_length=SEQUENCE,
            micro_batch_size=len(batches[0]["tokens"]),
            forward_only=False,
        )
        if done:
            self.losses.append(torch.stack([out["loss"] for out in done]).double().mean())
        result = self.optimizer.step()
        if self.scheduler:
            self.scheduler.step(increment=1)
        return result

    def mean_losses(self):
        """Of each step over the world; None on ranks that do not see them."""
        if not self.losses:
            return None
        losses = torch.stack(self.losses)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(losses, group=group)
        return losses.cpu() / parallel_state.get_data_parallel_world_size()

    def named_parameters(self):
        return named_parameters(self.chunks)

    def synchronize(self):
        """Let the forward pass's own gathering come to an end, so that parameters may be read."""
        if self.overlap and self.distributed:
            for chunk in self.chunks:
                chunk.disable_forward_pre_hook()

    @property
    def wrappers(self):
        """Megatron's wrappers, one for dense and one for expert parameters; those that have parameters."""
        return [w for w in self.optimizer.chained_optimizers if w.optimizer is not None]

    def shards(self, wrapper):
        """(model parameter, start, master) of each shard of a distributed optimizer on this rank."""
        pairs = [
            (wrapper.model_fp32_groups, wrapper.shard_fp32_groups),
            (wrapper.model_float16_groups, wrapper.shard_fp32_from_float16_groups),
        ]
        for models, masters in pairs:
            for model_group, master_group in zip(models, masters, strict=True):
                for p, master in zip(model_group, master_group, strict=True):
                    yield p, wrapper._get_model_param_range_map(p)["param"].start, master

    def assert_straddles(self):
        """Some parameter of each wrapper is cut by the border between two ranks."""
        for wrapper in self.wrappers:
            if wrapper.data_parallel_group.size() == 1:
                continue
            cut = sum(master.numel() < p.numel() for p, _, master in self.shards(wrapper))
            everywhere = torch.tensor(cut, device=devices.here())
            dist.all_reduce(everywhere, group=wrapper.data_parallel_group)
            assert everywhere >= 2, "no parameter lies on two ranks"

    def gathered(self, value_of=lambda inner, master: master):
        """Something of each master, such as a state, by name and in the parameter's shape on this model's rank."""
        names = {p: name for name, p in self.named_parameters()}
        out = {}
        for wrapper in self.wrappers:
            if not self.distributed:
                for p in _model_parameters(wrapper):
                    out[names[p]] = value_of(wrapper.optimizer, getattr(p, "main_param", p)).detach().clone()
                continue
            held = {p: (start, master) for p, start, master in self.shards(wrapper)}
            params = [p for buffer in wrapper.buffers for p in buffer.param_index_map]
            # One buffer for all of them, and one collective.
            flat = torch.zeros(sum(p.numel() for p in params), device=devices.here())
            parts = dict(zip(params, flat.split([p.numel() for p in params]), strict=True))
            for p, (start, master) in held.items():
                value = value_of(wrapper.optimizer, master).detach().view(-1)
                parts[p][start : start + master.numel()] = value
            dist.all_reduce(flat, group=wrapper.data_parallel_group)
            out.update({names[p]: part.view(p.shape).clone() for p, part in parts.items()})
        return out


def _model_parameters(wrapper):
    if hasattr(wrapper, "float16_groups"):
        return [p for group in wrapper.float16_groups for p in group]
    return wrapper.get_parameters()


def _forward_step(iterator, model):
    out, mean = loss_of(model, next(iterator))

    def loss_function(out):
        loss = mean(out)
        return loss, {"loss": loss.detach().clone()}

    return out, loss_function


def alto_config(job, **more):
    return AltoOptimizerConfig(
        optimizer="alto",
        lr=LR,
        min_lr=MIN_LR,
        decoupled_lr=job.decoupled_lr,
        weight_decay=job.weight_decay,
        clip_grad=job.clip,
        alto_alpha=ALTO_OPTIONS["alpha"],
        alto_betas=ALTO_OPTIONS["betas"],
        alto_eps=ALTO_OPTIONS["eps"],
        alto_layerwise=job.layerwise,
        alto_vector_lr=job.vector_lr,
        alto_embeddings=job.embeddings,
        **more,
    )


# -- comparison ----------------------------------------------------------------------------------------


def everything(engine):
    """All weights, states and step counters of this rank."""
    out = [p.detach().clone() for _, p in engine.named_parameters()]
    for wrapper in engine.wrappers:
        for group in wrapper.optimizer.param_groups:
            out.append(torch.tensor(group["step"]))
            for master in group["params"]:
                out += [master.detach().clone()]
                out += [torch.as_tensor(value).clone() for _, value in sorted(wrapper.optimizer.state[master].items())]
    return out


def largest_gap(engine, expected):
    """Largest difference to this rank's piece of the reference, relative to the parameter's largest element.

    NaN if there is one: Python's max would lose it.
    """
    engine.synchronize()
    gaps = [torch.zeros(())]
    for name, p in engine.named_parameters():
        whole = expected.weights[name]
        gaps.append((p.detach().cpu() - piece_of(whole, name, p)).abs().max() / whole.abs().max())
    return torch.stack(gaps).max().item()


def check_parity(label, job=Job(), layout=Layout(), *, straddles=True, then=lambda engine: None, **options):  # noqa: B008
    """Train in a layout; losses and weights must be those of the reference."""
    expected = reference(job)
    with parallel(layout):
        engine = Megatron(job, layout, **options)
        if engine.distributed and straddles:
            engine.assert_straddles()
        engine.train()
        losses, gap = engine.mean_losses(), largest_gap(engine, expected)
        if losses is not None:
            off = ((losses - expected.losses).abs() / expected.losses).max().item()
            assert off <= 1e-6, f"{label}: losses differ by {off:.1e}"
        assert gap <= 1e-6, f"{label}: {gap:.1e}"
        then(engine)


def check_norms(job, layout):
    """The norms of the first step are those of whole parameters.

    A ratio hardly shows replicas that were summed, since both of its norms grow alike; the norms do.
    """
    whole = whole_model(job)
    with parallel(layout):
        engine = Megatron(job, layout, optimizer=alto_config(job, alto_diagnostics_every=1)).train(1)
        readings = diagnostics(engine.optimizer)
        names = {p: name for name, p in engine.named_parameters()}
        labels = {f"{i}.{label}": p for i, chunk in enumerate(engine.chunks) for label, p in chunk.named_parameters()}
        assert readings
        for label, reading in readings.items():
            name = names[labels[label]]
            norm = whole[name].double().norm().item()
            assert abs(reading.param_norm - norm) <= 1e-6 * norm, (layout, name, reading.param_norm, norm)
