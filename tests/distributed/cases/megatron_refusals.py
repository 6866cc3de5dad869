"""What ALTO must not be used with under Megatron, each with a real model of megatron-core on one rank.

No message is only promised; each is seen. megatron_config.py has the other side: what is accepted.
"""

import dataclasses
import functools
import inspect
import math
import os
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.helpers import megatron_one_rank
from tests.helpers.cases import each, worlds
from tests.helpers.megatron_one_rank import model, optimizer_of, trained

# isort: split
# The imports below need what megatron_gpt, imported by megatron_one_rank, puts in place of a GPU.

from megatron.core import fp8_utils, parallel_state
from megatron.core import optimizer as core_optimizer
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer

from alto_distributed.megatron import AltoOptimizerConfig, altos, register, versions
from alto_distributed.megatron import checkpoint_formats as formats


@functools.cache
def bystander():
    """One model for all refusals: they come before anything is built on it."""
    return model()


def refused(message, config, chunk=None, **options):
    """Refused with this message, and the config and the model are as they were."""
    chunk = chunk or bystander()
    before = dataclasses.asdict(config)
    weights = [p.detach().clone() for p in chunk.parameters()]
    with pytest.raises(ValueError, match=message):
        optimizer_of(config, chunk, **options)
    assert dataclasses.asdict(config) == before
    assert all(map(torch.equal, weights, chunk.parameters()))


def with_attribute(name, value):
    """A config whose attribute was set after it was built, which skips the checks there."""
    config = AltoOptimizerConfig()
    setattr(config, name, value)
    return config


# -- the config ----------------------------------------------------------------------------------------


AWARE = {"use_precision_aware_optimizer": True}
CONFIGS = {
    "alpha at its limit": (
        {"alto_alpha": -100}, r"alpha=-100 is out of range: \|alpha\| must be below .* = 100 for beta1=0.99",
    ),
    "alpha with another beta1": (
        {"alto_alpha": 2.0, "alto_betas": (0.01, 0.9, 0.99)}, r"alpha=2 is out of range",
    ),
    "one beta": (
        {"alto_betas": (0.99,)}, r"betas=\(0.99,\) must be three numbers .*Adam's",
    ),
    "beta2 of 1": (
        {"alto_betas": (0.99, 1.0, 0.99)}, r"betas\[1\] \(beta2\)=1.0 is out of range",
    ),
    "negative eps": (
        {"alto_eps": -1e-6}, r"eps \(eps1\)=-1e-06 is out of range",
    ),
    "two eps": (
        {"alto_eps": (1e-6, 1e-6)}, r"must be one number \(eps1\) or three",
    ),
    "layerwise": (
        {"alto_layerwise": "biases"}, r"layerwise='biases' is not one of 'decayed', 'matrices', 'all', 'none'",
    ),
    "kernel": (
        {"alto_kernel": "apex"}, r"kernel='apex' is not one of 'auto'",
    ),
    "diagnostics_every": (
        {"alto_diagnostics_every": -1}, r"diagnostics_every=-1",
    ),
    "bias_correction": (
        {"alto_bias_correction": "no"}, r"alto_bias_correction='no' must be True or False",
    ),
    "adopt": (
        {"alto_adopt": 1}, r"alto_adopt=1 must be True or False",
    ),
    "no lr": (
        {"lr": None}, r"ALTO under Megatron: lr is not set; give OptimizerConfig\(lr=...\) \(--lr\)",
    ),
    "negative lr": (
        {"lr": -1.0}, r"lr=-1.0 is out of range",
    ),
    "lr is NaN": (
        {"lr": math.nan}, r"lr=nan is out of range",
    ),
    "negative decay": (
        {"weight_decay": -0.1}, r"weight_decay=-0.1 is out of range",
    ),
    "first moment in fp8": (
        {**AWARE, "exp_avg_dtype": torch.uint8}, r"exp_avg_dtype=fp8 is not .*fp32 or bf16 \(--exp-avg-dtype bf16\)",
    ),
    "first moment in fp16": (
        {**AWARE, "exp_avg_dtype": torch.float16}, r"exp_avg_dtype=fp16 is not .*set it to fp32 or bf16",
    ),
    "second moment in bf16": (
        {**AWARE, "exp_avg_sq_dtype": torch.bfloat16}, r"exp_avg_sq_dtype=bf16 .*to fp32 \(--exp-avg-sq-dtype fp32\)",
    ),
    "master weights in fp16": (
        {**AWARE, "main_params_dtype": torch.float16}, r"main_params_dtype=fp16 .*fp32 \(--main-params-dtype fp32\)",
    ),
}  # fmt: skip


