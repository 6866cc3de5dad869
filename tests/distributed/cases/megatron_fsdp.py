"""Megatron-FSDP: parameters, gradients and states are DTensors, saved as ``fsdp_dtensor``.

Weights, losses and states are those of the reference, or bitwise those of the distributed optimizer.
"""

import dataclasses
import functools
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from alto_distributed import ALTO
from tests.helpers.cases import after, each, worlds
from tests.helpers.megatron_gpt import Job, Layout, Megatron, alto_config, parallel, piece_of, reference

# isort: split
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import fsdp_dtensor_checkpoint
from torch.distributed.tensor import DTensor

from alto_distributed.megatron.fsdp import _split_third_state

# A class of TransformerEngine's, by which Megatron-FSDP up to 0.18 asks whether a layer is one, also without any.
if not isinstance(getattr(mcore_fsdp_adapter, "TELinear", type), type):
    mcore_fsdp_adapter.TELinear = type("TELinear", (), {})

JOB = Job(tied=False)
BF16 = Job(tied=False, precision=torch.bfloat16, clip=0.0, steps=6)
BEFORE, AFTER = 3, 3
#: From 0.19 on, grad_reduce_in_fp32 does not speak for Megatron-FSDP.
MAIN_GRADS = hasattr(DistributedDataParallelConfig, "megatron_fsdp_main_grads_dtype")


class FSDP(Megatron):
    """The job under Megatron-FSDP."""

    # In main the name without a number is a function that chooses a version.
    _data_parallel = getattr(
        mcore_fsdp_adapter, "FullyShardedDataParallelV1", mcore_fsdp_adapter.FullyShardedDataParallel
    )

    def __init__(self, job, layout, strategy="optim_grads_params", **options):
        # Dividing within the collective is NCCL's.
        more = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": strategy}
        if MAIN_GRADS:
            more["megatron_fsdp_main_grads_dtype"] = torch.float32
        self._ddp_config = functools.partial(
            DistributedDataParallelConfig, **more, gradient_reduce_div_fusion=False, average_in_collective=False
        )
        super().__init__(job, layout, **options)
        if layout.instances > 1:  # as --overlap-grad-reduce does: it tells which microbatch is the last one
            self.config.no_sync_func = self.chunks[0].no_sync

    @property
    def wrappers(self):
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])

    def parameters(self):
        """What the optimizer has, by name."""
        self.chunks[0].module._replace_param_with_distributed_if_needed()
        return dict(self.named_parameters())

    def gathered(self, value_of=lambda inner, master: master):
        """Something of each parameter, by name, whole on this tensor-parallel rank: the shards lie end to end."""
        (wrapper,) = self.wrappers
        out = {}
        for name, p in self.parameters().items():
            mine = value_of(wrapper.optimizer, p).detach().to_local().reshape(-1)
            group = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
            shards = [None] * group.size()
            dist.all_gather_object(shards, mine, group=group)
            whole = mine if mine.numel() == p.orig_param.numel() else torch.cat(shards)  # no_shard: each has all
            out[name] = whole.clone().view(p.orig_param.shape)  # not the parameter itself, which later steps change
        return out

    def assert_straddles(self):
        """Some parameter is cut by the border between two ranks, and some rank has nothing of another."""
        pieces = {name: p.to_local().numel() for name, p in self.parameters().items()}
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, pieces)
        held = [[theirs[name] for theirs in everywhere] for name in pieces]
        assert any(map(all, held))
        assert not all(map(all, held))


def state(key):
    return lambda inner, master: inner.state[master][key]


def picture(engine):
    """Weights and states by name, and the step counts."""
    out = {f"{name} weight": value for name, value in engine.gathered().items()}
    for key in ALTO.state_keys:
        out |= {f"{name} {key}": value for name, value in engine.gathered(state(key)).items()}
    (wrapper,) = engine.wrappers
    steps = {int(group["step"]) for group in wrapper.optimizer.param_groups}
    out["steps"] = torch.tensor(sorted(steps | {int(s["step"]) for s in wrapper.optimizer.state.values()}))
    return out


def assert_same(got, expected, what):
    assert got.keys() == expected.keys(), got.keys() ^ expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), (what, name, (got[name] - value).abs().max())


