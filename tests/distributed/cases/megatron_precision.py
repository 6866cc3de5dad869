"""Megatron in bf16 and fp16: sharded and replicated master weights, and steps skipped for overflow.

All ranks see the same batch, so that averaging is exact whatever the order of summation, and float32 master weights
and states must be *bitwise* those of a reference that rounds at the same points: gradients in the model's precision,
summed over microbatches in float32, unscaled, clipped, and handed to the plain optimizer. Only the gradient's norm is
Megatron's own (its order of summation depends on the sharding), after it was compared with that of the reference.
"""

import torch
import torch.distributed as dist

from alto_distributed import ALTO
from tests.helpers.cases import each, worlds
from tests.helpers.megatron_gpt import (
    ALTO_OPTIONS,
    MICROBATCHES,
    Job,
    Layout,
    Megatron,
    OptimizerConfig,
    alto_config,
    alto_groups,
    build,
    everything,
    loss_of,
    microbatches,
    named_parameters,
    parallel,
    set_hyperparameters,
)

PRECISIONS = ("bfloat16", "float16")
STEPS = 6
#: Clipping, and options.
OPTIONS = {
    "one bucket": (1.0, {}),
    "hard clipping, buckets": (0.05, {"overlap": True, "bucket_size": 3000}),
    "hard clipping, replicated": (0.05, {"distributed": False}),
}
LAYOUTS = {"data parallel": Layout(), "tensor parallel": Layout(tensor=2)}
SCALE = 2.0**10


def settings(job):
    return alto_config(job, initial_loss_scale=SCALE, min_loss_scale=1.0, hysteresis=1, loss_scale_window=4)


class Reference:
    """One rank with the whole model in half precision, and plain ALTO on float32 copies."""

    def __init__(self, job, summed_in=torch.float32):
        (self.model,) = build(job)
        self.job, self.summed_in = job, summed_in
        self.params = {name: p for name, p in named_parameters([self.model]) if p.requires_grad}
        groups = alto_groups(self.model)
        self.masters = {name: p.detach().float().clone() for name, p in self.params.items()}
        for group in groups:
            group["params"] = [self.masters[group["name"]]]
        self.optimizer = ALTO(groups, layerwise=job.layerwise, **ALTO_OPTIONS)

    def gradients(self, step, scale):
        out = {name: torch.zeros_like(master, dtype=self.summed_in) for name, master in self.masters.items()}
        for batch in microbatches(step):
            losses, mean = loss_of(self.model, batch)
            (mean(losses) / MICROBATCHES * scale).backward()
            for name, p in self.params.items():
                out[name] += p.grad
                p.grad = None
        return {name: g.float() / scale for name, g in out.items()}

    def step(self, step, scale, norm):
        """``norm`` is what Megatron found, to which this one's must be close."""
        gradients = self.gradients(step, scale)
        own = torch.stack([g.double().norm() for g in gradients.values()]).norm().item()
        assert abs(own - norm) <= 1e-6 * own
        coefficient = min(self.job.clip / (norm + 1e-6), 1.0) if self.job.clip else 1.0
        for name, master in self.masters.items():
            master.grad = gradients[name] * coefficient
        set_hyperparameters(self.job, self.optimizer, step)
        self.optimizer.step()
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(self.masters[name])


def assert_bitwise(got, expected, what):
    assert got.keys() == expected.keys()
    for name, value in got.items():
        assert torch.equal(value, expected[name]), (what, name, (value - expected[name]).abs().max())


def state(key):
    return lambda inner, master: inner.state[master][key]


def assert_equals(engine, reference, what):
    assert_bitwise(engine.gathered(), reference.masters, what)
    for key in ALTO.state_keys:
        expected = {name: reference.optimizer.state[master][key] for name, master in reference.masters.items()}
        assert_bitwise(engine.gathered(state(key)), expected, (what, key))
    engine.synchronize()
    for name, p in engine.named_parameters():
        assert torch.equal(p, reference.params[name]), (what, name)


@worlds(2)
@each(OPTIONS, precision=PRECISIONS)
def case_bitwise_the_reference_that_rounds_at_the_same_points(setting, precision):
    clip, options = setting
    job = Job(precision=getattr(torch, precision), clip=clip, scheduled=True, steps=STEPS)
    with parallel(Layout()):
        engine = Megatron(job, Layout(), optimizer=settings(job), same=True, **options)
        if engine.distributed:
            engine.assert_straddles()
        plain = Reference(job)
        for step in range(job.steps):
            scale = engine.optimizer.get_loss_scale().item()
            updated, norm, _ = engine.step(step)
            assert updated
            plain.step(step, scale, norm)
        assert_equals(engine, plain, "at the end")
        assert (engine.optimizer.get_loss_scale() > SCALE) == (precision == "float16")


# -- Megatron's precision-aware optimizer ----------------------------------------------------------------

AWARE = {"use_precision_aware_optimizer": True}


