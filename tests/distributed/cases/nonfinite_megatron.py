"""Megatron with ``alto_skip_nonfinite``: a NaN in one rank's gradient, in bf16, fp16 and float32, sharded or not.

Nothing changes on any rank, and the run ends bit for bit where one does that never had the step.
"""

import torch
import torch.distributed as dist

from tests.helpers.cases import each, worlds
from tests.helpers.megatron_gpt import Job, Layout, Megatron, alto_config, everything, parallel

STEPS = 5
BAD = {1: 0, 3: -1}  # step -> which parameter: of the first, and the last of all, which is undecayed


def put_nan(engine, which):
    """Into one gradient of the last rank, before gradients are reduced."""

    def put():
        if dist.get_rank() == dist.get_world_size() - 1:
            _, p = list(engine.named_parameters())[which]
            p.main_grad.view(-1)[-1] = torch.nan

    engine.before_reduction = put


def raw(tensors):
    return [t.reshape(-1).view(torch.uint8) for t in tensors]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(raw(one), raw(other), strict=True))


def train(engine, bad):
    for step in range(STEPS):
        if step in bad and bad[step] is None:
            continue  # the run that never had it
        if step in bad:
            put_nan(engine, bad[step])
        before = everything(engine) if step else None
        updated, norm, _ = engine.step(step)
        engine.before_reduction = lambda: None
        assert updated == (step not in bad), step
        if step in bad:
            assert norm is None
            assert same(before, everything(engine)), step
    engine.synchronize()
    return everything(engine)


def check(what, job, layout, **options):
    with parallel(layout):
        # A scale that stays: a dynamic one is another after a skipped step, and with it the last digits of gradients.
        scale = {"loss_scale": 1024.0} if job.precision == torch.float16 else {}
        skipping = alto_config(job, alto_skip_nonfinite=True, **scale)
        got = train(Megatron(job, layout, optimizer=skipping, **options), BAD)
        never = train(Megatron(job, layout, optimizer=alto_config(job, **scale), **options), dict.fromkeys(BAD))
        assert all(t.isfinite().all() for t in got), what
        assert same(got, never), (what, "not the run that never had the steps")


LAYOUTS = {
    "bf16": (torch.bfloat16, Layout()),
    "bf16, tensor parallel": (torch.bfloat16, Layout(tensor=2)),
    "bf16, pipeline": (torch.bfloat16, Layout(pipeline=2)),
    "fp32": (torch.float32, Layout()),
    "fp16": (torch.float16, Layout()),
}
MORE = {
    "fp32, tensor parallel": (torch.float32, Layout(tensor=2)),
    "fp32, pipeline": (torch.float32, Layout(pipeline=2)),
    "fp16, tensor parallel": (torch.float16, Layout(tensor=2)),
    "fp16, pipeline": (torch.float16, Layout(pipeline=2)),
}


@worlds(2)
@each(LAYOUTS, exhaustive=MORE, distributed=(True, False))
def case_a_nan_on_one_rank_changes_nothing_under_megatron(label, setting, distributed):
    """With tensor and pipeline parallelism the NaN is in a part of the model that the other rank does not have."""
    precision, layout = setting
    check(label, Job(precision=precision, steps=STEPS), layout, distributed=distributed)


EXPERTS = {"fp32": torch.float32}
MORE_EXPERTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@worlds(2)
@each(EXPERTS, exhaustive=MORE_EXPERTS)
def case_dense_parameters_and_experts_skip_together(label, setting):
    """Two wrappers, each with groups of its own: the NaN is in an expert of the last rank."""
    job, layout = Job(experts=2, steps=STEPS, precision=setting), Layout(expert=2)
    check(f"experts, {label}", job, layout)


@worlds(2)
def case_without_the_setting_a_nan_gets_in_under_megatron():
    """The negative control: Megatron steps in bf16 whatever the gradients are."""
    with parallel(Layout()):
        engine = Megatron(Job(precision=torch.bfloat16, steps=STEPS), Layout())
        put_nan(engine, 0)
        updated, *_ = engine.step(0)
        assert updated
        assert any(t.isnan().any() for t in everything(engine))
