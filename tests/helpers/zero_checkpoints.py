"""Engines whose checkpoints are saved, converted and loaded, and pictures of what they held then."""

import contextlib
import io

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from alto_distributed import ALTO
from alto_distributed.deepspeed.universal import convert

from .zero import BF16, PARAMS, assert_straddles, batches, config, loss_of, network, running, trainable, weights

BEFORE, AFTER = 3, 3
SMALL = {"params": {**PARAMS, "grad_ema_dtype": "bfloat16"}}
#: What four ranks save and load in everyday runs.
FEW_CELLS = {
    "stage 3": ({"stage": 3, "sub_group_size": 40}, {}),  # several sub-groups in a group
    "stage 1, small grad_ema": ({"stage": 1}, SMALL),
}
UNIVERSAL_CELLS = {
    **FEW_CELLS,
    "stage 3, bf16": ({"stage": 3}, BF16),
    "stage 1": ({"stage": 1}, {}),
    "stage 2": ({"stage": 2}, {}),
    "stage 3, small grad_ema": ({"stage": 3}, {**SMALL, **BF16}),
    "BF16_Optimizer": ({"stage": 1}, {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}),
}
CELLS = {
    **UNIVERSAL_CELLS,
    "stage 0": (None, {}),
    "stage 0, bf16": (None, BF16),
    "stage 1, bf16": ({"stage": 1}, BF16),
    "stage 2, bf16": ({"stage": 2}, BF16),
    "stage 2, optimizer offload": ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, {}),
    "stage 3, optimizer offload": ({"stage": 3, "offload_optimizer": {"device": "cpu"}}, {}),
    "stage 1, round_robin": ({"stage": 1, "round_robin_gradients": True}, {}),
}


def three_groups(model, **changed):
    """Three groups with hyperparameters of their own; the last is LAMB, and has no third state."""
    named = trainable(model)
    up = [p for n, p in named.items() if n.startswith("up")]
    down = [p for n, p in named.items() if n.startswith("down")]
    rest = [p for n, p in named.items() if not n.startswith(("up", "down"))]
    return [
        {"params": rest, "weight_decay": 0.3, **changed},
        {"params": up, "lr": 0.1, "alpha": 2.0, "layerwise": "all", **changed},
        {"params": down, "alpha": 0.0, "betas": [0.99, 0.8, 0.95], **changed},
    ]


@contextlib.contextmanager
def engine_for(cell, groups=three_groups, model=None, **more):
    """An engine with one of the cells' configs. bf16 ranks all see the whole batch, so that averaging is exact."""
    zero, precision = cell
    model = network() if model is None else model
    ds_config = config(zero, **precision, **more)
    if precision:
        ds_config["train_micro_batch_size_per_gpu"] = 8
    with running(model, ds_config, model_parameters=groups(model) if groups else None) as engine:
        yield engine


def other_network():
    """Other weights, for those that are loaded to show."""
    model = network()
    with torch.no_grad():
        for p in trainable(model).values():
            p.add_(0.5)
    return model


def advance(engine, start, stop):
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in list(batches(stop))[start:]:
        for x, y in step:
            if not engine.bfloat16_enabled():
                x, y = x.chunk(world)[rank], y.chunk(world)[rank]
            engine.backward(loss_of(engine(x), y))
            engine.step()


def picture(engine):
    """Weights, master weights and states, whole, by name, and the step counts."""
    out = {f"{name} model": value for name, value in weights(engine).items()}
    optimizer = engine.basic_optimizer
    masters = {}
    if not engine.zero_optimization():
        for ours, theirs in zip(
            optimizer.param_groups, getattr(engine.optimizer, "fp16_groups", [[]] * 9), strict=False
        ):
            masters.update(zip(theirs or ours["params"], ours["params"], strict=True))
    for name, p in trainable(engine.module).items():
        for key in ALTO.state_keys:
            if key != "grad_ema" or not name.startswith("down"):
                value = optimizer.state[masters[p]][key] if masters else safe_get_full_optimizer_state(p, key)
                out[f"{name} {key}"] = value.detach().cpu().clone()
        master = masters[p] if masters else safe_get_full_fp32_param(p)
        out[f"{name} master"] = master.detach().cpu().clone()
    out["steps"] = torch.tensor(sorted({int(state["step"]) for state in optimizer.state.values()}))
    return out


