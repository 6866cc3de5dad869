"""What real runs allocate, against what ``alto_distributed estimate`` says: every part within 2%.

All tensors that came into being since the engine was built are looked up (by Python's garbage collector and as the
gradients of others) at the end of each backward pass and in each step of the inner optimizer. Those that are neither
weights, masters, states nor communication buffers are gradients, whatever the engine calls them. The fullest rank
counts.
"""
# ruff: noqa: E402 - the stand-ins for a GPU come before anything of Megatron's

import contextlib
import gc
import json
import shutil
import time
import warnings

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from scripts.megatron_on_cpu import install

install()
warnings.filterwarnings(
    "ignore", message=r".*(Apex|Transformer Engine|torch.jit.script|torch.distributed._|isinstance)"
)

from deepspeed.accelerator import get_accelerator
from megatron.core import parallel_state

import alto_distributed.megatron  # noqa: F401
from alto_distributed import ALTO, param_groups
from alto_distributed.pretrain.config.settings import parse
from alto_distributed.pretrain.engines.deepspeed import engine as on_deepspeed
from alto_distributed.pretrain.engines.megatron import engine as on_megatron
from alto_distributed.pretrain.memory import usage as memory
from alto_distributed.pretrain.memory.footprint import Setting, checkpoint, footprint
from alto_distributed.pretrain.memory.shapes import of_model
from alto_distributed.pretrain.model import build_model, inputs_of, next_token_loss
from tests.helpers.cases import each, worlds

get_accelerator().is_fp16_supported = lambda: True

# Megatron's checkpoints have some 100 bytes for each element of a small parameter's key, so it cannot be much smaller.
MODEL = {"layers": 4, "hidden": 256, "heads": 4, "sequence": 16, "vocabulary": 1024, "dropout": 0.0}
STATES = ALTO.state_keys
#: Stage, precision, grad_accum_dtype, overlap_comm.
ZERO = {
    "stage 3, bf16, fp32 sums, overlap": (3, "bf16", "fp32", True),
    "stage 0, bf16": (0, "bf16", None, False),
    "stage 1, fp32": (1, "fp32", None, False),
    "stage 1, bf16, fp32 sums": (1, "bf16", "fp32", False),
    "stage 2, fp32, overlap": (2, "fp32", None, True),
    "stage 2, bf16, fp32 sums, overlap": (2, "bf16", "fp32", True),
}
MORE_ZERO = {
    "stage 3, fp32": (3, "fp32", None, False),
    "stage 0, fp32": (0, "fp32", None, False),
    "stage 3, bf16": (3, "bf16", None, False),
    "stage 3, fp16, fp16 sums": (3, "fp16", "fp16", False),
    "stage 2, bf16": (2, "bf16", None, False),
    "stage 1, bf16": (1, "bf16", None, False),
    "stage 1, fp16, fp32 sums, overlap": (1, "fp16", "fp32", True),
}
#: Distributed optimizer, precision, tensor and pipeline parallel, format.
MEGATRON = {
    "bf16": (True, "bf16", 1, 1, "fully_reshardable"),
    "fp32, dp_reshardable": (True, "fp32", 1, 1, "dp_reshardable"),
    "bf16, replicated": (False, "bf16", 1, 1, "fully_reshardable"),
    "bf16, tensor parallel": (True, "bf16", 2, 1, "fully_reshardable"),
}
MORE_MEGATRON = {
    "fp32, replicated": (False, "fp32", 1, 1, "fully_reshardable"),
    "bf16, pipeline": (True, "bf16", 1, 2, "fully_reshardable"),
}
SMALL = {"grad_ema_dtype": "bfloat16", "exp_avg_dtype": "bfloat16"}
#: Engine, precision, ALTO's options.
TORCH = {
    "plain, bf16": ("plain", "bf16", {"grad_ema_dtype": "bfloat16"}),
    "plain, fp32, small states": ("plain", "fp32", SMALL),
    "plain, fp32, LAMB": ("plain", "fp32", {"alpha": 0.0}),
    "DDP": ("ddp", "fp32", {}),
    "FSDP2, small states": ("fsdp", "fp32", SMALL),
}


def run_of(precision, **more):
    training = {"global_batch": 8, "micro_batch": 2, "precision": precision, "clip": 1.0, "iterations": 100}
    optimizer = {"name": "alto", "lr": 0.01, "weight_decay": 0.1}
    return parse({"model": MODEL, "training": training, "optimizer": optimizer, **more})


