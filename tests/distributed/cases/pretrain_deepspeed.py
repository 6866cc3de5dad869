"""The DeepSpeed engine of the pretraining program, with a tiny GPT-2: it equals one process, repeats itself bit for
bit, and goes on from its checkpoints as if it had never stopped.

World 1 loads what world 2 saved.
"""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import ds_to_universal

from alto_distributed.errors import Diverged
from alto_distributed.pretrain import optimizers
from alto_distributed.pretrain.batch_size import batch_size
from alto_distributed.pretrain.checkpoint.manager import Checkpoints
from alto_distributed.pretrain.config.settings import parse
from alto_distributed.pretrain.model import build_model, inputs_of, next_token_loss
from tests.helpers import devices
from tests.helpers.cases import after, each, worlds
from tests.helpers.pretrain_deepspeed import (
    BATCH,
    VOCABULARY,
    advance,
    assert_same,
    engine_of,
    mine,
    rate,
    run_of,
    tokens_of,
    weights,
)

STAGES = (1, 2, 3)


def unsharded(run, steps, sizes=None, then=(None, None), parts=1):
    """The same training in this process alone, on its device; the optimizers themselves are tested elsewhere.

    Args:
        then: a step from which another run's clipping and decay hold, and that run.
        parts: of a batch, whose gradients are added up as those of micro-batches and ranks are.
    """
    model = build_model(run).to(devices.here())
    optimizer = optimizers.build_optimizer(run, optimizers.build_groups(run, model))
    results = []
    for step in range(steps):
        if step == then[0]:
            run = then[1]
            for group in optimizer.param_groups:
                group["weight_decay"] = run.optimizer.weight_decay if group["weight_decay"] else 0.0
        tokens = tokens_of(step, sizes[step] if sizes else BATCH).to(devices.here())
        optimizer.zero_grad()
        loss = torch.zeros((), device=devices.here())
        for part in tokens.chunk(parts):
            share = next_token_loss(model(**inputs_of(part)).logits, part) / parts
            share.backward()
            loss += share.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run.training.clip)
        for group in optimizer.param_groups:
            group["lr"] = rate(run, step)
        optimizer.step()
        results.append((loss.item(), norm.item()))
    return results, {name: p.detach().cpu() for name, p in model.named_parameters()}


def gap(got, expected, start):
    """How far apart two results of training are, against how far training went.

    The biases of keys are left out: softmax does not see them, their gradient is rounding alone, and some of these
    optimizers bring that to the size of any other.
    """
    names = [name for name in expected if not name.endswith("c_attn.bias")]
    apart = sum((got[name] - expected[name]).square().sum() for name in names)
    went = sum((expected[name] - start[name]).square().sum() for name in names)
    assert got.keys() == expected.keys()
    assert went > 0
    return (apart / went).sqrt().item()


# -- two ranks -------------------------------------------------------------------------------------------


@worlds(2)
def case_the_device_is_set_before_the_first_collective():
    """With NCCL the first all-gather ran on cuda:0 on every rank, and the run was dead."""
    seen = []

    def noting(what, function):
        return lambda *args, **kwargs: (seen.append((what, *args[:1])), function(*args, **kwargs))[1]

    with pytest.MonkeyPatch.context() as patch:
        accelerator = get_accelerator()
        patch.setattr(accelerator, "set_device", noting("set_device", accelerator.set_device))
        for name in ("all_gather", "all_reduce", "broadcast", "barrier", "all_gather_object"):
            patch.setattr(dist, name, noting("collective", getattr(dist, name)))
        with engine_of(run_of()):
            pass
    assert seen[0] == ("set_device", devices.here().index if devices.NAME != "cpu" else dist.get_rank())
    assert "collective" in {what for what, *_ in seen}


