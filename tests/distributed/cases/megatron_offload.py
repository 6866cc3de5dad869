"""``optimizer_cpu_offload``: the same weights, states and losses as without, wherever the shards are.

All is bitwise the same. Beside CPU ranks the host is the device. On tests/helpers/pretend a copy to the host is NaN
until its own event was waited for, and what fails is an operation on tensors of two devices, on weights whose copy
the device's stream does not wait for, and writing over weights that are on their way.
"""

import contextlib
import dataclasses
from unittest import mock

import pytest
import torch

from alto_distributed import ALTO
from tests.helpers import devices, pretend
from tests.helpers.cases import each, some, worlds
from tests.helpers.megatron_gpt import Job, Layout, Megatron, alto_config, parallel

# isort: split
from alto_distributed.megatron import cpu_offload, diagnostics

STEPS = 5
#: Of a wave, so that there are several.
FEW = mock.patch.object(cpu_offload, "WAVE", 2000)
BF16 = Job(layers=1, precision=torch.bfloat16, steps=STEPS)
FP16 = Job(layers=1, precision=torch.float16, steps=STEPS)
FP32 = Job(layers=1, steps=STEPS, clip=0.05)
MOE = Job(layers=1, experts=4, steps=STEPS)
# The loss scale overflows at first.
SCALER = {"initial_loss_scale": 2.0**17, "hysteresis": 1}
#: The job, its layout, the fraction, options of the engine, and of the optimizer.
SETTINGS = {
    "bf16": (BF16, Layout(), 1.0, {}, {}),
    "fp16, half": (FP16, Layout(), 0.5, {}, SCALER),
    "fp32, tenth": (FP32, Layout(), 0.1, {}, {}),
    "bf16, nothing": (BF16, Layout(), 0.0, {}, {}),
    "experts, half": (MOE, Layout(expert=2), 0.5, {}, {}),
    "overlap": (BF16, Layout(), 0.7, {"overlap": True, "bucket_size": 3000}, {"overlap_cpu_optimizer_d2h_h2d": True}),
    "bf16 states, tensor parallel": (
        BF16, Layout(tensor=2), 1.0, {}, {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16},
    ),
    "fp32": (FP32, Layout(), 1.0, {}, {}),
}  # fmt: skip


def engine_of(job, layout, options, config, **offload):
    # The same arithmetic on both sides, also at the end of a tensor, where torch's fused operations round otherwise.
    kernel = {} if devices.NAME == "cpu" else {"alto_kernel": "reference"}
    return Megatron(job, layout, optimizer=alto_config(job, **config, **kernel, **offload), **options)


def offloaded(fraction):
    return {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}


def result(engine):
    """Weights, shards, states and losses of this rank."""
    engine.synchronize()
    out = {name: p.detach().cpu() for name, p in engine.named_parameters()}
    names = {p: name for name, p in engine.named_parameters()}
    for wrapper in engine.wrappers:
        for p, _, shard in engine.shards(wrapper):
            state = wrapper.optimizer.state[shard]
            out |= {f"{names[p]} {key}": state[key].cpu() for key in ALTO.state_keys if key in state}
            out[f"{names[p]} shard"] = shard.detach().cpu()
    if engine.losses:
        out["losses"] = torch.stack(engine.losses).cpu()
    return out


@worlds(2)
@some(SETTINGS)
def case_offloaded_equals_not_offloaded(setting):
    job, layout, fraction, options, config = setting
    with parallel(layout):
        expected = result(engine_of(job, layout, options, config).train())
        with FEW:
            engine = engine_of(job, layout, options, config, **offloaded(fraction))
        check_places(engine, fraction)
        got = result(engine.train())
        check_places(engine, fraction)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if devices.NAME != "cuda":
            assert torch.equal(got[name], value), (name, (got[name] - value).abs().max())
        else:
            difference = (got[name].float() - value.float()).abs().max() / value.float().abs().max().clamp_min(1e-30)
            assert difference <= (1e-6 if job.precision == torch.float32 else 2.0**-7), (name, difference)


