"""What Megatron and ALTO do to the host while a step runs. On tests/helpers/pretend."""

import contextlib

import torch
import torch.distributed as dist

from tests.helpers import devices, pretend
from tests.helpers.cases import each, worlds
from tests.helpers.megatron_gpt import Job, Layout, Megatron, alto_config, parallel

STEADY = 2  # steps until everything is allocated
#: Too short for the buffer to be cut within it: one rank holds all of it.
ONE_VECTOR = Job(trained="final_layernorm.weight", layerwise="all", steps=5)
BF16 = Job(precision=torch.bfloat16, steps=5)

LAYOUTS = {
    "distributed optimizer": (BF16, Layout(), {}),
    "float32": (Job(steps=5), Layout(), {}),
    "a rank without a shard": (ONE_VECTOR, Layout(), {}),
    "overlap": (BF16, Layout(), {"overlap": True, "bucket_size": 3000}),
    "replicated": (BF16, Layout(), {"distributed": False}),
    "tensor parallel": (BF16, Layout(tensor=2), {}),
    "pipeline": (BF16, Layout(pipeline=2), {}),
    "experts": (Job(experts=4, steps=5), Layout(expert=2), {}),
}


@contextlib.contextmanager
def steps_watched(engine):
    """Counts of what the host does in each ``ALTO.step()``; nothing may be done in the steady state."""
    seen, steps = [], {wrapper.optimizer: wrapper.optimizer.step for wrapper in engine.wrappers}

    def watched(step):
        def run(*args, **options):
            calls = sum(1 for made, _ in seen if made is step)
            with pretend.counted() as counts, pretend.no(pretend.HOST if calls >= STEADY else ()):
                result = step(*args, **options)
            seen.append((step, counts))
            return result

        return run

    for inner, step in steps.items():
        inner.step = watched(step)
    yield seen
    for inner in steps:
        del inner.step


@worlds(2)
@each(LAYOUTS)
def case_nothing_is_read_or_copied_in_the_steady_state_under_megatron(setting):
    job, layout, options = setting
    with parallel(layout):
        engine = Megatron(job, layout, **options)
        with steps_watched(engine) as seen:
            engine.train()
        assert len(seen) == job.steps * len(engine.wrappers)
        if job is ONE_VECTOR:
            held = sum(master.numel() for _, _, master in engine.shards(engine.wrappers[0]))
            everywhere = [None, None]
            dist.all_gather_object(everywhere, held)
            assert sorted(everywhere) == [0, 32]
        for inner in engine.wrappers:
            last = [counts for step, counts in seen if step.__self__ is inner.optimizer][STEADY:]
            assert len(last) == job.steps - STEADY
            assert not any(last), last


@worlds(2)
def case_a_rank_without_gradients_makes_its_flag_on_the_device():
    """It made it on the host, and copied it to the device and back at each step."""
    with parallel(Layout()):
        engine = Megatron(ONE_VECTOR, Layout(), optimizer=alto_config(ONE_VECTOR, alto_skip_nonfinite=True))
        (wrapper,) = engine.wrappers
        counted = []

        def watched(prepare=wrapper.prepare_grads):
            with pretend.counted() as counts:
                found = prepare()
            counted.append(counts)
            return found

        wrapper.prepare_grads = watched
        engine.train()
        assert len(counted) == ONE_VECTOR.steps
        # One value is read: the flag.
        assert all(counts == {"read": 1} for counts in counted), (dist.get_rank(), counted)
        assert {p.device for _, p in engine.named_parameters()} == {devices.here()}


AWAY = {"bf16": (BF16, True), "float32": (Job(steps=5), True), "bf16, replicated": (BF16, False)}


@worlds(2)
@each(AWAY)
def case_states_that_reinforcement_learning_moves_to_the_host(setting):
    """By Megatron's own offload_to_cpu() and restore_from_cpu(), between two steps."""
    job, distributed = setting
    with parallel(Layout()):
        expected = Megatron(job, Layout(), distributed=distributed).train()
        engine = Megatron(job, Layout(), distributed=distributed).train(STEADY)
        inner = engine.wrappers[0].optimizer
        held = [*inner.state, *(tensor for state in inner.state.values() for tensor in state.values())]
        assert any(tensor.device == devices.here() for tensor in held)
        engine.optimizer.offload_to_cpu()
        held = [*inner.state, *(tensor for state in inner.state.values() for tensor in state.values())]
        assert all(tensor.is_cpu for tensor in held)
        engine.optimizer.restore_from_cpu()
        with steps_watched(engine) as seen:
            for step in range(STEADY, job.steps):
                engine.step(step)
        assert not any(counts for _, counts in seen[STEADY:]), seen
        weights = dict(expected.named_parameters())
        for name, p in engine.named_parameters():
            assert torch.equal(p, weights[name]), name
        for key in ("exp_avg", "exp_avg_sq", "grad_ema"):
            got, wanted = (one.gathered(lambda inner, p, key=key: inner.state[p][key]) for one in (engine, expected))
            for name, value in wanted.items():
                assert torch.equal(got[name], value), (name, key)
        assert {int(state["step"]) for state in inner.state.values()} == {job.steps}