# -- parity --------------------------------------------------------------------------------------------

CELLS = {
    "all sharded": (JOB, Layout(), "optim_grads_params"),
    "ratio for all, hard clipping": (
        dataclasses.replace(JOB, layerwise="all", clip=0.01),
        Layout(),
        "optim_grads_params",
    ),
}
MORE_CELLS = {
    "states alone": (JOB, Layout(), "optim"),
    "scheduled": (dataclasses.replace(JOB, scheduled=True), Layout(), "optim_grads_params"),
}


@worlds(2)
@each(CELLS, exhaustive=MORE_CELLS)
def case_fsdp_is_the_reference(setting):
    check_parity(*setting)


@worlds(4)
def case_fsdp_and_tensor_parallelism_are_the_reference():
    """Not on two ranks: 0.16.1 sums microbatches wrongly where one rank has all of a shard, with any optimizer."""
    check_parity(JOB, Layout(tensor=2), "optim_grads_params")


HYBRID = {
    "all sharded": (JOB, Layout(instances=2), "optim_grads_params"),
    "gradients sharded, no clipping": (dataclasses.replace(JOB, clip=0.0), Layout(instances=2), "optim_grads"),
}


@worlds(exhaustive=[4])
@each(HYBRID)
def case_fsdp_over_several_instances_is_the_reference(setting):
    check_parity(*setting)


@worlds(exhaustive=[4])
def case_instances_that_would_train_apart_are_refused():
    """Without --overlap-grad-reduce Megatron-FSDP never adds up their gradients."""
    with parallel(Layout(instances=2)):
        engine = FSDP(JOB, Layout(instances=2))
        engine.config.no_sync_func = None
        with pytest.raises(ValueError, match=r"has not added up the gradients of its .* Set --overlap-grad-reduce"):
            engine.step(0)


@worlds(exhaustive=[2])
def case_experts_under_fsdp_are_the_reference():
    check_parity(dataclasses.replace(JOB, experts=4), Layout(), "optim_grads_params")


@worlds(exhaustive=[2])
def case_fsdp_that_shards_nothing_is_the_reference():
    """With overlap: without, Megatron 0.16.1 gathers float32 weights that it has not sharded, and fails."""
    with parallel(Layout()), pytest.warns(UserWarning, match="clips by a gradient norm.*every data-parallel rank"):
        FSDP(JOB, Layout(), "no_shard", overlap=True)
    check_parity(dataclasses.replace(JOB, clip=0.0), Layout(), "no_shard", overlap=True)


@worlds(2)
def case_fsdp_skips_what_is_not_finite():
    with parallel(Layout()):
        engine = FSDP(JOB, Layout(), optimizer=alto_config(JOB, alto_skip_nonfinite=True)).train(1)
        before = picture(engine)
        (wrapper,) = engine.wrappers
        ready = wrapper._copy_model_grads_to_main_grads

        def spoiled():
            ready()
            if dist.get_rank() == 1:
                next(p for p in wrapper.get_parameters() if p.grad.to_local().numel()).grad.to_local().fill_(torch.nan)

        wrapper._copy_model_grads_to_main_grads = spoiled
        updated, *_ = engine.step(1)
        assert not updated
        assert_same(picture(engine), before, "skipped")
        del wrapper._copy_model_grads_to_main_grads
        updated, *_ = engine.step(2)
        assert updated


@worlds(2)
def case_a_whole_gradient_of_zero_keeps_weights():
    """As of an expert without tokens; another parameter has a gradient on one rank alone."""
    with parallel(Layout()):
        engine = FSDP(dataclasses.replace(JOB, layers=1), Layout()).train(2)
        engine.assert_straddles()
        (wrapper,) = engine.wrappers
        ready, parameters = wrapper._copy_model_grads_to_main_grads, engine.parameters()
        sizes = [None] * dist.get_world_size()
        dist.all_gather_object(sizes, {name: p.to_local().numel() for name, p in parameters.items()})
        idle, alone = [name for name in parameters if name.endswith(".weight") and all(s[name] for s in sizes)][:2]
        before = picture(engine)

        def silenced():
            ready()
            parameters[idle].grad.to_local().zero_()
            if dist.get_rank() == 0:
                parameters[alone].grad.to_local().zero_()

        wrapper._copy_model_grads_to_main_grads = silenced
        for step in (2, 3):
            engine.step(step)
        after = picture(engine)
        assert torch.equal(after[f"{idle} weight"], before[f"{idle} weight"])
        assert (after[f"{idle} exp_avg"].abs() <= before[f"{idle} exp_avg"].abs()).all()
        assert before[f"{idle} exp_avg"].any()
        for name in parameters.keys() - {idle}:
            assert not torch.equal(after[f"{name} weight"], before[f"{name} weight"]), name