def check_places(engine, fraction):
    """The share of the elements that are on the host, shards and states."""
    for wrapper in engine.wrappers:
        shards = wrapper.optimizer.param_groups
        shards = [shard for group in shards for shard in group["params"]]
        moved = list(wrapper._alto_on_host)
        total, largest = sum(s.numel() for s in shards), max((s.numel() for s in shards), default=0)
        on_host = sum(s.numel() for s in moved)
        assert fraction * total <= on_host <= fraction * total + largest, (on_host, total)
        for one in wrapper._alto_on_host.values():
            assert one.shard.is_cpu
            assert one.gradient.is_cpu
            assert one.on_device.device == one.model_param.device
            assert one.on_device.untyped_storage().nbytes() == one.shard.element_size()
            if devices.NAME != "cpu":
                assert one.shard.is_pinned()
                assert one.gradient.is_pinned()
        for shard in shards:
            assert shard.device == (torch.device("cpu") if shard in wrapper._alto_on_host else devices.here())
            held = wrapper.optimizer.state.get(shard, {})
            assert all(held[key].device == shard.device for key in ALTO.state_keys if key in held)


class Spy:
    """A kernel that notes what it is called for, and what has been copied by then."""

    def __init__(self, kernel, device, seen):
        self.kernel, self.device, self.seen = kernel, device, seen

    def phase_one(self, shards, sums):
        assert all(shard.grad.isfinite().all() for shard in shards), "gradients that have not arrived"
        self.seen.append(("one", self.device.type, [shard.param for shard in shards], *copies()))
        return self.kernel.phase_one(shards, sums)

    def phase_two(self, shards, step_sizes, prepared=None):
        self.seen.append(("two", self.device.type, [shard.param for shard in shards], *copies()))
        self.kernel.phase_two(shards, step_sizes, prepared)


def copies():
    """How many the host has started to the device, and how many to the host it has waited for at once."""
    counts = pretend.counts() if devices.NAME == "pretend" else {}
    return counts.get("to device, not waiting", 0), counts.get("to host", 0)


@contextlib.contextmanager
def spied():
    """Calls of kernels in the block: (phase, device, shards, copies before it)."""
    seen, kernel_on = [], ALTO._kernel_on
    with mock.patch.object(ALTO, "_kernel_on", lambda *given: Spy(kernel_on(*given), given[1], seen)):
        yield seen


@worlds(2)
@each(fraction=(1.0, 0.8))
def case_waves_are_stepped_while_others_travel(fraction):
    """The host waits for one wave's gradients at a time; weights leave before the next wave is stepped."""
    with parallel(Layout()):
        with mock.patch.object(cpu_offload, "WAVE", 1):  # each shard is one
            engine = engine_of(BF16, Layout(), {}, {}, **offloaded(fraction))
        engine.train(2)
        (wrapper,) = engine.wrappers
        on_host, late = wrapper._alto_on_host, []
        expected = [shard for group in wrapper.optimizer.param_groups for shard in group["params"] if shard in on_host]
        assert len(expected) >= 2
        wait, step, counts = wrapper._alto_copies.wait, wrapper.step_with_ready_grads, {}

        def watched_wait(wave):
            if devices.NAME == "pretend":
                late.append([one.wave for one in on_host.values() if one.gradient.isnan().all()])
            wait(wave)
            if wave >= 0:  # beside CPU ranks, what stays on the device comes before all waves
                seen.append(("wait", "cpu", [], *copies()))

        def watched_step():
            if devices.NAME != "pretend":
                return step()
            with pretend.counted() as counted:
                result = step()
            counts.update(counted)
            return result

        wrapper._alto_copies.wait, wrapper.step_with_ready_grads = watched_wait, watched_step
        with spied() as seen:
            engine.step(2)

        for phase in ("one", "two"):
            calls = [call for call in seen if call[0] == phase]
            of_host = [on_host.keys() >= set(call[2]) for call in calls]
            assert of_host == sorted(of_host), "the device's own shards come first"
            assert all(of_host) == (fraction == 1)
            host = [list(map(id, call[2])) for call in calls if on_host.keys() >= set(call[2])]
            assert host == [[id(shard)] for shard in expected]
        waited = [call[0] for call in seen if call[0] != "two" and on_host.keys() >= set(call[2])]
        assert waited == ["wait", "one"] * len(expected), "waves that the host does not step yet"
        if devices.NAME == "pretend":
            waves = list(range(len(expected)))
            assert late == [waves[wave:] for wave in waves], "a wave arrived before it was waited for"
            copied = [count for phase, device, _, count, _ in seen if (phase, device) == ("two", "cpu")]
            assert [count - copied[0] for count in copied] == waves, "weights did not leave at once"
            assert len({count for phase, *_, count in seen if phase == "two"}) == 1, "the host waited for phase two"
            counts.pop("read", None)  # by the reference, on the device
            # The table of norms goes there and the rates come back. The host waits for nothing else.
            beside = dict.fromkeys(("to host, not waiting", "event synchronize", "to device, not waiting"), len(waves))
            assert counts == {"to device": 1, "to host": 1, **beside}


