"""DeepSpeed with ``"skip_nonfinite": true``: a NaN in one rank's gradient, in every stage and precision.

The engine trains on, and ends bit for bit where one does that never had the step. The NaN is put in before gradients
are reduced, once into a parameter of the first group and once into the very last of the last group: ZeRO steps group
after group, so that a check inside of the optimizer would come too late for the first.
"""

import contextlib

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from alto_distributed.deepspeed.layout import LayoutBuilder
from tests.helpers.cases import each, worlds
from tests.helpers.zero import PARAMS, batches, config, loss_of, network, running, trainable, weights

BF16 = {"bf16": {"enabled": True}}
#: A scale that stays: a dynamic one is another after a skipped step, and with it the last digits of gradients.
FP16 = {"fp16": {"enabled": True, "loss_scale": 4096}}
DYNAMIC = {"fp16": {"enabled": True, "initial_scale_power": 12, "hysteresis": 1}}
UNCHECKED = {"bf16": {"enabled": True, "check_grad_overflow": False}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}

#: Label -> zero section, more of the config. The first ones run every day.
CELLS = {
    "fp32, stage 0": (None, {}),
    "fp32, stage 2, no norm": ({"stage": 2, "compute_grad_norm": False}, {"clip": 0.0}),
    "fp32, stage 3": ({"stage": 3}, {}),
    "bf16, stage 1, BF16_Optimizer": ({"stage": 1}, {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}),
    "bf16, stage 2, unchecked": ({"stage": 2}, UNCHECKED),
    "bf16, stage 3": ({"stage": 3, "sub_group_size": 40}, BF16),
    "fp16, stage 2": ({"stage": 2}, FP16),
}
MORE = {
    "fp32, stage 2": ({"stage": 2}, {}),
    "bf16, stage 0": (None, BF16),
    "bf16, stage 2, offload": ({"stage": 2, **OFFLOAD}, BF16),
    "fp32, stage 1": ({"stage": 1}, {}),
    "bf16, stage 1": ({"stage": 1}, BF16),
    "bf16, stage 1, unchecked": ({"stage": 1}, UNCHECKED),
    "bf16, stage 2": ({"stage": 2}, BF16),
    "bf16, stage 2, no norm": ({"stage": 2, "compute_grad_norm": False}, {**UNCHECKED, "clip": 0.0}),
    "bf16, stage 3, unchecked": ({"stage": 3}, UNCHECKED),
    "fp32, stage 1, offload": ({"stage": 1, **OFFLOAD}, {}),
    "fp32, stage 2, offload": ({"stage": 2, **OFFLOAD}, {}),
    "fp32, stage 3, offload": ({"stage": 3, **OFFLOAD}, {}),
    "bf16, stage 3, offload": ({"stage": 3, **OFFLOAD}, BF16),
    "bf16, stage 3, both offloaded": ({"stage": 3, **OFFLOAD, "offload_param": {"device": "cpu"}}, BF16),
    "bf16, stage 1, offload": ({"stage": 1, **OFFLOAD}, BF16),
    "fp32, stage 3, both offloaded": ({"stage": 3, **OFFLOAD, "offload_param": {"device": "cpu"}}, {}),
    "fp16, stage 1": ({"stage": 1}, FP16),
    "fp16, stage 3": ({"stage": 3, "sub_group_size": 40}, FP16),
    "fp16, stage 1, offload": ({"stage": 1, **OFFLOAD}, FP16),
    "fp16, stage 2, offload": ({"stage": 2, **OFFLOAD}, FP16),
    "fp16, stage 3, offload": ({"stage": 3, **OFFLOAD}, FP16),
    "fp16, stage 3, both offloaded": ({"stage": 3, **OFFLOAD, "offload_param": {"device": "cpu"}}, FP16),
    "fp16, stage 1, dynamic scale": ({"stage": 1}, DYNAMIC),
    "fp16, stage 2, dynamic scale": ({"stage": 2}, DYNAMIC),
    "fp16, stage 3, dynamic scale": ({"stage": 3}, DYNAMIC),
}
BAD = {1: "up.weight", 3: "scale"}  # step -> where the NaN is: in the decayed group, and last of the undecayed
STEPS = 5