@worlds(2)
@each({"one bucket": {}, "buckets": {"overlap": True, "bucket_size": 3000}})
def case_gradients_summed_in_bf16_are_clipped_in_float32(setting):
    """--main-grads-dtype bf16: their only rounding is that of the sums."""
    job = Job(precision=torch.bfloat16, clip=0.05, steps=STEPS)
    config = alto_config(job, **AWARE, main_grads_dtype=torch.bfloat16)
    with parallel(Layout()):
        engine = Megatron(job, Layout(), optimizer=config, same=True, **setting)
        engine.assert_straddles()
        assert {p.main_grad.dtype for _, p in engine.named_parameters()} == {torch.bfloat16}
        plain = Reference(job, summed_in=torch.bfloat16)
        for step in range(job.steps):
            updated, norm, _ = engine.step(step)
            assert updated
            plain.step(step, 1.0, norm)
        assert_equals(engine, plain, "at the end")


@worlds(2)
@each(distributed=(True, False))
def case_megatrons_name_for_a_first_moment_in_bf16(distributed):
    """--exp-avg-dtype bf16 is --alto-exp-avg-dtype bfloat16; the plain config of a client has the first alone."""
    job = Job(precision=torch.bfloat16, steps=STEPS)
    megatrons = {**AWARE, "exp_avg_dtype": torch.bfloat16}
    ours = alto_config(job, alto_exp_avg_dtype="bfloat16")
    shared = {"lr": ours.lr, "min_lr": ours.min_lr, "weight_decay": ours.weight_decay, "clip_grad": ours.clip_grad}
    configs = (ours, alto_config(job, **megatrons), OptimizerConfig(optimizer="alto", **shared, **megatrons))
    with parallel(Layout()):
        engines = [Megatron(job, Layout(), optimizer=config, distributed=distributed).train() for config in configs]
        expected, *others = engines
        for engine in others:
            for wrapper in engine.wrappers:
                assert wrapper.config.use_precision_aware_optimizer
                held = wrapper.optimizer.state.values()
                assert {(s["exp_avg"].dtype, s["grad_ema"].dtype) for s in held} == {(torch.bfloat16, torch.float32)}
            assert_bitwise(engine.gathered(), expected.gathered(), "weights")
            for key in ALTO.state_keys:
                assert_bitwise(engine.gathered(state(key)), expected.gathered(state(key)), key)


@worlds(2)
@each(LAYOUTS, precision=PRECISIONS)
def case_sharded_is_bitwise_replicated(setting, precision):
    """Each rank with its own sequences; on two ranks, where sums have but one order."""
    job = Job(precision=getattr(torch, precision), clip=0.0, steps=STEPS)
    with parallel(setting):
        sharded, replicated = (
            Megatron(job, setting, optimizer=settings(job), distributed=distributed).train()
            for distributed in (True, False)
        )
        sharded.assert_straddles()
        assert_bitwise(sharded.gathered(), replicated.gathered(), "weights")
        for key in ALTO.state_keys:
            assert_bitwise(sharded.gathered(state(key)), replicated.gathered(state(key)), key)


# -- overflow ------------------------------------------------------------------------------------------


def put_inf(engine):
    """Into one gradient of the last rank, before gradients are reduced."""

    def put():
        if dist.get_rank() == dist.get_world_size() - 1:
            _, p = next(engine.named_parameters())
            p.main_grad.view(-1)[0] = torch.inf

    engine.before_reduction = put


@worlds(2)
@each(distributed=(True, False))
def case_an_overflow_changes_nothing_but_the_scale(distributed):
    check_overflow(Layout(), distributed)


@worlds(2, exhaustive=[4])
@each(distributed=(True, False))
def case_an_overflow_that_other_tensor_parallel_ranks_do_not_see(distributed):
    """On four ranks, TP by DP: the ranks that see the inf are fewer than those that must skip."""
    check_overflow(Layout(tensor=2), distributed)


def check_overflow(layout, distributed):
    job = Job(precision=torch.float16, steps=STEPS)
    with parallel(layout):
        engine = Megatron(job, layout, optimizer=settings(job), distributed=distributed, same=True)
        plain = Reference(job) if layout.tensor == 1 else None
        for step in range(job.steps):
            scale = engine.optimizer.get_loss_scale().item()
            if step == 3:
                before = everything(engine)
                put_inf(engine)
                updated, norm, _ = engine.step(step)
                engine.before_reduction = lambda: None
                assert not updated
                after = everything(engine)
                assert len(before) == len(after)
                assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
                assert engine.optimizer.get_loss_scale().item() == scale / 2
                continue
            updated, norm, _ = engine.step(step)
            assert updated
            if plain:
                plain.step(step, scale, norm)
        if plain:
            assert_equals(engine, plain, (layout, distributed))
        assert {group["step"] for w in engine.wrappers for group in w.optimizer.param_groups} == {job.steps - 1}
        assert all(x.isfinite().all() for x in everything(engine))
