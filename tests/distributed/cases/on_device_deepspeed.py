"""DeepSpeed on a device: what the host does while ALTO steps, and states that go to the host and come back."""

import contextlib

import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

from alto_distributed import ALTO
from tests.helpers import devices, pretend
from tests.helpers.cases import each, worlds

from .zero import PARAMS, batches, config, largest_gap, loss_of, network, reference, running, train, weights

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
        for _ in range(2):
            engine.offload_states(include=kinds, pin_memory=pinned)
            assert all(kinds == {"cpu"} for kinds in devices_of_states(engine).values()), stage
            engine.reload_states()
            assert all(devices_of_states(engine)[key] == {here} for key in ALTO.state_keys), stage
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
