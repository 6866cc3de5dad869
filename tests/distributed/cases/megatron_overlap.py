"""overlap_param_gather: a step leaves weights of two steps behind until the next forward pass, and none is saved so.

In bf16: float32 weights are the optimizer's own, and are right in any case.
"""

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.helpers.cases import some, worlds
from tests.helpers.megatron_saves import (
    AFTER,
    BEFORE,
    BF16,
    Run,
    advance,
    assert_same,
    described,
    engine_for,
    load,
    metadata,
    other_engine_for,
    picture,
    place,
    save,
)

# The imports below need what megatron_gpt, imported by megatron_saves, puts in place of a GPU.
from megatron.core import dist_checkpointing  # isort: skip
from alto_distributed.megatron import distributed  # isort: skip
from alto_distributed.pretrain.engines.megatron import engine as pretrain  # isort: skip

from alto_distributed.pretrain.checkpoint.manager import Checkpoints
from tests.helpers.pretrain_megatron import engine_of, programs_groups, run_of, weights

#: Of a float32 weight in a checkpoint; what follows is the name of the model's.
MASTER = "optimizer.state.param."
ONE, SEVERAL = Run((), BF16, overlap=True), Run((), BF16, bucket_size=6000)


def mixed(parameters):
    """Whether some weight is not the same on all ranks. Without model parallelism all should be."""
    mine = torch.cat([p.detach().view(-1) for p in parameters])
    everywhere = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, mine)
    return any(not torch.equal(mine, theirs) for theirs in everywhere)


def mixed_in(engine):
    return mixed(p for _, p in engine.named_parameters())


@contextlib.contextmanager
def as_before(*modules):
    """Version 0.1.0, which did not gather."""
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "finish_param_gather", lambda chunks: None)
        yield


# -- a script with megatron-core -----------------------------------------------------------------------


SAVED = {"one, fully": (ONE, "fully"), "several, dp": (SEVERAL, "dp"), "several, dp zero": (SEVERAL, "dp zero")}
MORE_SAVED = {"one, dp": (ONE, "dp"), "one, dp zero": (ONE, "dp zero")}


@worlds(2)
@some(SAVED, exhaustive=MORE_SAVED)
def case_a_save_gathers_first(directory, label, setting):
    """The model is described before the optimizer, as Megatron-LM does, and no hook is disabled."""
    run, kind = setting
    folder = place(directory, f"overlap, {label}", kind)
    with engine_for(run) as engine:
        advance(engine, 0, BEFORE)
        assert mixed_in(engine)
        save(engine, folder, kind)
        assert not mixed_in(engine)
        at_save = picture(engine, run)
        advance(engine, BEFORE, BEFORE + AFTER)
        at_end = picture(engine, run)
    with engine_for(run) as engine:
        advance(engine, 0, BEFORE + AFTER)
        assert_same("not saved", picture(engine, run), at_end)
    with other_engine_for(run) as engine:
        load(engine, folder, kind)
        assert_same("loaded", picture(engine, run), at_save)
        advance(engine, BEFORE, BEFORE + AFTER)
        assert_same("continued", picture(engine, run), at_end)


@worlds(2)
@some({"one": ONE, "several": SEVERAL})
def case_a_gather_that_is_under_way_is_waited_for(setting):
    """As a pipeline's schedule starts it."""
    with engine_for(setting) as engine:
        advance(engine, 0, BEFORE)
        (chunk,) = engine.chunks
        chunk.start_param_sync()
        assert all(group.param_gather_handle is not None for group in chunk.bucket_groups)
        described(engine, metadata("dp"))
        assert all(group.param_gather_handle is None for group in chunk.bucket_groups)
        assert not mixed_in(engine)
        advance(engine, BEFORE, BEFORE + 1)


@worlds(2)
def case_states_in_files_come_with_a_warning(directory):
    """``state_dict()`` is called by one rank alone, and cannot gather."""
    message = r"mix two steps until the next forward pass.*start_param_sync\(force_sync=True\) on every model chunk"
    with engine_for(ONE) as engine:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            engine.optimizer.state_dict()
        advance(engine, 0, BEFORE)
        with pytest.warns(UserWarning, match=message):
            engine.optimizer.state_dict()
        assert mixed_in(engine)
        (chunk,) = engine.chunks
        chunk.start_param_sync(force_sync=True)  # as it says
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            engine.optimizer.state_dict()
        assert not mixed_in(engine)
        # What all ranks call gathers: Megatron-LM saves these states first.
        advance(engine, BEFORE, BEFORE + 1)
        engine.optimizer.save_parameter_state(str(directory / "overlap states.pt"))
        assert not mixed_in(engine)
        # To be described for loading is no reason to gather, nor to warn.
        advance(engine, BEFORE + 1, BEFORE + 2)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            described(engine, metadata("dp"), is_loading=True)
        assert mixed_in(engine)


