"""Master weights in bfloat16: they go where those in float32 go, with bits that hang on neither resumes nor ranks."""

import functools

import deepspeed
import pytest
import torch

from alto_distributed import ALTO
from tests.helpers.cases import after, each, worlds
from tests.helpers.zero import PARAMS, batches, config, loss_of, masters, network, running, trainable

STEPS = 40
#: Updates of most weights are below half of their last place.
SLOW = {**PARAMS, "lr": 5e-4}
BF16_MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
CELLS = {
    "stage 1": {"stage": 1},
    "stage 2, offload": {"stage": 2, **OFFLOAD},
    "stage 3": {"stage": 3, "sub_group_size": 40},
}
MORE_CELLS = {
    "stage 2": {"stage": 2},
    "stage 1, offload": {"stage": 1, **OFFLOAD},
    "stage 3, offload": {"stage": 3, **OFFLOAD},
}


def config_of(zero, bf16=None, params=SLOW):
    """All ranks see the whole batch."""
    return {**config(zero, params=params, bf16=bf16 or BF16_MASTERS), "train_micro_batch_size_per_gpu": 8}


def advance(engine, start, stop):
    for ((x, y),) in list(batches(stop))[start:]:
        engine.backward(loss_of(engine(x), y))
        engine.step()


def flat(tensors):
    return torch.cat([tensors[name].float().flatten() for name in sorted(tensors)])


def moved(ds_config):
    """How far all weights have gone, and the dtypes of masters and states."""
    start = {name: p.detach().bfloat16() for name, p in trainable(network()).items()}
    with running(network(), ds_config) as engine:
        advance(engine, 0, STEPS)
        dtypes = {p.dtype for p in engine.basic_optimizer.state}
        kept = {state[key].dtype for state in engine.basic_optimizer.state.values() for key in ALTO.state_keys}
        return flat(masters(engine)) - flat(start), dtypes, kept


@functools.cache
def in_float32():
    """The same with master weights in float32."""
    way, dtypes, _ = moved(config_of({"stage": 2}, {"enabled": True}))
    assert dtypes == {torch.float32}
    return way


@worlds(2)
@each(CELLS, exhaustive=MORE_CELLS)
def case_they_go_where_float32_goes(setting):
    expected = in_float32()
    way, dtypes, kept = moved(config_of(setting))
    assert dtypes == {torch.bfloat16}
    assert kept == {torch.float32}
    share = (way @ expected / expected.norm() ** 2).item()
    assert 0.85 < share < 1.15, share


@worlds(2)
def case_to_nearest_they_hardly_move():
    """Without the rounding, the comparison above fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ALTO, "round_weights_stochastically", lambda optimizer: None)
        way, *_ = moved(config_of({"stage": 2}))
    share = (way @ in_float32() / in_float32().norm() ** 2).item()
    assert share < 0.6, share


@worlds(2)
@each({"stage 2": {"stage": 2}, "stage 3": {"stage": 3}})
def case_they_resume_bitwise(directory, label, setting):
    folder = directory / f"bf16 masters, {label}"
    with running(network(), config_of(setting)) as engine:
        advance(engine, 0, 2)
        engine.save_checkpoint(folder, tag="saved")
        advance(engine, 2, 4)
        expected = flat(masters(engine))
    with running(network(), config_of(setting)) as engine:
        engine.load_checkpoint(folder)
        advance(engine, 2, 4)
        assert torch.equal(flat(masters(engine)), expected)
    if torch.distributed.get_rank() == 0:
        torch.save(expected, folder / "two ranks.pt")


@worlds(1)
@each({"stage 2": {"stage": 2}, "stage 3": {"stage": 3}})
@after("case_they_resume_bitwise", world=2)
def case_another_world_size_has_the_same_bits(directory, label, setting):
    """They hang on the place in the parameter. Gradients are the same here: each rank sees the whole batch."""
    with running(network(), config_of(setting)) as engine:
        advance(engine, 0, 4)
        assert torch.equal(flat(masters(engine)), torch.load(directory / f"bf16 masters, {label}" / "two ranks.pt"))


@worlds(2)
def case_precision_of_states_has_options_of_its_own():
    """DeepSpeed's key would leave all of them in float32, and say nothing."""
    asked = {**BF16_MASTERS, "bf16_optimizer_states": True}
    with pytest.raises(ValueError, match=r'Remove it from the config, and write "exp_avg_dtype": "bfloat16"'):
        deepspeed.initialize(model=network(), config=config_of({"stage": 2}, asked))
    small = {**SLOW, "exp_avg_dtype": "bfloat16", "grad_ema_dtype": "bfloat16"}
    with running(network(), config_of({"stage": 2}, asked, small)) as engine:
        advance(engine, 0, 1)
    with pytest.raises(ValueError, match="ESGD loses small updates of bfloat16 master weights"):
        deepspeed.initialize(
            model=network(),
            config={**config_of({"stage": 2}, asked), "optimizer": {"type": "ESGD", "params": {"lr": 0.1}}},
        )
