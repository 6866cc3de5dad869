"""What users of DeepSpeed do beside training: read and write states, rates and norms, watch, profile."""

import contextlib
import csv
import io
import os

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_full_optimizer_state,
    safe_get_local_optimizer_state,
    safe_set_full_optimizer_state,
    safe_set_local_optimizer_state,
)

from alto_distributed import ALTO
from tests.helpers.cases import each, worlds
from tests.helpers.zero import PARAMS, batches, config, loss_of, network, running, train, trainable

ZERO_STAGES = {"stage 1": 1, "stage 2": 2, "stage 3": 3}


@worlds(2)
@each(ZERO_STAGES)
def case_states_are_read_and_written(setting):
    """What is written is read again, and is what the next step uses: all of it from a constant gives a constant."""
    with running(network(), config({"stage": setting})) as engine:
        train(engine, steps=1)
        p = dict(engine.module.named_parameters())["up.weight"]
        for place, key in enumerate(ALTO.state_keys):
            value = torch.full((13, 6), 2.0 + place, device=engine.device)
            safe_set_full_optimizer_state(p, value, key)
            assert torch.equal(safe_get_full_optimizer_state(p, key), value), key
        beta1, before = PARAMS["betas"][0], safe_get_full_optimizer_state(p, "grad_ema").clone()
        engine.backward(loss_of(engine(torch.zeros(4, 5, dtype=torch.long)), torch.zeros(4, 5, dtype=torch.long)))
        grad = deepspeed.utils.safe_get_full_grad(p).clone() if setting < 3 else None
        engine.step()
        if grad is not None:
            norm = engine.get_global_grad_norm()
            clipped = grad / max(1.0, norm + 1e-6)
            expected = beta1 * before + (1 - beta1) * clipped
            torch.testing.assert_close(safe_get_full_optimizer_state(p, "grad_ema"), expected, rtol=1e-4, atol=1e-6)
        assert not torch.equal(safe_get_full_optimizer_state(p, "grad_ema"), before)
        if setting == 3:
            local = safe_get_local_optimizer_state(p, "grad_ema")
            safe_set_local_optimizer_state(p, torch.full_like(local, 7.0), "grad_ema")
            assert (safe_get_full_optimizer_state(p, "grad_ema") == 7.0).all()


@worlds(2)
@each(ZERO_STAGES)
def case_rate_and_norm(setting):
    """``get_lr`` has a rate for each group; the norm is that of the whole gradient before it is clipped."""
    model = network()
    ((x, y),) = next(batches())
    loss_of(model(x), y).backward()
    whole = torch.stack([p.grad.norm() for p in trainable(model).values() if p.grad is not None]).norm().item()
    with running(network(), config({"stage": setting}, clip=0.01)) as engine:
        assert engine.get_lr() == [PARAMS["lr"]] * 2
        train(engine, steps=1)
        assert float(engine.get_global_grad_norm()) == pytest.approx(whole, rel=1e-5)


MONITORS = {
    "csv_monitor": {"enabled": True},
    "tensorboard": {"enabled": True},
    "wandb": {"enabled": True, "project": "alto", "group": "tests"},
}


@worlds(2)
@each(name=MONITORS)
def case_monitors(name, directory):
    """A summary of the ratios beside DeepSpeed's own entries."""
    if name != "csv_monitor":
        pytest.importorskip({"tensorboard": "tensorboard", "wandb": "wandb"}[name])
    os.environ.update(WANDB_MODE="offline", WANDB_DIR=str(directory), WANDB_SILENT="true")
    where = {} if name == "wandb" else {"output_path": str(directory), "job_name": name}
    ds_config = config({"stage": 2}, params={**PARAMS, "diagnostics_every": 1}, **{name: {**MONITORS[name], **where}})
    with running(network(), {**ds_config, "steps_per_print": 1}) as engine:
        written, write = [], engine.monitor.write_events
        engine.monitor.write_events = lambda events: written.extend(events) or write(events)
        train(engine, steps=2)
    if dist.get_rank() == 0:
        tags = {tag for tag, *_ in written}
        assert {"Train/ALTO/trust_ratio_median", "Train/Samples/lr"} <= tags, tags
        if name == "csv_monitor":
            with open(directory / name / "Train_ALTO_trust_ratio_median.csv") as file:
                rows = list(csv.reader(file))
            assert len(rows) == 3, rows
        if name == "tensorboard":
            assert any(path.name.startswith("events") for path in (directory / name).rglob("*"))


@worlds(2)
def case_the_flops_profiler(directory):
    """It counts forward passes, and the step goes on as without it."""
    report = directory / "flops.txt"
    profile = {"enabled": True, "profile_step": 2, "output_file": str(report), "detailed": False}
    results = []
    for options in ({}, {"flops_profiler": profile}):
        with (
            contextlib.redirect_stdout(io.StringIO()),
            running(network(), config({"stage": 1}, **options)) as engine,
        ):
            train(engine, steps=3)
            results.append({n: p.detach().clone() for n, p in trainable(engine.module).items()})
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    if dist.get_rank() == 0:
        assert "fwd flops" in report.read_text()