def check_parity(job, layout, strategy, **options):
    expected = reference(job)
    with parallel(layout):
        engine = FSDP(job, layout, strategy, **options)
        if strategy != "no_shard":
            engine.assert_straddles()
        engine.train()
        losses = engine.mean_losses()
        assert ((losses - expected.losses).abs() / expected.losses).max() <= 1e-6
        params = engine.parameters()
        for name, value in engine.gathered().items():
            whole = expected.weights[name]
            gap = (value - piece_of(whole, name, params[name])).abs().max() / whole.abs().max()
            assert gap <= 1e-6, (name, gap)


@worlds(2)
@each(strategy=("optim_grads_params", "optim"))
def case_in_bf16_fsdp_is_the_distributed_optimizer(strategy):
    """Bitwise, on two ranks, where sums have but one order; from 0.19 on all sharded ones round the last bit apart."""
    exact = strategy == "optim" or not MAIN_GRADS
    with parallel(Layout()):
        fsdp, expected = FSDP(BF16, Layout(), strategy).train(), Megatron(BF16, Layout()).train()
        fsdp.assert_straddles()
        assert_same(fsdp.gathered(), expected.gathered(), "weights")
        for key in ALTO.state_keys:
            got, wanted = fsdp.gathered(state(key)), expected.gathered(state(key))
            if exact:
                assert_same(got, wanted, key)
            for name, value in wanted.items():
                assert (got[name] - value).abs().max() <= 1e-6 * value.abs().max(), (key, name)


# -- checkpoints ---------------------------------------------------------------------------------------

GATED = dataclasses.replace(BF16, layers=1, gated=True)
SMALL_STATES = {"alto_exp_avg_dtype": "bfloat16", "alto_grad_ema_dtype": "bfloat16"}
#: The job and the layout that save, and ALTO's options.
RUNS = {"float32": (JOB, Layout(), {}), "SwiGLU, TP2": (GATED, Layout(tensor=2), {})}
MORE_RUNS = {"bf16": (BF16, Layout(), {}), "states in bfloat16": (BF16, Layout(), SMALL_STATES)}


def described(engine, is_loading=False):
    """As Megatron-LM collects it."""
    out = {"model": engine.chunks[0].module.state_dict_for_save_checkpoint()}
    about = {"distrib_optim_sharding_type": "fsdp_dtensor"}
    out["optimizer"] = engine.optimizer.sharded_state_dict(out, is_loading=is_loading, metadata=about)
    return out


def preprocessed(engine, raw):
    """As Megatron-LM does, which cuts the two halves of gated weights apart."""
    out = dict(raw)
    if engine.job.gated:
        cut = fsdp_dtensor_checkpoint.handle_swiglu_in_state_dict
        out["model"], out["optimizer"] = cut(engine.chunks[0].module, raw["model"], raw["optimizer"])
    preprocess_state_dict_for_uneven_dtensor(out)
    return out


def save(engine, folder):
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    dist.barrier()
    dcp.save(preprocessed(engine, described(engine)), storage_writer=dcp.FileSystemWriter(folder))


def load(engine, folder):
    """What is not in the checkpoint stays, as Megatron-LM has it unless it is told to be strict."""
    raw = described(engine, is_loading=True)
    planner = dcp.default_planner.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(preprocessed(engine, raw), storage_reader=dcp.FileSystemReader(folder), planner=planner)
    # By now the weights are in place, which this tells to the model; names in float32 are not those that it asks for.
    engine.chunks[0].load_state_dict(raw["model"], strict=False)
    engine.optimizer.load_state_dict(raw["optimizer"])


def place(directory, label):
    return directory / "fsdp" / label