@worlds(1)
@each(CONFIGS)
def case_hyperparameters_are_checked_when_the_config_is_built(setting):
    options, message = setting
    with pytest.raises(ValueError, match=message):
        AltoOptimizerConfig(**options)


@worlds(1)
def case_a_plain_config_for_the_precision_aware_optimizer():
    """As verl makes it for every run in bf16. Adam's needs TransformerEngine, as before."""
    given = {"lr": 0.01, "bf16": True, "use_distributed_optimizer": True, **AWARE, "exp_avg_dtype": torch.bfloat16}
    config = OptimizerConfig(optimizer="alto", **given)
    assert {name: getattr(config, name) for name in given} == given
    assert not config.use_precision_aware_optimizer_no_fp8_or_ds_fp8  # what Megatron's optimizers go by
    with pytest.raises(ValueError, match=r"exp_avg_dtype=fp8 is not supported"):
        OptimizerConfig(optimizer="alto", **{**given, "exp_avg_dtype": torch.uint8})
    with pytest.raises((RuntimeError, TypeError)):  # 0.16.1 compares the version of TransformerEngine, None, first
        OptimizerConfig(optimizer="adam", **given)
    with pytest.raises(AssertionError, match="exp_avg_dtype can only be fp32"):
        OptimizerConfig(optimizer="adam", exp_avg_dtype=torch.bfloat16)


@worlds(1)
def case_a_name_that_the_config_does_not_have():
    with pytest.raises(TypeError, match="alto_alhpa"):
        AltoOptimizerConfig(alto_alhpa=-5)


@worlds(1)
def case_hyperparameters_are_checked_again_when_the_optimizer_is_built():
    """A config may have been changed since, and a plain one was never checked."""
    refused(r"alpha=-100 is out of range", with_attribute("alto_alpha", -100))
    refused(r"layerwise='some' is not one of", with_attribute("alto_layerwise", "some"))
    refused(r"kernel='apex' is not one of", with_attribute("alto_kernel", "apex"))
    refused(r"lr is not set; give OptimizerConfig\(lr=...\)", OptimizerConfig(optimizer="alto"))
    refused(r"lr=-1.0 is out of range", OptimizerConfig(optimizer="alto", lr=-1.0))
    refused(r"weight_decay=-1.0 is out of range", OptimizerConfig(optimizer="alto", lr=0.01, weight_decay=-1.0))


FEATURES = {
    "optimizer_cpu_offload": r"needs use_distributed_optimizer=True \(--use-distributed-optimizer\)",
    "reuse_grad_buf_for_mxfp8_param_ag": r"has not been tested; leave out --reuse-grad-buf-for-mxfp8-param-ag",
    # Of main; in 0.16.1 only an attribute.
    "optimizer_cuda_graph": r"captures Adam's step; leave out --optimizer-cuda-graph",
    "use_layer_wise_distributed_optimizer": r"layer-wise distributed optimizer .*--use-distributed-optimizer",
}


@worlds(1)
@each(FEATURES)
def case_features_of_megatron(label, setting):
    refused(setting, with_attribute(label, True))


@worlds(1)
def case_offload_of_more_than_there_is():
    given = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.5, "use_distributed_optimizer": True}
    refused(r"optimizer_offload_fraction=1.5 is not the share.*between 0 and 1", AltoOptimizerConfig(**given))


@worlds(1)
def case_coupled_weight_decay():
    coupled = r"adds the decay to the gradient.*set decoupled_weight_decay=True"
    refused(coupled, AltoOptimizerConfig(decoupled_weight_decay=False))
    refused(coupled, OptimizerConfig(optimizer="alto", lr=0.01, decoupled_weight_decay=False))


@worlds(1)
def case_widths_of_mup():
    chunk = model()
    chunk.config.use_mup = True
    refused(r"divides the learning rate of hidden layers.*leave out --use-mup", AltoOptimizerConfig(), chunk)