@contextlib.contextmanager
def nan_in(engine, name, rank):
    """In the last element of one parameter's gradient, on one rank, before it is reduced."""
    if name is None or dist.get_rank() != rank:
        yield
        return

    def hook(grad):
        grad = grad.clone()
        grad.view(-1)[-1] = torch.nan
        return grad

    handle = trainable(engine.module)[name].register_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def everything(engine):
    """Bytes of all that this rank holds: model, master weights, states, and step counts also of groups. Not of padding,
    which at stage 3 is whatever the memory held."""
    optimizer, layouts = engine.basic_optimizer, LayoutBuilder(engine).build()
    tensors = list(weights(engine).values())
    for flat, state in optimizer.state.items():
        tensors.append(torch.as_tensor(state["step"]))
        for segment in layouts[flat].segments:
            here = slice(segment.start, segment.start + segment.length)
            tensors += [t.detach().view(-1)[here] for t in (flat, *(state[key] for key in optimizer.state_keys))]
    steps = [torch.tensor(group.get("step", -1)) for group in optimizer.param_groups]
    return [t.detach().clone().reshape(-1).view(torch.uint8) for t in [*tensors, *steps]]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def train(engine, bad, rank):
    world, found = dist.get_world_size(), []
    for k, ((x, y),) in enumerate(batches(STEPS)):
        if k in bad and bad[k] is None:
            continue  # the run that never had it
        x, y = x.chunk(world)[dist.get_rank()], y.chunk(world)[dist.get_rank()]
        before, skipped = everything(engine) if k in bad else None, engine.skipped_steps
        with nan_in(engine, bad.get(k), rank):
            engine.backward(loss_of(engine(x), y))
        engine.step()
        found.append(engine.skipped_steps - skipped)
        assert engine.was_step_applied() == (k not in bad), k
        if k in bad:
            assert same(before, everything(engine)), k
    return found


def check(label, zero, more):
    more = dict(more)
    clip = more.pop("clip", 1.0)
    params = {**PARAMS, "skip_nonfinite": True}
    rank = dist.get_world_size() - 1
    with running(network(), config(zero, clip=clip, params=params, **more)) as engine:
        assert isinstance(engine.optimizer, BF16_Optimizer) == ("BF16_Optimizer" in label)
        assert train(engine, BAD, rank) == [int(k in BAD) for k in range(STEPS)]
        got, counts = everything(engine), {float(s["step"]) for s in engine.basic_optimizer.state.values()}
        assert counts == {float(STEPS - len(BAD))}
    if "dynamic" in label:
        return
    with running(network(), config(zero, clip=clip, **more)) as engine:
        train(engine, dict.fromkeys(BAD), rank)
        assert same(got, everything(engine)), f"{label}: not the run that never had the steps"


@worlds(2)
@each(CELLS, exhaustive=MORE)
def case_a_nan_on_one_rank_changes_nothing_in_any_stage(label, setting):
    check(label, *setting)


@worlds(2)
@each({"fp32, stage 0": (None, {}), "bf16, stage 2, unchecked": ({"stage": 2}, UNCHECKED)})
def case_without_the_setting_a_nan_gets_in(setting):
    """The negative control, where DeepSpeed does not look: float32 at stage 0, and where it is told not to."""
    zero, more = setting
    with running(network(), config(zero, **more)) as engine:
        ((x, y),) = next(iter(batches(1)))
        x, y = x.chunk(2)[dist.get_rank()], y.chunk(2)[dist.get_rank()]
        with nan_in(engine, "scale", 1):
            engine.backward(loss_of(engine(x), y))
        engine.step()
        assert any(w.isnan().any() for w in weights(engine).values())