def whole(engine, pieces):
    """Over tensor parallelism, the halves of gated weights one after the other."""
    everywhere = [None] * parallel_state.get_tensor_model_parallel_world_size()
    dist.all_gather_object(everywhere, pieces, group=parallel_state.get_tensor_model_parallel_group())
    params = engine.parameters()
    out = {}
    for key in pieces:
        p, parts = params.get(key.split(" ")[0]), [theirs[key] for theirs in everywhere]
        if p is None or not getattr(p, "tensor_model_parallel", False):
            out[key] = parts[0]
        elif engine.job.gated and "linear_fc1" in key:
            halves = [part.chunk(2) for part in parts]
            out[key] = torch.cat([half[i] for i in (0, 1) for half in halves])
        else:
            out[key] = torch.cat(parts, p.partition_dim)
    return out


@worlds(2)
@each(RUNS, exhaustive=MORE_RUNS)
def case_saved_by_fsdp(directory, label, setting):
    job, layout, options = setting
    with parallel(layout):
        engine = FSDP(job, layout, optimizer=alto_config(job, **options))
        engine.train(BEFORE)
        save(engine, place(directory, label) / "checkpoint")
        at_save = whole(engine, picture(engine))
        for step in range(BEFORE, BEFORE + AFTER):
            engine.step(step)
        at_end = whole(engine, picture(engine))
    with parallel(layout):
        once_more = FSDP(job, layout, optimizer=alto_config(job, **options)).train(BEFORE + AFTER)
        assert_same(whole(once_more, picture(once_more)), at_end, "saving changes nothing")
    if dist.get_rank() == 0:
        torch.save((at_save, at_end), place(directory, label) / "pictures.pt")
    dist.barrier()


def resumed(directory, label, layout):
    """An engine with other weights that has loaded, and what it should be at the end."""
    at_save, at_end = torch.load(place(directory, label) / "pictures.pt")
    job, _, options = {**RUNS, **MORE_RUNS}[label]
    engine = FSDP(job, layout, optimizer=alto_config(job, **options))
    with torch.no_grad():
        for p in engine.parameters().values():
            p.to_local().add_(0.5)
    load(engine, place(directory, label) / "checkpoint")
    assert_same(whole(engine, picture(engine)), at_save, "loaded")
    return engine, at_end


@worlds(2)
@each(RUNS, exhaustive=MORE_RUNS)
@after("case_saved_by_fsdp")
def case_fsdp_goes_on_bit_for_bit(directory, label, setting):
    with parallel(setting[1]):
        engine, at_end = resumed(directory, label, setting[1])
        for step in range(BEFORE, BEFORE + AFTER):
            engine.step(step)
        assert_same(whole(engine, picture(engine)), at_end, "continued")


@worlds(2)
@after("case_saved_by_fsdp", "SwiGLU, TP2")
def case_gated_weights_over_another_tensor_parallelism(directory):
    """Their halves lie in another order, and so do those of all three states."""
    with parallel(Layout()):
        resumed(directory, "SwiGLU, TP2", Layout())


def splitter(of, into):
    """As Megatron's: it makes several entries of one, and cuts the states that it has names for."""

    def handle(model, model_state_dict, optimizer_state_dict):
        cut_model = {key: tensor for key, tensor in model_state_dict.items() if key != of}
        for i, name in enumerate(into if of in model_state_dict else ()):
            cut_model[f"{of}.{name}"] = model_state_dict[of].chunk(len(into))[i]
        if optimizer_state_dict is None:
            return cut_model, None
        held = {}
        for key, state in optimizer_state_dict["state"].items():
            for i, name in enumerate(into if key == of else ()):
                pieces = {k: state[k].chunk(len(into))[i] for k in ("exp_avg", "exp_avg_sq")}
                held[f"{key}.{name}"] = {**state, **pieces}
            if key != of:
                held[key] = state
        return cut_model, {**optimizer_state_dict, "state": held}

    return handle


#: What it cuts, and into what. GDN's is of 0.18 and later, MLA's of main.
SPLITTERS = {
    "handle_gdn_in_state_dict": ("in_proj.weight", ("query", "key", "value", "z", "beta", "alpha")),
    "handle_mla_down_proj_in_state_dict": ("linear_qkv_down_proj.weight", ("q", "kv")),
}


