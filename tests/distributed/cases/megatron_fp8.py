"""Parameters in fp8, with a class of ours in the place of TransformerEngine's, which needs a GPU.

Its weights are rounded to the 3 bits of e4m3. Megatron makes float32 shards from the weights before rounding, and hands
the stepped ones to its function that quantizes; that one is ours too.
"""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from alto_distributed import ALTO
from tests.helpers.cases import each, worlds
from tests.helpers.megatron_gpt import Job, Layout, Megatron, alto_config, parallel

# isort: split
from megatron.core import fp8_utils
from megatron.core.optimizer import distrib_optimizer

STEPS = 3
JOB = Job(layers=1, tied=False, precision=torch.bfloat16)


def rounded(tensor):
    return tensor.float().to(torch.float8_e4m3fn).to(torch.bfloat16)


class Float8(nn.Parameter):
    """Is rounded, and may know what it was before."""

    def get_high_precision_init_val(self):
        return self.precise

    def clear_high_precision_init_val(self):
        self.precise = None


def quantize_param_shard(params, shards, offsets, group, *_):
    for param, shard, start in zip(params, shards, offsets, strict=True):
        if shard is not None:
            param.detach().view(-1)[start : start + shard.numel()] = rounded(shard)


class InFloat8(Megatron):
    def _data_parallel(self, config, ddp_config, chunk, **options):
        for p in chunk.parameters():
            if p.ndim == 2:
                p.__class__, p.precise = Float8, p.detach().clone()
                p.data.copy_(rounded(p.precise))
        return Megatron._data_parallel(config, ddp_config, chunk, **options)


def stepped(engine):
    """After some steps on gradients that do not depend on the weights."""
    for step in range(STEPS):
        for chunk in engine.chunks:
            chunk.zero_grad_buffer()
        for i, (_, p) in enumerate(engine.named_parameters()):
            generator = torch.Generator().manual_seed(1000 * step + i)
            p.main_grad.copy_(torch.randn(p.shape, generator=generator))
        engine.optimizer.step()
    return engine


@worlds(2)
@each(kept=(True, False))
def case_parameters_in_fp8(kept):
    config = alto_config(JOB, fp8_recipe="delayed")
    with parallel(Layout()), pytest.MonkeyPatch.context() as patch:
        expected = stepped(Megatron(JOB, Layout(), optimizer=config))
        patch.setattr(fp8_utils, "HAVE_TE_FP8_TENSOR_CLASS", True)
        patch.setattr(fp8_utils, "FP8_TENSOR_CLASS", Float8, raising=False)
        patch.setattr(distrib_optimizer, "quantize_param_shard", quantize_param_shard)
        # The buffers treat it as the bf16 that it is.
        for module in ("param_and_grad_buffer", "distributed_data_parallel"):
            patch.setattr(f"megatron.core.distributed.{module}.is_float8tensor", lambda tensor: False)
        if not kept:  # shards are made from what is rounded
            patch.delattr(Float8, "get_high_precision_init_val")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            engine = InFloat8(JOB, Layout(), optimizer=config)
        (about,) = [str(warning.message) for warning in told if "fp8" in str(warning.message)]
        assert "are kept in fp8 (--fp8-param-gather)" in about
        stepped(engine)
        engine.assert_straddles()
        masters, others = engine.gathered(), expected.gathered()
        for name, p in engine.named_parameters():
            if p.ndim == 2:
                assert torch.equal(p.detach(), rounded(masters[name])), name
            assert (not kept and p.ndim == 2) or torch.equal(masters[name], others[name]), name
        if kept:
            for key in ALTO.state_keys:
                mine, theirs = (e.gathered(lambda inner, p, k=key: inner.state[p][k]) for e in (engine, expected))
                assert all(torch.equal(value, theirs[name]) for name, value in mine.items()), key
    dist.barrier()
