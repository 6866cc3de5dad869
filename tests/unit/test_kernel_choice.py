"""Which kernel serves a device, and what makes "auto" leave the one for GPUs alone."""

import re
import warnings
from collections import defaultdict
from dataclasses import fields, replace

import pytest
import torch

from alto_distributed.doctor import checks
from alto_distributed.kernels import Coefficients, Span, choice, chunked, proof, reference
from alto_distributed.kernels.cpu import kernel as native
from alto_distributed.kernels.skip import SkipIf
from alto_distributed.kernels.triton import step as gpu_step

CPU = torch.device("cpu")
FLOAT32 = proof.Dtypes(torch.float32, torch.float32, torch.float32, torch.float32)
BFLOAT16 = proof.Dtypes(torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16)
LAMB = proof.Dtypes(torch.float32, torch.bfloat16, torch.float32, None)


class Kernel:
    """The reference, with something done after each phase."""

    def __init__(self, after_one=lambda shards, sums: None, after_two=lambda shards: None, skips=True):
        self.after_one, self.after_two, self.skips, self.calls = after_one, after_two, skips, 0

    def phase_one(self, shards, sums):
        self.calls += 1
        reference.phase_one(shards, sums)
        self.after_one(shards, sums)

    def phase_two(self, shards, step_sizes, prepared=None):
        reference.phase_two(shards, step_sizes)
        self.after_two(shards)

    def unless(self, skip):
        return SkipIf(reference, skip) if self.skips else reference


def one_bit(name):
    def change(shards, *_):
        tensor = getattr(shards[1], name)
        tensor[7] = torch.nextafter(tensor[7], torch.tensor(9.0, dtype=tensor.dtype))

    return change


def changes(**what):
    """Once in a few calls, as an instruction that is executed out of order would."""
    calls = []

    def change(shards, sums):
        calls.append(1)
        if len(calls) == what["at"]:
            sums[0, 0] *= 1 + 1e-13

    return change


def raising(*_):
    raise RuntimeError("PassManager::run failed\nat some line")


def count_zeros(shards, sums):
    sums[2] += 1


def pad(shards):
    shards[0].param[4501] = 0.0


WRONG = {
    "a state": (Kernel(one_bit("exp_avg")), "exp_avg of a tensor of 4097 elements is not the reference's"),
    "another": (Kernel(one_bit("exp_avg_sq")), "exp_avg_sq of a tensor of 4097 elements"),
    "the weights": (Kernel(after_two=lambda shards: shards[2].param[:9].mul_(1.01)), "weights are not the reference's"),
    "padding": (Kernel(after_two=pad), "weights outside of spans were written"),
    "sums": (Kernel(lambda shards, sums: sums[1, 2].mul_(1.001)), "sums of squares"),
    "zeros": (Kernel(count_zeros), "gradients of zeros"),
    "chance": (Kernel(changes(at=3)), "a second run gives other bits"),
    "no skip": (Kernel(skips=False), "a skipped step changes something"),
    "no code": (Kernel(raising), "RuntimeError: PassManager::run failed at some line"),
}


@pytest.mark.parametrize("dtypes", [FLOAT32, BFLOAT16, LAMB], ids=["float32", "bfloat16", "LAMB"])
def test_a_right_kernel_is_found_right(dtypes):
    kernel = Kernel()
    assert proof.complaint(kernel, kernel.unless, CPU, [dtypes]) == ""


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found_and_named(what):
    kernel, message = WRONG[what]
    assert message in proof.complaint(kernel, kernel.unless, CPU, [FLOAT32])