@worlds(1)
@each(SPLITTERS)
def case_all_three_states_of_fused_weights_are_cut(label, setting):
    of, into = setting
    whole = {of: torch.arange(12.0), "other": torch.ones(2)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp_dtensor_checkpoint, label, splitter(*setting), raising=False)
        for _ in range(2):  # once is enough
            _split_third_state()
        cut = getattr(fsdp_dtensor_checkpoint, label)
        states = {k: {key: i + v for i, key in enumerate(ALTO.state_keys)} for k, v in whole.items()}
        given = {"state": {k: {**state, "step": 3} for k, state in states.items()}, "param_groups": []}
        model, optimizer = cut(None, whole, given)
        assert set(model) == set(optimizer["state"]) == {"other", *(f"{of}.{name}" for name in into)}
        for i, key in enumerate(ALTO.state_keys):
            pieces = [optimizer["state"][f"{of}.{name}"][key] for name in into]
            assert [len(piece) for piece in pieces] == [12 // len(into)] * len(into)
            assert torch.equal(torch.cat(pieces), states[of][key]), (key, i)
            assert torch.equal(optimizer["state"]["other"][key], states["other"][key])
        assert all(state["step"] == 3 for state in optimizer["state"].values())
        assert set(given["state"]) == set(whole)
        assert cut(None, whole, None)[1] is None
        lamb = {"state": {k: {key: v[key] for key in ALTO.state_keys[:2]} for k, v in states.items()}}
        assert not any("grad_ema" in state for state in cut(None, whole, lamb)[1]["state"].values())


@worlds(1)
@each(RUNS, exhaustive=MORE_RUNS)
@after("case_saved_by_fsdp", world=2)
def case_one_rank_has_all_of_fsdp(directory, label):
    with parallel(Layout()):
        resumed(directory, label, Layout())


@worlds(1)
@after("case_saved_by_fsdp", "float32", world=2)
def case_what_fsdp_does_not_load(directory):
    folder = place(directory, "float32") / "checkpoint"
    with parallel(Layout()):
        lamb = dataclasses.replace(alto_config(JOB), alto_alpha=0.0)
        with pytest.raises(ValueError, match=r"has alpha=-5.0 and this run alpha=0.0.*the alpha that was saved"):
            load(FSDP(JOB, Layout(), optimizer=lamb), folder)
        adam = FSDP(JOB, Layout(), optimizer=OptimizerConfig(optimizer="adam", lr=0.01)).train(1)
        save(adam, place(directory, "adam") / "checkpoint")
        with pytest.raises(ValueError, match=r"saved by another optimizer.*--no-load-optim"):
            load(FSDP(JOB, Layout()), place(directory, "adam") / "checkpoint")
        with pytest.raises(ValueError, match=r"alto_adopt does not read checkpoints of Megatron-FSDP"):
            FSDP(JOB, Layout(), optimizer=alto_config(JOB, alto_adopt=True))
        with pytest.raises(ValueError, match=r"Megatron-FSDP needs use_distributed_optimizer=True"):
            FSDP(JOB, Layout(), distributed=False)
        with pytest.raises(ValueError, match=r"leave out --use-precision-aware-opt.*--alto-exp-avg-dtype bfloat16"):
            FSDP(JOB, Layout(), optimizer=alto_config(JOB, use_precision_aware_optimizer=True))
        offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
        with pytest.raises(ValueError, match=r"does not work with Megatron-FSDP; leave out --optimizer-cpu-offload"):
            FSDP(JOB, Layout(), optimizer=alto_config(JOB, **offload))
        with pytest.raises(ValueError, match=r"alto_embeddings='adam' has no effect with Megatron-FSDP; leave out"):
            FSDP(JOB, Layout(), optimizer=dataclasses.replace(alto_config(JOB), alto_embeddings="adam"))


@worlds(2)
def case_parameters_of_fsdp_are_dtensors():
    """Else the cases above show nothing of them."""
    with parallel(Layout()):
        engine = FSDP(JOB, Layout()).train(1)
        (wrapper,) = engine.wrappers
        held = [(p, s["grad_ema"]) for p, s in wrapper.optimizer.state.items()]
        assert held
        assert all(isinstance(tensor, DTensor) for pair in held for tensor in pair)