def batches(count):
    return [torch.randint(0, MODEL["vocabulary"], (2, MODEL["sequence"] + 1)) for _ in range(count)]


def storages(tensors):
    """Address -> bytes of what lies under the tensors."""
    memories = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return {memory.data_ptr(): memory.nbytes() for memory in memories if memory.nbytes()}


def all_tensors():
    """All that came into being since :func:`gc.freeze`."""
    found = []
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu":
            found += [thing, thing.grad] if thing.is_leaf and thing.grad is not None else [thing]
    return found


class Watch:
    """The most bytes that each part of an engine had at once."""

    def __init__(self):
        gc.collect()
        gc.freeze()  # what is there now is not looked at any more, which also saves seconds
        self.most = {}
        self.buffer_sizes = set()
        self.started = False

    def follow(self, weights, inner, buffers=lambda: ()):
        """``weights`` and ``buffers`` give tensors; ``inner`` are the optimizers that step."""
        self.weights, self.inner, self.buffers = weights, inner, buffers
        for optimizer in inner:
            optimizer.step = self._looking_first(optimizer.step)

    def _looking_first(self, step):
        def looking(*arguments, **options):
            self.look()
            return step(*arguments, **options)

        return looking

    def note(self, **parts):
        for part, size in parts.items():
            self.most[part] = max(self.most.get(part, 0), size)

    def look_at_buffers(self):
        there = storages(self.buffers())
        self.note(buffers=sum(there.values()))
        self.buffer_sizes |= set(there.values())

    def look(self):
        if not self.started:
            return
        gc.collect()
        known = storages(self.weights())
        self.note(weights=sum(known.values()))
        kept = [state for optimizer in self.inner for state in optimizer.state.values()]
        states = {key: storages(state[key] for state in kept if key in state) for key in STATES}
        master = storages(tensor for optimizer in self.inner for tensor in optimizer.state)
        self.note(master=sum(size for at, size in master.items() if at not in known))
        for key, of_state in states.items():
            self.note(**{key: sum(of_state.values())})
            known |= of_state
        known |= master
        self.look_at_buffers()
        # The fewest of three looks: a thread of gloo's may hold a tensor for a moment after its collective is done.
        self.note(gradients=min(self._others(known, after) for after in (0.0, 0.02, 0.05)))

    def _others(self, known, after):
        """Bytes of what is not known after so many seconds."""
        time.sleep(after)
        found = {at: size for at, size in storages(all_tensors()).items() if at not in known}
        # A buffer may outlive the engine's list of them, as views do; its size, a round one, gives it away.
        return sum(size for size in found.values() if size not in self.buffer_sizes)

    def check(self, expected, saved, directory, what):
        """Hold the fullest rank against the estimate, and all files against theirs."""
        parts = ("weights", "gradients", "buffers", "master", *STATES)
        most = torch.tensor([float(self.most[part]) for part in parts])
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        measured = dict(zip(parts, most.tolist(), strict=True))
        estimated = {part: getattr(expected, part) for part in parts}
        if directory is not None:
            dist.barrier()
            measured["checkpoint"] = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
            estimated["checkpoint"] = saved
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(directory)
        whole = sum(estimated[part] for part in parts)
        for part, size in estimated.items():
            # A part that should not be there may be crumbs.
            bound = 0.02 * size if size else 0.002 * whole
            assert abs(measured[part] - size) <= bound, (what, part, size, measured[part], measured)