#: Stage and precision: every stage in one, and both in turn.
REPEATED = {"stage 1, fp32": (1, "fp32"), "stage 2, bf16": (2, "bf16"), "stage 3, fp32": (3, "fp32")}
MORE_REPEATED = {"stage 1, bf16": (1, "bf16"), "stage 2, fp32": (2, "fp32"), "stage 3, bf16": (3, "bf16")}


@worlds(2)
@each(REPEATED, exhaustive=MORE_REPEATED)
def case_repeats_and_resumes_bit_for_bit(directory, label, setting):
    """With dropout. The second run also evaluates on its way, the third goes on from the first one's checkpoint."""
    stage, precision = setting
    run = run_of(stage, precision=precision, dropout=0.1)
    with engine_of(run) as engine:
        first = advance(engine, run, 0, 3, repeated=True)
        engine.save(directory / label)
        at_save = weights(engine)
        first += advance(engine, run, 3, 8, repeated=True)
        at_end = weights(engine)
    losses = [loss for loss, _ in first]
    assert abs(losses[0] - math.log(VOCABULARY)) < 0.2, (label, losses)
    assert losses[-1] < losses[0] - 0.15, (label, losses)
    with engine_of(run) as engine:
        again = []
        for step in range(8):
            again += advance(engine, run, step, step + 1, repeated=True)
            engine.evaluate(mine(tokens_of(50), 4))
        assert again == first, label
        assert_same(f"{label}, again", weights(engine), at_end)
    with engine_of(run) as engine:
        engine.load(directory / label, 2)
        assert_same(f"{label}, loaded", weights(engine), at_save)
        assert advance(engine, run, 3, 8, repeated=True) == first[3:], label
        assert_same(f"{label}, resumed", weights(engine), at_end)


@worlds(2)
@each(stage=(2, 3))
def case_recomputation_changes_no_bit(stage):
    """With dropout: what is computed again must draw the same masks."""
    results = []
    for recompute in (False, True):
        run = run_of(stage, dropout=0.1)
        run = parse({**run.as_dict(), "training": {**run.as_dict()["training"], "recompute": recompute}})
        with engine_of(run) as engine:
            modules = engine._engine.module.modules()
            assert recompute == any(getattr(module, "gradient_checkpointing", False) for module in modules)
            results.append((advance(engine, run, 0, 3), weights(engine)))
    assert results[0][0] == results[1][0], stage
    assert_same(f"stage {stage}", results[1][1], results[0][1])


@worlds(2)
@each(dropout=(0.3, 0.0))
def case_dropout_differs_between_steps_and_ranks(dropout):
    """The same samples everywhere, and a rate of 0: what differs are the masks."""
    run = run_of(2, dropout=dropout, micro=8)
    tokens = [tokens_of(0)[:8]]
    with engine_of(run) as engine:
        seen = [next_loss(engine, tokens) for _ in range(2)]
    everywhere = [None, None]
    dist.all_gather_object(everywhere, seen)
    assert len({loss for losses in everywhere for loss in losses}) == (4 if dropout else 1), everywhere


def next_loss(engine, tokens):
    """This rank's own loss in the step it takes."""
    losses = []
    original = engine._loss
    engine._loss = lambda batch: losses.append(original(batch)) or losses[-1]
    engine.train(tokens, 0.0)
    engine._loss = original
    return losses[0].item()


@worlds(2)
@each(stage=(0, 1, 2, 3))
def case_equals_one_process_however_it_accumulates(stage):
    steps = 4
    expected, end = unsharded(run_of(), steps)
    start = {name: p.detach() for name, p in build_model(run_of()).named_parameters()}
    for micro in (8, 4) if stage else (4,):
        run = run_of(stage, micro=micro, diagnostics=2)
        with engine_of(run) as engine:
            assert_same("initial weights", weights(engine), start)
            got = advance(engine, run, 0, steps)
            far = gap(weights(engine), end, start)
            assert engine.diagnostics().keys() == start.keys()
        assert [loss for loss, _ in got] == pytest.approx([loss for loss, _ in expected], abs=1e-5)
        if stage:
            assert [norm for _, norm in got] == pytest.approx([norm for _, norm in expected], rel=1e-4)
        assert far < 1e-4, (stage, micro, far)


