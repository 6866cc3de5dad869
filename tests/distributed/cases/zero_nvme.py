"""ZeRO-Infinity: states on NVMe (here, on whatever disk there is), bitwise as in memory.

DeepSpeed compiles its async_io for minutes, with libaio's headers (libaio-dev). So everyday runs take part only if it
has been compiled already, or with NVME=1, as the hosted CI does.
"""

import contextlib
import os
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

from alto_distributed import ALTO
from alto_distributed.deepspeed import nvme
from alto_distributed.deepspeed.layout import LayoutBuilder
from tests.helpers.cases import EXHAUSTIVE, each, worlds
from tests.helpers.zero import BF16, PARAMS, config, running, shifted

WIDTH = 512
PIPELINED = {"pipeline_read": True, "pipeline_write": True}


class Net(nn.Module):
    """Three matrices that are swapped at two ranks, each a sub-group of 1 MiB, and what is too small for it."""

    def __init__(self, first=WIDTH):
        super().__init__()
        self.first = nn.Linear(first, first)
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x):
        size = self.first.in_features
        return self.head(self.layers(torch.cat([self.first(x[:, :size]), x[:, size:]], 1)))


def build(**options):
    torch.manual_seed(11)
    return Net(**options)


def needs_async_io():
    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("DeepSpeed cannot compile async_io: libaio-dev is missing")
    wanted = EXHAUSTIVE or os.environ.get("NVME")
    if not wanted and not Path(os.environ.get("TORCH_EXTENSIONS_DIR", ""), "async_io", "async_io.so").exists():
        pytest.skip("async_io is not compiled: NVME=1 does it")


def swapping(directory, *, sub_group_size=WIDTH * WIDTH, params=PARAMS, name="ALTO", **offload):
    folder = {"nvme_path": str(directory / "nvme")} if offload["device"] == "nvme" else {}
    zero = {"stage": 3, "sub_group_size": sub_group_size, "offload_optimizer": {**offload, **folder}}
    return config(zero, params=params, name=name, **BF16)


def advance(engine, steps=3):
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x = torch.randn(4, WIDTH, generator=generator).bfloat16()
        engine.backward(engine(x.to(engine.device)).float().square().mean())
        engine.step()


def picture(engine):
    out = {}
    for name, p in engine.module.named_parameters():
        out[f"{name} master"] = safe_get_full_fp32_param(p).clone()
        out.update({f"{name} {key}": safe_get_full_optimizer_state(p, key).clone() for key in ALTO.state_keys})
    return out


#: Options of the offload, and how many buffers ALTO and LAMB need.
WAYS = {
    "plain": ({}, 5, 4),
    "pipelined reads": ({"pipeline_read": True}, 10, 8),
    "pipelined writes": ({"pipeline_write": True}, 10, 8),
    "pipelined": (PIPELINED, 15, 12),
}


@worlds(2)
@each(WAYS)
def case_nvme_is_bitwise_memory(directory, setting):
    needs_async_io()
    options, buffers, _ = setting
    with running(build(), swapping(directory, device="cpu")) as engine:
        advance(engine)
        expected = picture(engine)
    with running(build(), swapping(directory, device="nvme", buffer_count=buffers, **options)) as engine:
        swapped = nvme.swapped_sub_groups(engine.optimizer)
        assert len(swapped) >= 3, swapped
        assert len(swapped) < len(engine.optimizer.fp16_groups)
        advance(engine)
        flats = [engine.optimizer.fp32_partitioned_groups_flat[i] for i in swapped]
        if not options:  # what is pipelined keeps its last buffers
            held = [s[key] for s in map(engine.basic_optimizer.state.get, flats) for key in ALTO.state_keys]
            assert {tensor.numel() for tensor in (*flats, *held)} == {0}
        got = picture(engine)
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(got[key], value), key
        assert value.any(), key