# -- the training program --------------------------------------------------------------------------------


def batches(step):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return [torch.randint(0, 256, (4, 9), generator=generator) for _ in range(2)]


def losses(engine, start, stop):
    return [engine.train(batches(step), 0.01).loss for step in range(start, stop)]


@worlds(2)
@some(kind=("fully_reshardable", "dp_reshardable"))
def case_the_program_saves_and_loads_weights_of_one_step(directory, kind):
    assert run_of().megatron.overlap, "the default"
    with programs_groups():
        whole = losses(engine_of(run_of()), 0, BEFORE + AFTER)
        run = run_of(checkpoint_format=kind)
        checkpoints = Checkpoints(directory / f"overlap {kind}", run)
        engine = engine_of(run)
        assert losses(engine, 0, BEFORE) == whole[:BEFORE]
        assert mixed(weights(engine))
        checkpoints.save(engine, BEFORE)
        assert not mixed(weights(engine))
        assert losses(engine, BEFORE, BEFORE + AFTER) == whole[BEFORE:], "a save changes nothing"
        # Into a new engine, into one in the middle of things, and into one whose gathers are done.
        for prepare in (
            lambda engine: None,
            lambda engine: losses(engine, 20, 22),
            lambda engine: (losses(engine, 20, 22), engine.evaluate(batches(30))),
        ):
            other = engine_of(run)
            prepare(other)
            checkpoints.load(other, checkpoints.newest())
            assert not mixed(weights(other))
            assert losses(other, BEFORE, BEFORE + AFTER) == whole[BEFORE:]


@worlds(2)
def case_the_program_evaluates_weights_of_one_step():
    """A forward pass gathers in any mode, and the next one need not."""
    with programs_groups():
        engine, other = engine_of(run_of()), engine_of(run_of(overlap=False))
        for step in range(BEFORE):
            assert losses(engine, step, step + 1) == losses(other, step, step + 1)
            assert engine.evaluate(batches(30)) == other.evaluate(batches(30))
            assert not mixed(weights(engine))
        assert engine.diagnostics()
        assert engine.diagnostics() == other.diagnostics()


@worlds(2)
def case_the_program_saves_weights_of_one_step_for_adam_too(directory):
    """megatron-core 0.16.1 does not load them without TransformerEngine, so what is saved is read."""
    with programs_groups():
        run = run_of("adamw")
        engine = engine_of(run)
        losses(engine, 0, BEFORE)
        assert mixed(weights(engine))
        path = Checkpoints(directory / "overlap, adamw", run).save(engine, BEFORE)
        saved = dist_checkpointing.load_plain_tensors(str(path))
        masters = {name: value for name, value in saved.items() if name.startswith(MASTER)}
        assert len(masters) > 10
        for name, master in masters.items():
            weight = saved[name.removeprefix(MASTER)]
            assert torch.equal(weight, master.view(weight.shape).bfloat16()), name


@worlds(2)
def case_what_the_program_once_saved_is_mended_when_it_is_loaded(directory):
    with programs_groups():
        run = run_of()
        checkpoints = Checkpoints(directory / "overlap, mixed", run)
        whole = losses(engine_of(run), 0, BEFORE + AFTER)
        engine = engine_of(run)
        losses(engine, 0, BEFORE)
        with as_before(pretrain, distributed):
            checkpoints.save(engine, BEFORE)
        for overlap in (True, False):
            checkpoints = Checkpoints(directory / "overlap, mixed", run)
            other = engine_of(run_of(overlap=overlap))
            checkpoints.load(other, checkpoints.newest())
            assert losses(other, BEFORE, BEFORE + AFTER) == whole[BEFORE:], overlap
        with pytest.MonkeyPatch.context() as patch:  # and there was something to mend
            patch.setattr(pretrain.MegatronTraining, "_weights_from_masters", lambda engine: None)
            other = engine_of(run)
            checkpoints.load(other, checkpoints.newest())
            assert losses(other, BEFORE, BEFORE + AFTER)[0] != whole[BEFORE]