@worlds(2)
@each({"stage 0": 0, "stage 2": 2, "stage 3": 3}, exhaustive={"stage 1": 1})
def case_a_batch_that_grows_equals_one_process(directory, setting):
    """From one micro-batch to two and three, which DeepSpeed by itself would count wrong; resumed on the way."""
    stage, ramp = setting, {"start": 8, "step": 8, "every": 2}
    settings = run_of(stage).as_dict()
    run = parse({**settings, "training": {**settings["training"], "global_batch": 24, "batch_ramp": ramp}})
    sizes = [batch_size(run.training, step) for step in range(6)]
    assert sizes == [8, 8, 16, 16, 24, 24]
    expected, end = unsharded(run, 6, sizes)
    start = {name: p.detach() for name, p in build_model(run).named_parameters()}

    def go_on(engine, begin, stop):
        return [
            engine.train(mine(tokens_of(step, sizes[step]), 4), rate(run, step)).loss for step in range(begin, stop)
        ]

    with engine_of(run) as engine:
        losses = go_on(engine, 0, 3)
        engine.save(directory / f"ramp {stage}")
        losses += go_on(engine, 3, 6)
        last = weights(engine)
    assert losses == pytest.approx([loss for loss, _ in expected], abs=1e-5)
    far = gap(last, end, start)
    assert far < 1e-4, far
    with engine_of(run) as engine:
        engine.load(directory / f"ramp {stage}", 2)
        assert go_on(engine, 3, 6) == losses[3:]
        assert_same("resumed", weights(engine), last)


@worlds(2)
def case_a_run_goes_on_with_changes(directory):
    """Those that are named, which take effect, and no others."""
    run, steps = run_of(2), 4
    settings = run.as_dict()
    optimizer = {**settings["optimizer"], "weight_decay": 3.0}
    other = parse({**settings, "optimizer": optimizer, "training": {**settings["training"], "clip": 0.02}})
    expected, end = unsharded(run, steps, then=(2, other))
    start = {name: p.detach() for name, p in build_model(run).named_parameters()}
    saved = directory / "changing" / "checkpoints"
    with engine_of(run) as engine:
        got = advance(engine, run, 0, 2)
        Checkpoints(saved, run).save(engine, 2)
    with engine_of(other) as engine:
        for named, message in (
            ([], "clip was 1.0, is 0.02"),
            (["training.clip"], "weight_decay was 0.1, is 3.0. Go on"),
        ):
            with pytest.raises(ValueError, match=message):
                Checkpoints(saved, other, changes=named).load(engine, Checkpoints(saved, other).newest())
        named = ["training.clip", "optimizer.weight_decay"]
        for _ in range(2):  # the second is as after a crash
            Checkpoints(saved, other, changes=named).load(engine, Checkpoints(saved, other).newest())
        got += advance(engine, other, 2, steps)
        far = gap(weights(engine), end, start)
    assert [loss for loss, _ in got] == pytest.approx([loss for loss, _ in expected], abs=1e-5)
    assert far < 1e-4, far
    (line,) = (saved.parent / "history.jsonl").read_text().splitlines()
    changes = {"optimizer.weight_decay": [0.1, 3.0], "training.clip": [1.0, 0.02]}
    assert json.loads(line) == {"time": json.loads(line)["time"], "step": 2, "changes": changes}


#: All but ALTO, which the case above has.
OTHERS = ("lamb", "adamw", "adam", "lion", "adabelief", "ademamix")