@worlds(2)
@each(ZERO, exhaustive=MORE_ZERO)
def case_deepspeed_keeps_what_was_estimated(directory, label, setting):
    stage, precision, accumulated, overlap = setting
    file = directory / f"{label}.{dist.get_rank()}.json"  # one each: a rank must not read what another is writing
    zero = {"stage": stage, "overlap_comm": overlap, "reduce_bucket_size": 2_000_000}
    data_types = {"data_types": {"grad_accum_dtype": accumulated}} if accumulated else {}
    file.write_text(json.dumps({"zero_optimization": zero, **data_types}))
    run = run_of(precision, deepspeed={"config": str(file)})
    watch = Watch()
    engine = on_deepspeed.build(run)
    inside = engine._engine
    parameters = list(inside.module.parameters())
    wrapper = inside.optimizer

    def weights(parameters=parameters):
        return [tensor for p in parameters for tensor in (p, getattr(p, "ds_tensor", None))]

    def buffers(wrapper=wrapper):
        found = [bucket.buffer for bucket in getattr(wrapper, "ipg_buckets", {}).values()]
        flat = [tensor for buffer in found for tensor in (buffer if isinstance(buffer, list) else [buffer])]
        return [tensor for tensor in flat if tensor is not None]

    watch.follow(weights, [inside.basic_optimizer], buffers)
    # In the middle of a backward pass, for stage 2 gives its buffers back at the end.
    inside.module.transformer.h[0].register_full_backward_hook(lambda *_, watch=watch: watch.look_at_buffers())
    for step in range(2):
        watch.started = step == 1
        for tokens in batches(2):
            loss = engine._loss(tokens)
            inside.backward(loss)
            del loss
            watch.look()
            inside.step()
    into = directory / "saved"
    engine.save(into)
    setting = memory.setting_of(run, dist.get_world_size())
    expected, activations = memory.estimate(run, dist.get_world_size())
    assert activations > 0
    watch.check(expected, checkpoint(setting, of_model(run.model)), into, setting)
    engine.close()


@worlds(2)
@each(MEGATRON, exhaustive=MORE_MEGATRON)
def case_megatron_keeps_what_was_estimated(directory, setting):
    distributed, precision, tensor, pipeline, format_ = setting
    layout = {"tensor_parallel": tensor, "pipeline_parallel": pipeline, "checkpoint_format": format_}
    layout |= {"distributed_optimizer": distributed, "overlap": False}
    run = run_of(precision, engine="megatron", megatron=layout)
    watch = Watch()
    engine = on_megatron.build(run)
    with contextlib.ExitStack() as stack:
        stack.callback(parallel_state.destroy_model_parallel)
        wrappers = getattr(engine._optimizer, "chained_optimizers", [engine._optimizer])
        watch.follow(lambda engine=engine: engine._model.parameters(), [w.optimizer for w in wrappers])
        for step in range(2):
            watch.started = step == 1
            engine.train(batches(4 // engine.data_parallel_size), 0.01)
        into = directory / "saved"
        if dist.get_rank() == 0:
            into.mkdir()
        dist.barrier()
        engine.save(into)
        setting = memory.setting_of(run, dist.get_world_size())
        expected, _ = memory.estimate(run, dist.get_world_size())
        watch.check(expected, checkpoint(setting, of_model(run.model)), into, (distributed, precision, layout))


@worlds(2)
@each(TORCH)
def case_torch_keeps_what_was_estimated(directory, setting):
    engine, precision, options = setting
    run = run_of("fp32")
    watch = Watch()
    model = build_model(run).to({"bf16": torch.bfloat16, "fp32": torch.float32}[precision])
    if engine == "fsdp":
        for layer in model.transformer.h:
            fully_shard(layer)
        fully_shard(model)
    parameters = list(model.parameters())
    # Views of the buckets, so that they can be seen at all; without them gradients are there as well.
    through = DistributedDataParallel(model, gradient_as_bucket_view=True) if engine == "ddp" else model
    optimizer = ALTO(param_groups(model), **options)

    def local(tensor):
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    for _ in range(2):
        (tokens,) = batches(1)
        next_token_loss(through(**inputs_of(tokens)).logits, tokens).backward()
        optimizer.step()
    gradients = sum(storages(local(p.grad) for p in parameters).values())
    watch.note(weights=sum(storages(map(local, parameters)).values()), gradients=gradients, master=0)
    watch.note(buffers=gradients if engine == "ddp" else 0)
    for key in STATES:
        kept = [local(state[key]) for state in optimizer.state.values() if key in state]
        watch.note(**{key: sum(storages(kept).values())})
    setting = Setting(engine, dist.get_world_size(), precision, states=memory.states_of("alto", options))
    into = directory / "saved"
    if engine != "fsdp" and dist.get_rank() == 0:
        into.mkdir()
        torch.save([model.state_dict(), optimizer.state_dict()], into / "all.pt")
    sizes = of_model(run.model)
    saved = checkpoint(setting, sizes)
    watch.check(footprint(setting, sizes), saved, into if engine != "fsdp" else None, (engine, precision, options))