def hyperparameters(engine):
    return [{k: v for k, v in group.items() if k != "params"} for group in engine.basic_optimizer.param_groups]


def assert_same(label, got, expected):
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        one, other = got[key].cpu(), value.cpu()
        assert torch.equal(one, other), f"{label}: {key} differs by {(one - other).abs().max():.1e}"


def on_rank_0(work, *args, **kwargs):
    """Run it there, quietly, and raise everywhere what it raises."""
    problem = [None]
    if dist.get_rank() == 0:
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                work(*args, **kwargs)
        except Exception as error:
            problem = [error]
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise problem[0]


def place(directory, label, world=None):
    return directory / f"saved by {world or dist.get_world_size()}" / label


def train_and_save(directory, label):
    """Train, save, train on; beside the checkpoint, pictures of when it was saved and of the end."""
    folder = place(directory, label)
    with engine_for(CELLS[label]) as engine:
        advance(engine, 0, BEFORE)
        engine.save_checkpoint(folder, tag="saved")
        at_save = picture(engine)
        assert at_save["steps"].tolist() == [BEFORE], at_save["steps"]
        kept_in = {s["grad_ema"].dtype for s in engine.basic_optimizer.state.values() if "grad_ema" in s}
        assert kept_in == {torch.bfloat16 if "small" in label else torch.float32}, kept_in
        saved_hyper = hyperparameters(engine)
        advance(engine, BEFORE, BEFORE + AFTER)
        at_end = picture(engine)
    if dist.get_rank() == 0:
        torch.save((at_save, at_end, saved_hyper), folder / "pictures.pt")
    dist.barrier()


def check_conversion(folder):
    """What the converter makes of a checkpoint has every state that was saved."""
    on_rank_0(convert, folder / "saved", folder / "universal")
    at_save, _, _ = torch.load(folder / "pictures.pt")
    for key, value in at_save.items():
        name, _, state = key.rpartition(" ")
        if state in ALTO.state_keys or state == "master":
            path = folder / "universal" / "zero" / name / f"{'fp32' if state == 'master' else state}.pt"
            converted = torch.load(path)
            converted = converted["param"] if isinstance(converted, dict) else converted
            assert torch.equal(converted.view(-1), value.view(-1)), key
    assert not (folder / "universal" / "renamed_tmp").exists()


ESGD = {"name": "ESGD", "params": {"lr": 0.05, "momentum": 0.9, "alpha": -5, "beta1": 0.99}}


def groups_of_esgd(model):
    """The second has no momentum, and decay."""
    named = trainable(model)
    up = [p for n, p in named.items() if n.startswith("up")]
    rest = [p for n, p in named.items() if not n.startswith("up")]
    return [{"params": rest}, {"params": up, "momentum": 0.0, "weight_decay": 0.1}]


def states_of_esgd(engine):
    """All states by parameter and name; a group without momentum has none."""
    found = {}
    for name, p in trainable(engine.module).items():
        for key in ("grad_ema", *(() if name.startswith("up") else ("momentum_buffer",))):
            found[f"{name} {key}"] = safe_get_full_optimizer_state(p, key).clone()
        found[name] = safe_get_full_fp32_param(p).clone()
    return found


def goes_on(directory, label, saved_by):
    """Load what so many ranks saved and converted, and train to the end that they came to."""
    folder = place(directory, label, saved_by)
    at_save, at_end, saved_hyper = torch.load(folder / "pictures.pt")
    with engine_for(
        UNIVERSAL_CELLS[label],
        lambda m: three_groups(m, lr=0.7, eps=1e-3),
        other_network(),
        checkpoint={"load_universal": True},
    ) as engine:
        if dist.get_world_size() > 1:
            assert_straddles(engine)
        engine.load_checkpoint(folder, tag="universal")
        assert_same("loaded", picture(engine), at_save)
        assert hyperparameters(engine) == saved_hyper
        advance(engine, BEFORE, BEFORE + AFTER)
        got = picture(engine)
    assert torch.equal(got["steps"], at_end["steps"]), got["steps"]
    masters = [key for key in at_end if key.endswith("master")]
    gap = torch.stack([(got[key] - at_end[key]).norm() / at_end[key].norm() for key in masters]).max()
    # Averages of gradients differ in their last places, and a small state may then be rounded the other way.
    assert gap < (1e-3 if "small" in label else 1e-6), gap.item()  # not if it is NaN