@worlds(2)
def case_offloaded_gradients_that_are_not_finite():
    """They are on the device when the ranks agree on whether to step."""
    config = dataclasses.replace(alto_config(BF16, alto_skip_nonfinite=True), **offloaded(1.0))
    with parallel(Layout()):
        engine = Megatron(BF16, Layout(), optimizer=config).train(2)
        before = result(engine)

        def put():
            for _, p in engine.named_parameters():
                p.main_grad.fill_(torch.inf)

        engine.before_reduction = put
        updated, *_ = engine.step(2)
        assert not updated
        after = result(engine)
        assert all(torch.equal(after[name], value) for name, value in before.items() if name != "losses")
        with pytest.raises(ValueError, match="in host memory already; leave out --rl-offload"):
            engine.optimizer.restore_from_cpu()


@worlds(2)
def case_norm_and_zeros_of_offloaded_gradients():
    with parallel(Layout()):
        config = alto_config(BF16, log_num_zeros_in_grad=True)
        expected = Megatron(BF16, Layout(), optimizer=config).step(0)
        engine = Megatron(BF16, Layout(), optimizer=dataclasses.replace(config, **offloaded(0.5)))
        got = engine.step(0)
        assert got == expected, (got, expected)
        assert not any(p.grad is not None for w in engine.wrappers for p in w.get_parameters() if p.stride() == (0,))


@worlds(2)
def case_weights_that_are_loaded_into_the_model_reach_the_host():
    """As with ``--finetune``; under Megatron's own offload, Megatron-Bridge reports stale weights there."""

    def continued(**offload):
        engine = engine_of(BF16, Layout(), {}, {}, **offload).train(2)
        with torch.no_grad():
            for _, p in engine.named_parameters():
                p.mul_(0.5)
        engine.optimizer.reload_model_params()
        engine.step(2)
        return result(engine)

    with parallel(Layout()):
        expected, got = continued(), continued(**offloaded(1.0))
    for name, value in expected.items():
        assert devices.NAME == "cuda" or torch.equal(got[name], value), name


@worlds(2)
def case_diagnostics_of_offloaded_shards():
    """They read gradients before the waves do."""
    with parallel(Layout()):
        config = alto_config(BF16, alto_diagnostics_every=1)
        expected = diagnostics(Megatron(BF16, Layout(), optimizer=config).train(2).optimizer)
        with FEW:
            engine = Megatron(BF16, Layout(), optimizer=dataclasses.replace(config, **offloaded(1.0)))
        got = diagnostics(engine.train(2).optimizer)
        assert got.keys() == expected.keys()
        assert len(got) > 5
        for name, reading in expected.items():
            assert tuple(got[name]) == pytest.approx(tuple(reading), rel=1e-4), name


@worlds(2)
def case_flags_that_need_weights_on_the_device():
    class Args:
        optimizer_cpu_offload, log_params_norm = True, True

    with pytest.raises(ValueError, match="--log-params-norm reads the float32 weights on the GPU"):
        cpu_offload.check_arguments(Args)
