"""DeepSpeed on a device: what the host does while ALTO steps, and states that go to the host and come back."""

import contextlib
import gc

import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

from alto_distributed import ALTO
from tests.helpers import devices, pretend
from tests.helpers.cases import each, worlds
from tests.helpers.zero import (
    PARAMS,
    batches,
    config,
    largest_gap,
    loss_of,
    network,
    reference,
    running,
    same_bits,
    train,
    weights,
)

BF16 = {"bf16": {"enabled": True}}


@contextlib.contextmanager
def watching(steps_before=0):
    """ALTO may not have the host read or copy anything, from a step on."""
    original = ALTO.step

    def step(optimizer, *args):
        count = min((int(state["step"].cpu()) for state in optimizer.state.values()), default=0)
        with pretend.no(pretend.HOST if count >= steps_before else ()):
            return original(optimizer, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ALTO, "step", step)
        yield


STEADY = {
    "stage 0": (0, {}),
    "stage 0, bf16": (0, BF16),
    "stage 1": (1, {}),
    "stage 1, bf16": (1, BF16),
    "stage 2, bf16": (2, BF16),
    "stage 3": (3, {}),
    "stage 3, bf16": (3, BF16),
}


@worlds(2)
@each(STEADY)
def case_nothing_is_read_or_copied_in_the_steady_state(setting):
    stage, more = setting
    zero = {"stage": stage, "sub_group_size": 40} if stage else None
    with running(network(), config(zero, **more)) as engine, watching(steps_before=2):
        train(engine, steps=4)


def everything(engine):
    """Master weights and states of this rank, on the host."""
    optimizer = engine.basic_optimizer
    states = {(i, key): s[key] for i, s in enumerate(optimizer.state.values()) for key in ALTO.state_keys}
    return {key: value.detach().cpu().clone() for key, value in {**states, **dict(enumerate(optimizer.state))}.items()}


def bytes_on_device():
    gc.collect()
    return getattr(torch, devices.NAME).memory_allocated()


def devices_of_states(engine):
    """Types of the devices of all states, and of the step counts."""
    found = engine.basic_optimizer.state.values()
    return {key: {state[key].device.type for state in found} for key in (*ALTO.state_keys, "step")}


@worlds(2)
@each({"stage 1, pinned": (1, True), "stage 2": (2, False), "stage 3, pinned": (3, True), "stage 3": (3, False)})
def case_states_go_to_the_host_and_come_back(setting):
    """As RLHF does between phases. At stage 3 the third state stayed on the device, had DeepSpeed not refused at all;
    at the others the step counts came back on the device, and each of them was waited for at each step."""
    here = devices.NAME
    # DeepSpeed cannot move the model's own weights at stage 3 where some are frozen, with any optimizer.
    kinds = set(OffloadStateTypeEnum) - {OffloadStateTypeEnum.lp_params}
    stage, pinned = setting
    with running(network(), config({"stage": stage})) as engine:
        train(engine, steps=3)
        before, occupied = everything(engine), bytes_on_device()
        # At stage 3, float32 master weights are the model's own.
        moved = sum(value.nbytes for key, value in before.items() if stage < 3 or isinstance(key, tuple))
        for _ in range(2):
            engine.offload_states(include=kinds, pin_memory=pinned)
            assert all(kinds == {"cpu"} for kinds in devices_of_states(engine).values()), stage
            assert bytes_on_device() <= occupied - moved, (occupied, moved, bytes_on_device())
            engine.reload_states()
            assert all(devices_of_states(engine)[key] == {here} for key in ALTO.state_keys), stage
            after = everything(engine)
            assert all(same_bits(after[key], value) for key, value in before.items()), stage
        keys = {key for state in engine.basic_optimizer.state.values() for key in state}
        assert keys == {*ALTO.state_keys, "step"}
        with watching(steps_before=4):  # the first step fetches the counts
            for (x, y), *_ in list(batches())[3:]:
                rank = torch.distributed.get_rank()
                engine.backward(loss_of(engine(x.chunk(2)[rank]), y.chunk(2)[rank]))
                engine.step()
        gap = largest_gap(weights(engine), reference())
        assert gap < 1e-6, (stage, gap)
        assert {state["step"].device.type for state in engine.basic_optimizer.state.values()} == {"cpu"}
    assert PARAMS["kernel"] == "torch"


@worlds(2)
@each(stage=(1, 2, 3))
def case_everything_goes_to_the_host(stage):
    """The default call, with the model's own weights, which can be moved where none is frozen."""
    model = network()
    model.frozen.requires_grad_(True)
    with running(model, config({"stage": stage})) as engine:
        train(engine, steps=2)
        before, occupied = everything(engine), bytes_on_device()
        moved = sum(value.nbytes for value in before.values())
        engine.offload_states()
        assert bytes_on_device() <= occupied - moved, (occupied, moved, bytes_on_device())
        engine.reload_states()
        after = everything(engine)
        assert all(same_bits(after[key], value) for key, value in before.items())
        train(engine, steps=1)


@worlds(2)
def case_states_of_esgd_go_to_the_host_and_come_back():
    """At stage 3, where DeepSpeed asks for Adam."""
    params = {"lr": 0.05, "momentum": 0.9, "alpha": -5, "beta1": 0.99}
    with running(network(), config({"stage": 3}, name="ESGD", params=params)) as engine:
        train(engine, steps=2)
        states = [t for s in engine.basic_optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        before = [t.cpu().clone() for t in states]
        assert len(states) == 2 * len(engine.basic_optimizer.state) > 0
        engine.offload_states(include=[OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params])
        assert {t.device.type for t in states} == {"cpu"}
        engine.reload_states()
        assert {t.device.type for t in states} == {devices.NAME}
        assert all(torch.equal(t.cpu(), value) for t, value in zip(states, before, strict=True))
        assert type(engine.basic_optimizer).__name__ == "ESGD"
        train(engine, steps=1)


@worlds(2)
def case_a_part_of_them_goes():
    with running(network(), config({"stage": 3})) as engine:
        train(engine, steps=1)
        engine.offload_states(include=[OffloadStateTypeEnum.optim_states])
        assert all(kinds == {"cpu"} for kinds in devices_of_states(engine).values())
        assert engine.optimizer.fp32_partitioned_groups_flat[0].device.type == devices.NAME
        engine.reload_states()
        assert isinstance(engine.basic_optimizer, ALTO)
        assert engine.optimizer.optimizer is engine.basic_optimizer
        train(engine, steps=1)
