"""Megatron-Bridge's own ``setup_optimizer``, from a tree of it, with ALTO's config; or the same training without it.

    torchrun --nproc-per-node 2 scripts/megatron_on_cpu.py tests/end_to_end/programs/train_bridge.py TREE bridge|core

Bridge itself wants Python 3.12 and packages for GPUs. So of its config module only the classes that ``setup_optimizer``
knows are run; its ``training/optim.py`` is whole. Rank 0 prints a line of JSON every step, and what trained at the end.
"""

import ast
import importlib.util
import json
import sys
import types
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from alto_distributed.megatron import AltoOptimizerConfig
from tests.end_to_end.programs.train_megatron import build_model, train

STEPS, WARMUP = 12, 4
OF_CONFIG = {
    "OptimizerConfig",
    "OptimizerConfigOverrideProvider",
    "OptimizerConfigOverrideProviderContext",
    "SchedulerConfig",
}


def bridge_of(tree):
    """Modules ``megatron.bridge.training.optim`` and ``config`` of a tree."""
    folder = Path(tree, "src/megatron/bridge/training")
    for name in ("megatron.bridge", "megatron.bridge.training"):
        sys.modules[name] = package = types.ModuleType(name)
        package.__path__ = []
    name = "megatron.bridge.training.config"
    sys.modules[name] = config = types.ModuleType(name)
    kept = [node for node in ast.parse((folder / "config.py").read_text()).body if is_wanted(node)]
    exec(compile(ast.Module(kept, []), folder / "config.py", "exec"), vars(config))
    spec = importlib.util.spec_from_file_location("megatron.bridge.training.optim", folder / "optim.py")
    optim = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(optim)
    return optim, config


def is_wanted(node):
    if isinstance(node, ast.ClassDef):
        return node.name in OF_CONFIG
    return isinstance(node, ast.Import | ast.ImportFrom) and not ast.unparse(node).startswith("from megatron.bridge")


def build(tree, door, model):
    """The optimizer and its scheduler, and how often Bridge has asked ALTO's config for the first."""
    optim, config = bridge_of(tree)
    alto = AltoOptimizerConfig(lr=0.1, min_lr=0.01, use_distributed_optimizer=True, clip_grad=1.0)
    alto.alto_alpha = -3.0  # as an override does
    alto.finalize()
    schedule = config.SchedulerConfig(start_weight_decay=1e-3, end_weight_decay=1e-3)
    # What ConfigContainer.validate() works out.
    schedule.lr_decay_steps, schedule.lr_warmup_steps, schedule.wd_incr_steps = STEPS, WARMUP, STEPS
    asked = []
    if door == "core":
        optimizer = get_megatron_optimizer(alto, [model], config_overrides=get_standard_config_overrides(alto))
        return optimizer, optim._get_scheduler(alto, schedule, optimizer), asked
    provide = alto.provide
    alto.provide = lambda **given: asked.append(sorted(given)) or provide(**given)
    optimizer, scheduler = optim.setup_optimizer(alto, schedule, [model], use_gloo_process_groups=True)
    # Around the loading of checkpoints; both are for Adam's.
    with optim.memory_efficient_fp32_optimizer_state_loading(optimizer) as patched:
        assert patched == 0
    assert optim.sync_hybrid_device_optimizer_fp32_master_copies(optimizer) is False
    return optimizer, scheduler, asked


def main():
    tree, door = sys.argv[1:]
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)
    model = build_model()
    optimizer, scheduler, asked = build(tree, door, model)
    for step, loss in train(model, optimizer, STEPS):
        scheduler.step(increment=1)
        if dist.get_rank() == 0:
            rates = sorted({group["lr"] for group in optimizer.param_groups})
            print(json.dumps({"step": step, "loss": loss, "rates": rates}), flush=True)
    if dist.get_rank() == 0:
        (wrapper,) = optimizer.chained_optimizers
        alphas = sorted({group["alpha"] for group in wrapper.param_groups})
        names = {"wrapper": type(wrapper).__name__, "optimizer": type(wrapper.optimizer).__name__}
        print(json.dumps({"asked": asked, "alphas": alphas, **names}), flush=True)


if __name__ == "__main__":
    from alto_distributed.sharding.shutdown import leave

    main()
    leave()