@worlds(2)
@each({"stage 3": (3, "fp32")}, exhaustive={"stage 1, bf16": (1, "bf16"), "stage 2": (2, "fp32")}, name=OTHERS)
def case_every_optimizer_equals_one_process(setting, name):
    """Also those that are only elementwise: a shard is a shard. Stage 3 steps each group by itself."""
    assert {*OTHERS, *WHOLE, "alto"} == {*optimizers.NAMES}
    steps, (stage, precision) = 4, setting
    start = {name: p.detach() for name, p in build_model(run_of()).named_parameters()}
    run = run_of(stage, name=name, precision=precision)
    with engine_of(run) as engine:
        advance(engine, run, 0, steps)
        if precision == "fp32":
            _, end = unsharded(run_of(name=name), steps)
            far = gap(weights(engine), end, start)
            assert far < 1e-3, far
        else:
            assert all(p.isfinite().all() for p in weights(engine).values())
        assert bool(engine.diagnostics()) is False  # nobody asked


#: Not on shards: without ZeRO, in float32.
WHOLE = ("muon", "mars", "soap")


@worlds(2)
@each(name=WHOLE)
def case_optimizers_of_whole_parameters_equal_one_process(directory, name):
    """Muon and SOAP make large differences of small ones, so one process adds gradients up in the ranks' order."""
    run, steps = run_of(0, name=name, micro=8), 4
    run = replace(run, training=replace(run.training, clip=1e6))  # norms are added up in another order
    expected, end = unsharded(run, steps, parts=2)
    start = {name: p.detach() for name, p in build_model(run).named_parameters()}
    with engine_of(run) as engine:
        got = advance(engine, run, 0, 2)
        engine.save(directory / name)
        got += advance(engine, run, 2, steps)
        last = weights(engine)
    assert [loss for loss, _ in got] == pytest.approx([loss for loss, _ in expected], abs=1e-5)
    far = gap(last, end, start)
    assert far < 1e-3, far
    with engine_of(run) as engine:
        engine.load(directory / name, 2)
        assert [loss for loss, _ in advance(engine, run, 2, steps)] == [loss for loss, _ in got[2:]]
        assert_same("resumed", weights(engine), last)


RATES = {
    "stage 3, bf16": (3, "bf16"),
    "stage 1, bf16": (1, "bf16"),
    "stage 1, fp32": (1, "fp32"),
    "stage 2, fp32": (2, "fp32"),
}


@worlds(2)
@each(RATES)
def case_the_rate_given_is_the_rate_used(setting):
    stage, precision = setting
    run = run_of(stage, precision=precision)
    with engine_of(run) as engine:
        advance(engine, run, 0, 1)
        before, loss = weights(engine), engine.evaluate(mine(tokens_of(9), 4))
        engine.train(mine(tokens_of(1), 4), 0.0)
        assert_same(f"stage {stage}, rate 0", weights(engine), before)
        assert engine.evaluate(mine(tokens_of(9), 4)) == loss
        engine.train(mine(tokens_of(2), 4), 1e-3)
        assert any(not torch.equal(p, before[name]) for name, p in weights(engine).items())


@worlds(2)
@each(stage=STAGES)
def case_evaluation_does_not_depend_on_micro_batches(stage):
    run = run_of(dropout=0.5)
    tokens = tokens_of(3, samples=24)
    model = build_model(run).eval()
    with torch.no_grad():
        expected = next_token_loss(model(**inputs_of(tokens)).logits, tokens).item()
    with engine_of(run_of(stage, dropout=0.5)) as engine:
        for micro in (1, 4, 5, 12):  # 5, 5 and 2
            assert engine.evaluate(mine(tokens, micro)) == pytest.approx(expected, abs=1e-6), (stage, micro)
        assert engine._engine.module.training