@worlds(1)
@each({"eps": 1e-5, "optimizer": "adam", "alto_alpha": 0.0, "weight_decay": 0.0})
def case_overrides_that_would_have_no_effect(label, setting):
    refused(
        rf"a config override sets '{label}' for some parameters, which would have no effect; ALTO takes max_lr, "
        "min_lr, start_wd, end_wd, wd_mult there",
        AltoOptimizerConfig(),
        config_overrides={ParamKey(name="*.bias"): {label: setting}},
    )


@worlds(1)
def case_overrides_for_some_parameters():
    biases = ParamKey(name="*.bias")
    config = AltoOptimizerConfig(lr=0.01, min_lr=0.001)
    given = {biases: {"max_lr": 0.5, "min_lr": 0.4, "wd_mult": 0.0}}
    (alto,) = altos(optimizer_of(config, config_overrides=given))
    assert {(g["max_lr"], g["min_lr"], g["decayed"], g["weight_decay"]) for g in alto.param_groups} == {
        (0.01, 0.001, True, 1e-4),
        (0.5, 0.4, False, 0.0),
    }


@worlds(1)
@each({"adam_beta1": "alto_betas", "adam_beta2": "alto_betas", "adam_eps": "alto_eps"})
def case_what_was_meant_for_adam_is_said_to_have_no_effect(label, setting):
    with pytest.warns(UserWarning, match=f"{label}=0.5 has no effect on ALTO, which has {setting}") as said:
        optimizer_of(AltoOptimizerConfig(**{label: 0.5}))
    (ours_alone,) = [w for w in said if "has no effect on ALTO" in str(w.message)]
    assert ours_alone.filename == megatron_one_rank.__file__, "it points at the caller"


@worlds(1)
def case_remainders_of_weights_are_said_to_have_no_effect():
    aware = AltoOptimizerConfig(bf16=True, **AWARE)
    with pytest.warns(UserWarning, match=r"store_param_remainders has no effect on ALTO.*2 bytes a parameter more"):
        optimizer_of(aware)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        optimizer_of(dataclasses.replace(aware, store_param_remainders=False))
        optimizer_of(AltoOptimizerConfig(bf16=True))
    assert not [w for w in said if "remainders" in str(w.message)]


# -- the model -----------------------------------------------------------------------------------------


class TorchFullyShardedDataParallel(nn.Linear):
    """Goes by the name of Megatron's wrapper for torch's FSDP2, which needs a GPU."""


class FullyShardedDataParallelV2(nn.Linear):
    """Goes by the name of version 2 of Megatron-FSDP, which is in main alone."""

    ddp_config = DistributedDataParallelConfig(use_megatron_fsdp=True)


WRAPPERS = {
    "torch": (
        TorchFullyShardedDataParallel,
        r"torch's FSDP2 inside Megatron has not been tested; use Megatron-FSDP \(--use-megatron-fsdp\) or",
    ),
    "version 2 of Megatron's": (
        FullyShardedDataParallelV2,
        r"version 2 of Megatron-FSDP has not been tested; set ddp_config.megatron_fsdp_version=1 \(--megatron-fsdp-v",
    ),
}


@worlds(1)
@each(WRAPPERS)
def case_fsdp_of_other_kinds(setting):
    wrapper, message = setting
    refused(message, AltoOptimizerConfig(), wrapper(2, 2))


@worlds(1)
@each(where=("model", "ddp_config"))
def case_parameters_in_fp4(where):
    message = r"in fp4 \(fp4_param\) have not been tested; leave out --fp4-param-gather"
    chunk = model()
    if where == "model":
        chunk.config.fp4_param = True
    else:
        chunk.ddp_config.fp4_param_gather = True
    refused(message, AltoOptimizerConfig(), chunk)


@worlds(1)
def case_experts_packed_into_one_tensor():
    """A layout can tell them apart, which DTensors do not have; megatron_experts.py has what is accepted."""
    chunk = model()
    packed = chunk.module.packed = nn.Linear(3, 8)
    packed.single_grouped_weight, packed.num_gemms = True, 4
    message = r"single_grouped_weight of Linear has 4 experts and a weight of shape \(8, 3\), whose first dimension"
    refused(message, AltoOptimizerConfig(), chunk)
    packed.num_gemms = 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk.ddp_config, "use_megatron_fsdp", True)
        message = r"experts that share a parameter would share a layer-wise ratio; leave out --moe-use-legacy-grouped-g"
        refused(message, AltoOptimizerConfig(use_distributed_optimizer=True), chunk)