class Mutant(Kernel):
    """The reference, which sees other numbers than it is given."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def phase_one(self, shards, sums):
        super().phase_one([self.change(shard) for shard in shards], sums)

    def phase_two(self, shards, step_sizes, prepared=None):
        super().phase_two([self.change(shard) for shard in shards], step_sizes)


def with_number(**numbers):
    return lambda shard: replace(shard, coefficients=replace(shard.coefficients, **numbers))


def with_span(name, move):
    def changed(shard):
        return replace(shard, spans=tuple(span._replace(**{name: move(getattr(span, name))}) for span in shard.spans))

    return changed


#: Each number that a kernel takes, dropped or changed, and for which dtypes that is wrong.
EVERY = (FLOAT32, BFLOAT16, LAMB)
MUTATIONS = {
    "alpha": (with_number(alpha=0.0), (FLOAT32, BFLOAT16)),
    "beta1": (with_number(beta1=0.98), (FLOAT32, BFLOAT16)),
    "beta2": (with_number(beta2=0.91), EVERY),
    "beta3": (with_number(beta3=0.98), EVERY),
    "eps1": (with_number(eps1=0.0), EVERY),
    "weight decay": (with_number(weight_decay=0.0), EVERY),
    "correction of m": (with_number(correction2=1.0), EVERY),
    "correction of v": (with_number(correction3=1.0), EVERY),
    "sign": (with_number(sign=1.0), EVERY),
    "scale": (lambda shard: replace(shard, inverse_scale=None), EVERY),
    "step of rounding": (with_number(step=3), (BFLOAT16,)),
    "seed": (with_span("seed", lambda seed: 0), (BFLOAT16,)),
    "index": (with_span("offset", lambda index: 0), (BFLOAT16,)),
    "index beyond 2^32": (with_span("offset", lambda index: index % 2**32), (BFLOAT16,)),
    "slot": (with_span("slot", lambda slot: 0), EVERY),
    "sums": (with_span("ratio", lambda ratio: False), EVERY),
}


@pytest.mark.parametrize("number", MUTATIONS)
def test_every_number_that_a_kernel_takes_is_proved(number):
    """eps1 could be dropped, and nobody noticed: all elements were far larger."""
    change, wrong_for = MUTATIONS[number]
    for dtypes in wrong_for:
        kernel = Mutant(change)
        assert proof.complaint(kernel, kernel.unless, CPU, [dtypes]), dtypes


def test_no_number_of_a_kernel_is_forgotten_above():
    taken = {field.name for field in fields(Coefficients)} - {"bias_correction"}  # in the corrections
    mutated = {"alpha", "beta1", "beta2", "beta3", "eps1", "weight_decay", "correction2", "correction3", "step", "sign"}
    assert taken == mutated
    assert Span._fields == ("start", "stop", "slot", "ratio", "seed", "offset")


def test_the_kernel_for_gpus_is_asked_for_dtypes_that_were_proved_alone(monkeypatch):
    """Others turn up later, perhaps on one rank only: they take torch's operations."""
    monkeypatch.setitem(choice.ACCELERATED, "cpu", lambda device: gpu_step.kernel)
    monkeypatch.setattr(choice, "_proved", {CPU: {FLOAT32}})
    monkeypatch.setattr(native, "available", lambda: False)
    kernel = choice.kernel_for("auto", CPU)
    shards = proof._shards(CPU, FLOAT32) + proof._shards(CPU, LAMB)
    assert [kernel._serves(shard) for shard in shards] == [True] * 5 + [False] * 5
    assert choice.kernel_for("auto", CPU, proved=False) is chunked
    gpu_step._warn_of_unproved.cache_clear()
    late = shards[5:]
    with pytest.warns(UserWarning, match=r"for tensors of param float32, .*no gradients of these dtypes"):
        kernel.phase_one(late, torch.zeros(3, 4, dtype=torch.float64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        kernel.phase_one(late, torch.zeros(3, 4, dtype=torch.float64))


def test_triton_that_is_missing_is_the_reason(monkeypatch):
    monkeypatch.setattr(choice, "_complaints", {})
    monkeypatch.setattr(gpu_step, "_triton_is_installed", lambda: False)
    fault = choice.find_fault(torch.device("cuda", 0), [FLOAT32])
    assert "it needs triton 3.4 or later" in fault
    with pytest.warns(UserWarning, match=r"does not use its Triton kernel: .* it needs triton"):
        choice.warn_of_fallback(fault)


def test_the_doctor_prints_which_kernel_auto_uses(monkeypatch):
    """bfloat16 was not proved: a kernel that is wrong in it alone passed."""
    monkeypatch.setattr(choice, "_proved", defaultdict(set))
    in_bfloat16 = Mutant(with_number(step=3))  # the bits of rounding hang on it, and nothing else does
    for kernel, said in ((Kernel(), "Triton: its self-check passed"), (in_bfloat16, "foreach operations: .* bfloat16")):
        monkeypatch.setattr(choice, "_complaints", {})
        monkeypatch.setitem(choice.ACCELERATED, "cpu", lambda device, kernel=kernel: kernel)
        assert re.search(said, dict(checks.planned(["cpu"]))["kernel auto on cpu"]())


def test_a_device_is_examined_once(monkeypatch):
    kernel = Kernel()
    monkeypatch.setattr(choice, "_complaints", {})
    monkeypatch.setitem(choice.ACCELERATED, "cpu", lambda device: kernel)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert choice.find_fault(CPU, [LAMB]) == ""
    assert kernel.calls == 4  # two runs of two steps