@worlds(2)
def case_an_overflow_changes_nothing(directory):
    path = directory / "fp16.json"
    if dist.get_rank() == 0:
        path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "fp16": {"initial_scale_power": 26}}))
    dist.barrier()
    run = run_of(2, precision="fp16", json_file=path)
    with engine_of(run) as engine:
        before, skipped = weights(engine), 0
        while (result := engine.train(mine(tokens_of(0), 4), 0.01)).skipped:
            skipped += 1
            assert_same("overflow", weights(engine), before)
            assert math.isfinite(result.loss)
        assert 0 < skipped < 20
        assert result.grad_norm > 0
        assert any(not torch.equal(p, before[name]) for name, p in weights(engine).items())


@worlds(2)
def case_a_loss_scale_that_cannot_fall_is_a_divergence(directory):
    """DeepSpeed raises an Exception of no type of its own, which was a traceback for each rank."""
    path = directory / "lowest.json"
    if dist.get_rank() == 0:
        scale = {"initial_scale_power": 26, "min_loss_scale": 2**26}
        path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "fp16": scale}))
    dist.barrier()
    with engine_of(run_of(2, precision="fp16", json_file=path)) as engine:
        assert engine.train(mine(tokens_of(0), 4), 0.01).skipped  # it waits for a second overflow
        with pytest.raises(Diverged, match="gradients overflow fp16 at the lowest loss scale: lower optimizer.lr"):
            engine.train(mine(tokens_of(0), 4), 0.01)


@worlds(2)
def case_refusals(directory):
    """All ranks raise: nobody is left waiting."""
    with engine_of(run_of(2)) as engine:
        with pytest.raises(ValueError, match="1 micro-batches, and a step of this run has 2 on each rank"):
            engine.train(mine(tokens_of(0), 4)[:1], 0.1)
        with pytest.raises(ValueError, match="holds no finished checkpoint of the DeepSpeed engine"):
            engine.load(directory / "nothing", 2)
        engine.save(directory / "refused")
    others = {
        "zero_stage 2, and this run has 1": run_of(1),
        "precision fp32, and this run has bf16": run_of(2, precision="bf16"),
        "optimizer alto, and this run has adamw": run_of(2, name="adamw"),
    }
    for message, run in others.items():
        with engine_of(run) as engine, pytest.raises(ValueError, match=message):
            engine.load(directory / "refused", 2)


@worlds(2)
@each(stage=STAGES)
def case_settings_of_the_run_win_over_the_checkpoint(directory, stage):
    """DeepSpeed takes hyperparameters and the clipping of the checkpoint."""
    folder = directory / f"settings {stage}"
    with engine_of(run_of(stage)) as engine:
        advance(engine, run_of(stage), 0, 1)
        engine.save(folder)
    settings = run_of(stage, alpha=-3.0).as_dict()
    settings["training"]["clip"], settings["optimizer"]["weight_decay"] = 0.25, 0.2
    with engine_of(parse(settings)) as engine:
        engine.load(folder, 2)
        groups = engine._engine.basic_optimizer.param_groups
        assert [(group["weight_decay"], group["alpha"]) for group in groups] == [(0.2, -3.0), (0.0, -3.0)]
        assert engine._engine.optimizer.clip_grad == 0.25


# -- another number of ranks -----------------------------------------------------------------------------

BEFORE, AFTER = 2, 3
#: Stage, precision and optimizer.
MOVED = {
    "stage 1": (1, "fp32", "alto"),
    "stage 2": (2, "fp32", "alto"),
    "stage 3": (3, "fp32", "alto"),
    "stage 2, adamw": (2, "fp32", "adamw"),
    "stage 3, lamb": (3, "fp32", "lamb"),
    "stage 1, bf16": (1, "bf16", "alto"),
    "stage 0, adam": (0, "fp32", "adam"),
}
MORE_MOVED = {"stage 1, adamw": (1, "fp32", "adamw"), "stage 3, adamw": (3, "fp32", "adamw")}
LION = {"stage 1, lion": (1, "fp32", "lion")}