@worlds(1)
def case_expert_parallelism_under_fsdp():
    chunk = model()
    chunk.config.expert_model_parallel_size, chunk.ddp_config.use_megatron_fsdp = 2, True
    message = r"expert_model_parallel_size=2 has not been tested with Megatron-FSDP; set it to 1 \(--expert-model-para"
    refused(message, AltoOptimizerConfig(use_distributed_optimizer=True), chunk)


@worlds(1)
def case_parameters_of_other_kinds():
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    chunk = model()
    chunk.module.more = nn.Module()
    mesh = init_device_mesh("cpu", (1,))
    chunk.module.more.weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Replicate()]))
    refused(
        r"module.more.weight is a DTensor; use Megatron's own DistributedDataParallel", AltoOptimizerConfig(), chunk
    )

    class Float8(nn.Parameter):
        """In the place of TransformerEngine's class, which is not there."""

    chunk.module.more.weight = Float8(torch.ones(2, 2))
    with pytest.MonkeyPatch.context() as patch:
        optimizer_of(AltoOptimizerConfig(), bystander())  # nothing to refuse yet
        patch.setattr(fp8_utils, "HAVE_TE_FP8_TENSOR_CLASS", True)
        patch.setattr(fp8_utils, "FP8_TENSOR_CLASS", Float8, raising=False)
        message = r"module.more.weight is kept in fp8; use the distributed optimizer .*or leave out --fp8-param-gather"
        refused(message, AltoOptimizerConfig(), chunk)
        offload = AltoOptimizerConfig(optimizer_cpu_offload=True, use_distributed_optimizer=True)
        refused(r"float32 weights on the GPU; leave out --fp8-param-gather or --optimizer-cpu-off", offload, chunk)


