"""The Megatron engine of the training program: what it builds of Megatron's parts, and what those keep."""

import pytest
import torch
import torch.distributed as dist

from alto_distributed.pretrain.config.settings import parse
from alto_distributed.pretrain.memory import usage as memory
from tests.helpers import devices
from tests.helpers.cases import some, worlds
from tests.helpers.pretrain_megatron import engine_of, programs_groups, run_of, weights

# The imports below need what megatron_gpt, imported by pretrain_megatron, puts in place of a GPU.
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # isort: skip
from alto_distributed.pretrain.engines.megatron import engine as pretrain  # isort: skip
from alto_distributed.pretrain.engines.megatron.model import Norm  # isort: skip

STEPS = 5


@worlds(2)
def case_a_rank_takes_the_device_of_its_local_rank():
    """On CPUs nothing asks. Where a scheduler shows each rank one device only, local ranks are more than devices."""
    here = devices.here()
    current = None if devices.NAME == "cpu" else torch.accelerator.current_device_index
    for local_rank in (dist.get_rank(), dist.get_rank() + 8):
        if current is not None:
            torch.accelerator.set_device_index(3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LOCAL_RANK", str(local_rank))
            if current is not None:
                patch.setattr(torch.cuda, "device_count", lambda: 8)
            assert pretrain._device() == here
        assert current is None or current() == here.index


# -- sequence parallelism --------------------------------------------------------------------------------


def norms_of(engine):
    return [module for module in engine._model.modules() if isinstance(module, torch.nn.LayerNorm)]


def trained(change=lambda engine: None, **layout):
    """Losses and weights, on the host. All ranks of tensor parallelism have the same batches."""
    engine = engine_of(run_of(precision="fp32", dropout=0.0, tensor_parallel=2, **layout))
    assert len(norms_of(engine)) == 3
    assert {type(norm) for norm in norms_of(engine)} == {Norm}
    change(engine)
    losses = []
    for step in range(STEPS):
        losses.append(engine.train(same_batches(step), 0.01).loss)
    return losses, [p.detach().cpu() for p in weights(engine)]


def same_batches(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(0, 256, (4, 9), generator=generator) for _ in range(4)]


def gap(one, other):
    """The largest difference on any rank, relative to the largest weight of a parameter."""
    here = max(((a - b).abs().max() / b.abs().max().clamp(min=1e-3)).item() for a, b in zip(one, other, strict=True))
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, here)
    return max(everywhere)


def without_the_mark(engine):
    for norm in norms_of(engine):
        for p in norm.parameters():
            p.sequence_parallel = False


@worlds(2)
def case_sequence_parallelism_without_apex():
    """Megatron's wrapper of torch's norm refuses it, and a GPU without Apex has no other."""

    def refused(*_, **__):
        raise AssertionError("sequence parallel not supported by torch LayerNorm")

    with programs_groups(2), pytest.MonkeyPatch.context() as patch:
        patch.setattr(WrappedTorchNorm, "__new__", refused)
        losses, expected = trained()
        cut_losses, got = trained(sequence_parallel=True)
        assert cut_losses == pytest.approx(losses, rel=1e-6)
        assert gap(got, expected) < 1e-5
        # The negative control: gradients of norms that are not summed over the ranks.
        assert gap(trained(without_the_mark, sequence_parallel=True)[1], expected) > 1e-3


# -- what attention keeps ------------------------------------------------------------------------------------


class Kept:
    """Counts the bytes that autograd keeps, by storages, and the most of them at a time. Weights do not count."""

    def __init__(self, weights):
        self.own = {p.untyped_storage().data_ptr() for p in weights}
        self.holders, self.now, self.most = {}, 0, 0

    def pack(self, tensor):
        return Holder(self, tensor)

    def change(self, storage, by):
        pointer = storage.data_ptr()
        if pointer in self.own:
            return
        count = self.holders.get(pointer, 0) + by
        self.holders[pointer] = count
        if count == 0 or (count, by) == (1, 1):
            self.now += by * storage.nbytes()
            self.most = max(self.most, self.now)


class Holder:
    """Keeps a tensor as long as autograd does."""

    def __init__(self, kept, tensor):
        self.kept, self.tensor = kept, tensor
        kept.change(tensor.untyped_storage(), 1)

    def __del__(self):
        self.kept.change(self.tensor.untyped_storage(), -1)


def run_of_length(sequence, precision, dropout, recompute):
    model = {"layers": 3, "hidden": 16, "heads": 4, "sequence": sequence, "vocabulary": 128, "dropout": dropout}
    training = {"global_batch": 4, "micro_batch": 2, "precision": precision, "recompute": recompute}
    return parse({"engine": "megatron", "model": model, "training": training, "megatron": {"overlap": False}})


def kept_bytes(run):
    engine = engine_of(run)
    kept = Kept(weights(engine))
    tokens = torch.randint(0, run.model.vocabulary, (run.training.micro_batch, run.model.sequence + 1))
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda holder: holder.tensor):
        engine.train([tokens], 0.01)
    assert kept.now == 0
    return kept.most


@worlds(2)
@some(precision=("bf16", "fp32"), dropout=(0.0, 0.1), recompute=(False, True))
def case_attention_keeps_what_was_estimated(precision, dropout, recompute):
    """What grows with the square of the sequence, from two lengths."""
    if dropout and devices.NAME == "cpu":
        pytest.skip("on CPUs the mask of dropout is wider")
    length = 64
    with programs_groups():
        runs = [run_of_length(n * length, precision, dropout, recompute) for n in (1, 2)]
        short, long = map(kept_bytes, runs)
        once, twice = map(memory.activations, runs)
    assert long - 2 * short == pytest.approx(twice - 2 * once, rel=0.2), (long - 2 * short, twice - 2 * once)
    assert twice - 2 * once > 1e5
