"""Megatron's checkpoints: all three states and the step count, saved and loaded in every format and layout.

What two ranks save here is loaded by two in the same and in other layouts, and by one and by four.
"""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.helpers.megatron_gpt import ALTO_OPTIONS, Layout

# The imports below need what megatron_gpt puts in place of a GPU.
from megatron.core import dist_checkpointing  # isort: skip
from megatron.core.dist_checkpointing.mapping import ShardedObject  # isort: skip
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # isort: skip

from alto_distributed import ALTO
from alto_distributed.megatron import checkpoint_formats as formats
from alto_distributed.megatron.group_loading import regrouped
from tests.helpers import devices
from tests.helpers.cases import after, each, worlds
from tests.helpers.megatron_saves import (
    AFTER,
    BEFORE,
    EP2,
    EVERYDAY,
    FP16,
    REFUSALS,
    RUNS,
    SMALL_STATES,
    TINY,
    TP2,
    VARIATIONS,
    adam,
    advance,
    assert_same,
    described,
    engine_for,
    gap,
    hyperparameters,
    load,
    metadata,
    other_engine_for,
    picture,
    place,
    save,
)

#: A run and a format that it is saved in, of all there are. Settings are read from the source, so they are written out.
#: One rank loads these every day,
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
#: and these in exhaustive runs.
ALSO_FOR_ONE = {
    "DP2, fully, by gloo": ("DP2", "fully, by gloo"),
    "DP2, bf16, fully": ("DP2, bf16", "fully"),
    "DP2, states in bfloat16, dp": ("DP2, states in bfloat16", "dp"),
    "DP2, offload, fully": ("DP2, offload", "fully"),
    "DP2, buckets, dp zero": ("DP2, buckets", "dp zero"),
    "DP2, one rank holds nothing, dp zero": ("DP2, one rank holds nothing", "dp zero"),
    "DP2, LAMB, fully": ("DP2, LAMB", "fully"),
}
VARIED_FOR_ONE = {
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
#: Where the model is cut, two formats alone go to one rank. These stay at two.
FOR_TWO = {
    "TP2, dp": ("TP2", "dp"),
    "TP2, FP32Optimizer, files": ("TP2, FP32Optimizer", "files"),
    "TP2, Float16Optimizer, files": ("TP2, Float16Optimizer", "files"),
    "EP2, dp": ("EP2", "dp"),
}
VARIED_FOR_TWO = {
    "TP2, states in bfloat16, replicated, files": ("TP2, states in bfloat16, replicated", "files"),
}
MORE_FOR_ONE = {**ALSO_FOR_ONE, **VARIED_FOR_ONE}
SAVED = {**FOR_ONE, **ALSO_FOR_ONE, **FOR_TWO}
MORE_SAVED = {**VARIED_FOR_ONE, **VARIED_FOR_TWO}
assert sorted([*SAVED.values(), *MORE_SAVED.values()]) == sorted(
    (label, kind) for label, run in RUNS.items() for kind in run.formats
)


def without_experts(groups):
    return {repr({key: value for key, value in group.items() if key != "is_expert_parallel"}) for group in groups}


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
    cut = layout.tensor != RUNS[label].layout.tensor
    # Half precision rounds differently where tensor parallelism cuts; it need only go on. So may a state in bfloat16,
    # by its last bit, there and where a device adds gradients up in another order.
    if cut and not run.exact:
        allowed = 0.1
    elif run.options == SMALL_STATES and (cut or devices.NAME != "cpu"):
        allowed = 1e-3
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
        got = picture(engine, RUNS[loads])
    if devices.NAME == "cpu":
        assert_same("continued", got, at_end)
    else:  # the kernels of host and device round otherwise
        assert torch.equal(got["steps"], at_end["steps"])
        assert gap(got, at_end) <= 2.0**-7


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