@worlds(2)
@each({**MOVED, **LION}, exhaustive=MORE_MOVED)
def case_save_for_another_world(directory, label, setting):
    stage, precision, name = setting
    run = run_of(stage, precision=precision, name=name)
    folder = directory / f"moved, {label}"
    with engine_of(run) as engine:
        advance(engine, run, 0, BEFORE)
        engine.save(folder)
        results = advance(engine, run, BEFORE, BEFORE + AFTER)
        end = weights(engine)
    if dist.get_rank() == 0:
        torch.save((results, end), folder / "results.pt")
    dist.barrier()


@worlds(1)
@each(MOVED, exhaustive=MORE_MOVED)
@after("case_save_for_another_world", world=2)
def case_another_world_goes_on(directory, label, setting):
    stage, precision, name = setting
    run = run_of(stage, precision=precision, name=name)
    folder = directory / f"moved, {label}"
    expected, end = torch.load(folder / "results.pt")
    start = {n: p.detach() for n, p in build_model(run).named_parameters()}
    unfinished = folder / "universal.part" / "zero" / "left by a conversion that was killed"
    unfinished.mkdir(parents=True)
    for _ in range(2 if stage == 2 else 1):  # the second finds the first one's conversion
        with engine_of(run) as engine:
            engine.load(folder, 2)
            got = advance(engine, run, BEFORE, BEFORE + AFTER)
            apart = [abs(a - b) for (a, _), (b, _) in zip(got, expected, strict=True)]
            assert max(apart) < (1e-2 if precision == "bf16" else 1e-5), apart
            far = gap(weights(engine), end, start)
            assert far < (0.05 if precision == "bf16" else 1e-3), far
    assert stage == 0 or (folder / "universal").is_dir()


@worlds(2)
@after("case_save_for_another_world", "stage 1")
def case_a_conversion_that_fails_ends_all_ranks(directory):
    """Rank 0 converts, and the other one waited for it."""
    folder, run = directory / "fails to move", run_of(1)
    if dist.get_rank() == 0:
        shutil.copytree(directory / "moved, stage 1", folder, ignore=shutil.ignore_patterns("universal*"))
    dist.barrier()

    def full(*_):
        raise OSError(28, "No space left on device")

    for failure, kind, message in (
        (full, OSError, "No space left on device"),
        (lambda *_: 1 / 0, ValueError, "cannot be converted .*division by zero"),
    ):
        with pytest.MonkeyPatch.context() as patch, engine_of(run) as engine:
            patch.setattr(ds_to_universal, "main", failure)
            before = weights(engine)
            with pytest.raises(kind, match=message):
                engine.load(folder, 4)
            assert all(torch.equal(p, before[name]) for name, p in weights(engine).items())
    assert not (folder / "universal").exists()


@worlds(1)
@after("case_save_for_another_world", "stage 1, lion", world=2)
def case_lion_stays_at_its_world_size(directory):
    with engine_of(run_of(1, name="lion")) as engine, pytest.raises(ValueError, match="do not hold the states of lion"):
        engine.load(directory / "moved, stage 1, lion", 2)


@worlds(1)
@each(name=("adamw", "adam", "lion", "alto"))
def case_stage_0_in_bf16_starts_with_the_models_weights(name):
    """DeepSpeed's wrapper there steps once when it is built: no weight may be decayed by it, no state begun."""
    with engine_of(run_of(0, precision="bf16", name=name)) as engine:
        assert type(engine._engine.optimizer).__name__ == "FP16_UnfusedOptimizer"
        masters = [p for group in engine._engine.optimizer.fp32_groups for p in group]
        start = [p for group in optimizers.build_groups(run_of(), build_model(run_of())) for p in group["params"]]
        assert all(torch.equal(a.cpu(), b.bfloat16().float()) for a, b in zip(masters, start, strict=True)), name
        engine.train(mine(tokens_of(0), 4), 1e-3)
        steps = {int(state["step"]) for state in engine._engine.basic_optimizer.state.values()}
        assert steps == {1}, (name, steps)