@worlds(1)
@each(function=("get_gtp_weight_remat_world_size", "get_expert_gtp_weight_remat_world_size"))
def case_weights_sharded_for_rematerialisation(function):
    """Groups that only main has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_state, function, lambda: 2, raising=False)
        refused(r"weights sharded for rematerialisation \(GTP\).*set the GTP sizes to 1", AltoOptimizerConfig())


@worlds(1)
def case_a_wrapper_that_is_not_known():
    class Another(FP32Optimizer):
        pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_optimizer, "FP32Optimizer", Another)
        refused(
            r"does not know how Megatron's Another shards parameters. It works with FP32Optimizer, "
            r"Float16OptimizerWithFloat16Params, DistributedOptimizer: turn off",
            AltoOptimizerConfig(),
        )


# -- the version ---------------------------------------------------------------------------------------


@worlds(1)
def case_versions():
    versions.check_version()
    with pytest.MonkeyPatch.context() as patch:
        for unknown in ("0.15.0", "0.16.0", "0.16.10", "0.17.0", "1.16.1", "dev"):
            patch.setattr("megatron.core.__version__", unknown)
            versions.check_version()
            with pytest.warns(UserWarning, match=rf"and {re.escape(unknown)} is installed"):
                versions.warn_if_untested()
        patch.setattr("megatron.core.__version__", "0.16.1+abcdef0")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            versions.warn_if_untested()


@worlds(1)
def case_a_known_number_on_unknown_code():
    """A main branch keeps its number while its code changes."""

    def other(self, something_else):
        raise NotImplementedError

    def build_optimizer(configuration, chunks):
        raise NotImplementedError

    name = "_get_model_param_range_map"
    for change, message in (
        (lambda patch: patch.setattr(DistributedOptimizer, name, other), rf"{name} does not take \(param\)"),
        (lambda patch: patch.delattr(DistributedOptimizer, name), f"DistributedOptimizer has no method {name}"),
        (
            lambda patch: patch.setattr(core_optimizer, "get_megatron_optimizer", build_optimizer),
            r"get_megatron_optimizer does not take \(config, model_chunks, ...\)",
        ),
    ):
        with pytest.MonkeyPatch.context() as patch:
            change(patch)
            with pytest.raises(ValueError, match=message) as refusal:
                versions.check_version()
            assert "pip install megatron-core==0.16.1" in str(refusal.value)


@worlds(1)
def case_unknown_code_is_not_registered_with():
    original = get_megatron_optimizer.__wrapped__
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(DistributedOptimizer, "_get_model_param_range_map")
        patch.setattr(core_optimizer, "get_megatron_optimizer", original)
        with pytest.raises(ValueError, match="no method _get_model_param_range_map"):
            register()
        assert core_optimizer.get_megatron_optimizer is original


# -- checkpoints ---------------------------------------------------------------------------------------


def code_of_method(path, name):
    """The code of a method in a file that is not imported."""
    codes = [compile(path.read_text(), str(path), "exec")]
    for code in codes:
        codes += [inner for inner in code.co_consts if hasattr(inner, "co_name")]
    (found,) = [code for code in codes if code.co_name == name]
    return found


@worlds(1)
def case_the_repair_of_padding_is_looked_for_in_the_code():
    """In what is installed, and in the tree of Megatron-LM that ALTO_MEGATRON_LM names, if there is one."""

    def repaired(buffer):
        cumulative_padding_stripped = [0]
        return [cumulative_padding_stripped[-1] for _ in buffer]

    def faulty(buffer):
        return list(buffer)

    assert formats.allows_for_padding(repaired.__code__)
    assert not formats.allows_for_padding(faulty.__code__)
    files = [Path(inspect.getfile(DistributedOptimizer))]
    if os.environ.get("ALTO_MEGATRON_LM"):
        files.append(Path(os.environ["ALTO_MEGATRON_LM"], "megatron/core/optimizer/distrib_optimizer.py"))
    for file in files:
        code = code_of_method(file, "sharded_param_state_fully_reshardable")
        # What Megatron itself said of the fault, until it was repaired.
        confessed = "It will be padded with zeros which can lead to" in file.read_text()
        assert formats.allows_for_padding(code) == (not confessed), file
    installed = DistributedOptimizer.sharded_param_state_fully_reshardable.__code__
    code = code_of_method(files[0], installed.co_name)
    assert formats.allows_for_padding(installed) == formats.allows_for_padding(code)


def loaded(saved, config, message=None):
    optimizer = optimizer_of(config)
    if message is None:
        optimizer.load_state_dict(saved)
        return optimizer
    before = [p.detach().clone() for alto in altos(optimizer) for g in alto.param_groups for p in g["params"]]
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    (alto,) = altos(optimizer)
    assert all(map(torch.equal, before, [p for g in alto.param_groups for p in g["params"]]))
    return None


@worlds(1)
@each(distributed=(False, True))
def case_checkpoints_of_another_optimizer(distributed):
    ours = AltoOptimizerConfig(use_distributed_optimizer=distributed)
    alto, _ = trained(ours)
    adam, _ = trained(OptimizerConfig(optimizer="adam", lr=0.01, use_distributed_optimizer=distributed))
    loaded(adam.state_dict(), ours, r"another optimizer: it has no 'grad_ema'.*alto_adopt=True \(--alto-adopt\)")
    adopting = dataclasses.replace(ours, alto_adopt=True)
    loaded(alto.state_dict(), adopting, r"saved by ALTO and has 'grad_ema'.*alto_adopt=False \(leave out --alto-adopt")
    lamb = dataclasses.replace(ours, alto_alpha=0.0)
    loaded(alto.state_dict(), lamb, r"the checkpoint has 'grad_ema' and this run has not .*alto_alpha=-5.0 \(--alto-a")
    saved = trained(lamb)[0].state_dict()
    loaded(saved, ours, r"this run has 'grad_ema' and the checkpoint has not .*alto_alpha=0.0 \(--alto-alpha\)")
    loaded(saved, lamb)


@worlds(1)
def case_hyperparameters_come_from_the_checkpoint():
    saved = trained(AltoOptimizerConfig())[0].state_dict()
    other = AltoOptimizerConfig(alto_alpha=-2.0, alto_layerwise="all", alto_bias_correction=False)
    with pytest.warns(UserWarning, match="ALTO goes on") as said:
        (alto,) = altos(loaded(saved, other))
    ours = [str(w.message) for w in said if str(w.message).startswith("ALTO goes on")]
    assert ours == [
        "ALTO goes on with the checkpoint's alpha=-5.0, not with this run's -2.0",
        "ALTO goes on with the checkpoint's layerwise=decayed, not with this run's all",
        "ALTO goes on with the checkpoint's bias_correction=True, not with this run's False",
    ]
    assert {(g["alpha"], g["layerwise"], g["bias_correction"]) for g in alto.param_groups} == {(-5.0, "decayed", True)}
