"""The compiled Triton kernels in the emulator of AMD's GPUs; run by tests/unit/test_emulator.py.

    python -m tests.unit.programs.triton_emulate OUTCOMES.json CASE...        without TRITON_INTERPRET

A case is such as gfx942-bfloat16-bfloat16-float32-None: a target, and the dtypes of weights, gradients, exp_avg and
grad_ema.
"""

import gc
import json
import sys
import traceback
from pathlib import Path

import numpy as np
import torch
import triton

from alto_distributed.hyperparameters import Hyperparameters
from alto_distributed.kernels import Coefficients, FlatShard, Span
from alto_distributed.kernels.proof import Dtypes, complaint
from alto_distributed.kernels.shards import NONZERO, R_SQUARED, SUMS, THETA_SQUARED
from alto_distributed.kernels.triton.step import TritonKernel
from alto_distributed.kernels.triton.table import Tiling
from tests.helpers.amd.decode import ARCHITECTURES, instructions
from tests.helpers.amd.driver import WAVE_SIZES, EmulatedGPU

CPU = torch.device("cpu")
COEFFICIENTS = Coefficients.at_step(Hyperparameters(weight_decay=0.1), 3)
STEP_SIZE = 0.37
LENGTH = 2300  # two whole tiles of CDNA's or four of RDNA's, and a part of one


def check_proof(kernel, dtypes):
    """The check that decides on a GPU whether the kernel is used there."""
    found = complaint(kernel, kernel.unless, CPU, [dtypes])
    assert not found, found


def check_weights(kernel, dtypes):
    """Bit by bit, over all magnitudes there are: quotients and roots are IEEE's, from denormals to infinity."""
    shard = make(dtypes, wide_range)
    if dtypes.param == torch.bfloat16:
        put_ties(shard, dtypes)
    theta = shard.param.clone()
    kernel.phase_two([shard], torch.tensor([STEP_SIZE], dtype=torch.float64))
    expected = moved(shard, theta).to(dtypes.param)
    wrong = ~((shard.param == expected) | (shard.param.isnan() & expected.isnan()))
    assert not wrong.any(), f"{wrong.sum()} weights, such as {shard.param[wrong][:3]} instead of {expected[wrong][:3]}"
    assert expected.isfinite().sum() > LENGTH // 2


def check_sums(kernel, dtypes):
    """Of float64 squares, so that only the order of additions is free."""
    shard = make(dtypes, torch.randn)
    shard.grad[5:9] = 0
    theta = shard.param.clone()
    sums = torch.ones(SUMS, 1, dtype=torch.float64)
    kernel.phase_one([shard], sums)
    expected = torch.empty(SUMS, 1, dtype=torch.float64)
    expected[THETA_SQUARED] = 1 + theta.double().square().sum()
    expected[R_SQUARED] = 1 + direction(shard, theta).double().square().sum()
    expected[NONZERO] = 1 + shard.grad.count_nonzero()
    torch.testing.assert_close(sums, expected, rtol=1e-13, atol=0)


def make(dtypes, values, length=LENGTH):
    def tensor(dtype):
        if dtype is None:
            return None
        numbers = values(length)
        # float16 has fewer magnitudes: what is too large for it is drawn again.
        return torch.where(numbers.abs() > torch.finfo(dtype).max, torch.randn(length), numbers).to(dtype)

    param, grad, m, u = map(tensor, dtypes)
    return FlatShard(param, grad, m, values(length).abs(), u, (Span(0, length, 0),), COEFFICIENTS)


def moved(shard, theta):
    """The next weights, before they are rounded to their dtype."""
    return theta.float() - f32(STEP_SIZE) * direction(shard, theta)


def put_ties(shard, dtypes):
    """At its beginning, weights whose next value lies in the middle between two of bfloat16. Chance has none."""
    many = make(dtypes, torch.randn, 1 << 20)
    ties = (moved(many, many.param).view(torch.int32) & 0xFFFF == 0x8000).nonzero()[:, 0]
    assert len(ties) > 8
    for name in ("param", "exp_avg", "exp_avg_sq"):
        getattr(shard, name)[: len(ties)] = getattr(many, name)[ties]


def wide_range(count):
    """Numbers of every exponent that float32 has, and zeros."""
    numbers = torch.randn(count) * torch.randint(-149, 127, (count,)).double().exp2()
    return torch.where(torch.rand(count) < 0.1, 0.0, numbers).float()


def f32(number):
    return torch.tensor(number, dtype=torch.float32)


def direction(shard, theta):
    """r, operation by operation as the kernel has it."""
    c, m = shard.coefficients, shard.exp_avg.float()
    root = torch.from_numpy(np.sqrt(shard.exp_avg_sq.numpy()))  # torch's is one unit off now and then
    quotient = m / (root * f32(c.correction3**-0.5) + f32(c.eps1))
    return quotient * f32(1 / c.correction2) + f32(c.weight_decay) * theta.float()


def dtypes_of(name):
    return Dtypes(*(None if part == "None" else getattr(torch, part) for part in name.split("-")))


def main():
    output, *cases = sys.argv[1:]
    gpus = {target: EmulatedGPU(target) for target in WAVE_SIZES}
    gc.collect()
    gc.freeze()  # every launch looks for tensors, and what was imported has none
    outcomes = {}
    for case in cases:
        target, _, dtypes = case.partition("-")
        triton.runtime.driver.set_active(gpus[target])
        kernel = TritonKernel(Tiling(1024, 8) if WAVE_SIZES[target] == 64 else Tiling(512, 16))
        for check in (check_proof, check_weights, check_sums):
            torch.manual_seed(0)
            try:
                check(kernel, dtypes_of(dtypes))
                outcomes[f"{check.__name__} {case}"] = ""
            except Exception:
                outcomes[f"{check.__name__} {case}"] = traceback.format_exc()
    used = {target: used_by(gpu) for target, gpu in gpus.items()}
    Path(output).write_text(json.dumps({"outcomes": outcomes, "used": used}))


def used_by(gpu):
    """The instructions in all code that was loaded, each with an encoding."""
    found = {}
    for code in gpu.code_objects.values():
        for _, instruction in instructions(code.code, ARCHITECTURES[code.target]):
            for label in instruction.labels:
                found.setdefault(label, instruction.code.hex())
    return found


if __name__ == "__main__":
    main()