@worlds(2)
@each(WAYS)
def case_too_few_buffers_are_named(directory, setting):
    """One less than that, and DeepSpeed would have failed in the first steps."""
    needs_async_io()
    options, alto, lamb = setting
    for alpha, buffers in ((-5, alto), (0, lamb)):
        ds_config = swapping(
            directory, device="nvme", buffer_count=buffers - 1, params={**PARAMS, "alpha": alpha}, **options
        )
        with pytest.raises(
            ValueError, match=f'"buffer_count": {buffers - 1} .* too small.*write "buffer_count": {buffers}$'
        ):
            deepspeed.initialize(model=build(), config=ds_config)
        with without(nvme, "_check_buffers"), running(build(), ds_config) as engine, pytest.raises(AssertionError):
            advance(engine)


@contextlib.contextmanager
def without(module, name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, lambda *_: None)
        yield


@worlds(2)
def case_gradients_at_odd_places_are_refused(directory):
    needs_async_io()
    ds_config = swapping(directory, device="nvme", buffer_count=5, sub_group_size=10**9)
    with pytest.raises(ValueError, match=r"gradient of 'layers.0.weight' wrongly from NVMe: it begins at byte \d+ of"):
        deepspeed.initialize(model=build(first=3), config=ds_config)
    with running(build(first=3), swapping(directory, device="cpu", sub_group_size=10**9)) as engine:
        advance(engine)
        expected = picture(engine)
    with without(nvme, "_check_alignment"), running(build(first=3), ds_config) as engine:
        advance(engine)
        got = picture(engine)
    assert not all(torch.equal(got[key], expected[key]) for key in expected)  # the fault that is told


@worlds(2)
def case_a_layout_that_was_read_wrongly_is_found_on_nvme(directory):
    needs_async_io()
    read = LayoutBuilder._read
    ds_config = swapping(directory, device="nvme", buffer_count=5)

    def shift_what_is_swapped(self):
        layouts = read(self)
        return {
            flat: layout if flat.numel() else moved
            for (flat, layout), moved in zip(layouts.items(), shifted(layouts).values(), strict=True)
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayoutBuilder, "_read", shift_what_is_swapped)
        with pytest.raises(ValueError, match="not laid out as alto_distributed reads it"):
            deepspeed.initialize(model=build(), config=ds_config)


#: What cannot be swapped, and what is said.
REFUSED = {
    "small states": ({"params": {**PARAMS, "grad_ema_dtype": "bfloat16"}}, "float32 alone; remove grad_ema_dtype"),
    "ESGD": ({"name": "ESGD", "params": {"lr": 0.1}}, "ESGD cannot be offloaded to NVMe"),
}


@worlds(2)
@each(REFUSED)
def case_not_to_nvme(directory, setting):
    needs_async_io()
    options, message = setting
    with pytest.raises(ValueError, match=message):
        deepspeed.initialize(model=build(), config=swapping(directory, device="nvme", buffer_count=9, **options))


@worlds(2)
@each({"swapped": {}, "all too small to be swapped": {"make": lambda: nn.Linear(WIDTH, 2)}})
def case_no_checkpoint_is_loaded_to_nvme(directory, label, setting):
    """DeepSpeed skips states there, whether it has swapped any or not, and goes on with what there is."""
    needs_async_io()
    make = setting.get("make", build)
    said = pytest.warns(UserWarning, match="cannot be resumed, .* DeepSpeed does not load them, with any optimizer")
    with said, running(make(), swapping(directory, device="nvme", buffer_count=5)) as engine:
        assert bool(nvme.swapped_sub_groups(engine.optimizer)) != bool(setting)
        advance(engine)
        folder = directory / f"from nvme, {label}"
        engine.save_checkpoint(folder, tag="saved")
        before = picture(engine)
        for options in ({}, {"load_optimizer_states": False}, {"load_module_only": True}):
            with pytest.raises(ValueError, match='no checkpoint can be loaded: .*on NVMe.* Use "device": "cpu"'):
                engine.load_checkpoint(folder, **options)
        got = picture(engine)
        assert all(torch.equal(got[key], value) for key, value in before.items())
